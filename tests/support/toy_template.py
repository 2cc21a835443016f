"""The toy tokenizer and templates of the cases behind the proxy's `Template` seam."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre_data.types import Ints
from gyre_proxy.message import Message
from gyre_proxy.template import Encoded
from tests.support import toy_tokenizer as toy

TEMPLATES = ("chatml", "chatml_strip", "chatml_group", "glm")


class ToyTemplate:
    """`name` is one of TEMPLATES. Tools are rendered in front as a system turn, so that they matter."""

    def __init__(self, name: str = "chatml") -> None:
        self.name = name
        self.fingerprint = f"toy-{name}"
        ends = ("<|user|>", "<|observation|>", "<|endoftext|>") if name == "glm" else ("<|im_end|>", "<|endoftext|>")
        self.stop_ids = frozenset(toy.SPECIAL[end] for end in ends)
        self.think_ids = (toy.SPECIAL["<think>"], toy.SPECIAL["</think>"])
        self.vocab_size = 310
        self.control_tokens = dict(toy.SPECIAL)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        chat = [message.for_template() for message in messages]
        if tools:
            chat.insert(0, {"role": "system", "content": "Tools: " + repr([dict(tool) for tool in tools])})
        return toy.render(chat, self.name, add_generation_prompt)

    def encode(self, text: str) -> Encoded:
        ids = toy.encode(text)
        starts, at, partial = [], 0, b""
        for token in ids:
            starts.append(at)
            if token in toy._TEXT_OF:
                at += len(toy._TEXT_OF[token])
                continue
            partial += bytes([token])
            try:
                at += len(partial.decode())
            except UnicodeDecodeError:
                continue
            partial = b""
        return Encoded(ids=np.array(ids, dtype=np.int32), starts=np.array(starts, dtype=np.int32))

    def decode(self, ids: Ints) -> str:
        return toy.decode([int(i) for i in ids])
