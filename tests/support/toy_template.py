"""The toy tokenizer and templates of the cases behind the proxy's `Template` seam."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gyre_data.types import Ints
from gyre_proxy.inert import Encoded
from gyre_proxy.message import Message
from tests.support import toy_tokenizer as toy

TEMPLATES = ("chatml", "chatml_strip", "chatml_group", "glm")


class ToyTemplate:
    """`name` is one of TEMPLATES. Tools are rendered in front as a system turn, so that they matter."""

    def __init__(self, name: str = "chatml") -> None:
        self.name = name
        self.fingerprint = f"toy-{name}"
        ends = ("<|user|>", "<|observation|>", "<|endoftext|>") if name == "glm" else ("<|im_end|>", "<|endoftext|>")
        self.stop_ids = frozenset(toy.SPECIAL[end] for end in ends)
        self.stop_texts = {end: toy.SPECIAL[end] for end in sorted(ends, key=toy.SPECIAL.__getitem__)}
        self.think_ids = (toy.SPECIAL["<think>"], toy.SPECIAL["</think>"])
        self.vocab_size = 310
        self.control_tokens = dict(toy.SPECIAL)
        self.guarded = frozenset(toy.SPECIAL)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        chat = [message.for_template() for message in messages]
        if tools:
            chat.insert(0, {"role": "system", "content": "Tools: " + repr([dict(tool) for tool in tools])})
        return toy.render(chat, self.name, add_generation_prompt)

    def encode(self, text: str, mark: str = "") -> Encoded:
        """With a mark, the text between the template's own control tokens has no control token in it."""
        if not mark:
            whole = toy.encode(text)
            return Encoded(ids=np.array(whole, dtype=np.int32), starts=np.array(toy.starts_of(whole), dtype=np.int32))
        tokens = "|".join(map(re.escape, toy.SPECIAL))
        marked = f"({mark}b(?:{tokens})|(?:{tokens}){mark}a|{mark}[abz])"
        ids, starts, at = [], [], 0
        plain: list[tuple[str, int]] = []  # characters that are text, with their place

        def flush() -> None:
            ids.extend(encoded := toy.encode_plain("".join(c for c, _ in plain)))
            starts.extend(plain[i][1] for i in toy.starts_of(encoded))
            plain.clear()

        for found in re.finditer(f"{marked}|({tokens})", text):
            plain += [(text[i], i) for i in range(at, found.start())]
            at = found.end()
            if found[1]:
                cut = next(re.finditer(f"{mark}[abz]", found[0])).span()
                places = [i for i in range(len(found[0])) if not cut[0] <= i < cut[1]]
                plain += [(found[0][i], found.start() + i) for i in places]
            else:
                flush()
                ids.append(toy.SPECIAL[found[0]])
                starts.append(found.start())
        plain += [(text[i], i) for i in range(at, len(text))]
        flush()
        return Encoded(ids=np.array(ids, dtype=np.int32), starts=np.array(starts, dtype=np.int32))

    def decode(self, ids: Ints) -> str:
        return toy.decode([int(i) for i in ids])
