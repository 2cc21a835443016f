"""Replies chosen by what a prompt says last, in the ids of a real tokenizer: flows of unmodified clients, repeatable.

A rule is a mark and a reply. The rule whose mark stands nearest to the end of the prompt's new part answers, so the
order in which a client's agents call does not matter. The new part begins after the newest assistant turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gyre_proxy.template import ChatTemplate
from tests.support.scripted_engine import ScriptedEngine

__all__ = ["Answer", "Flow", "calling", "engine_reply"]

Answer = str | Callable[[str], str]

_OPENING = "<|im_start|>assistant\n"
_CLOSE = "<|im_end|>"
_MOST_REPLIES = 60


def calling(name: str, text: str = "", /, **arguments: Any) -> str:
    """A reply with one tool call, as Qwen3 writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{text}<tool_call>\n{call}\n</tool_call>"


def engine_reply(template: ChatTemplate, text: str, per_delta: int = 8) -> dict[str, Any]:
    """A scripted engine's reply that says `text` and stops."""
    ids = template.encode(text + _CLOSE).ids.tolist()
    cuts = range(0, len(ids), per_delta)
    deltas = [ids[at : at + per_delta] for at in cuts]
    return {"deltas": [{"ids": part, "lps": [-0.01 * (1 + token % 50) for token in part]} for part in deltas]}


class Flow(ScriptedEngine):
    """A scripted engine whose replies are found by rules.

    `whole` are rules that come first and hold wherever their mark stands. `answered` lists the marks of the rules that
    replied, `sampled` how many tokens each reply had, both in order; `unanswered` what no rule had an answer to.
    """

    def __init__(
        self, template: ChatTemplate, rules: Mapping[str, Answer], whole: Mapping[str, Answer] | None = None
    ) -> None:
        super().__init__([], vocab=template.vocab_size)
        self.template, self.rules, self.whole = template, rules, whole or {}
        self.answered: list[str] = []
        self.sampled: list[int] = []
        self.unanswered: list[str] = []

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = self.template.decode(np.array(body["input_ids"], np.int32))
        before, _, _ = prompt.rpartition(_OPENING)
        new = before.rpartition(_OPENING)[2]
        mark = next((mark for mark in self.whole if mark in prompt), None)
        if mark is None:
            place, mark = max((new.rfind(mark), mark) for mark in self.rules)
            if place < 0 or len(self.answered) >= _MOST_REPLIES:  # two rules may call for one another for ever
                self.unanswered.append(new)
                return {"refuse": (400, "no rule of this flow has an answer")}
        answer = {**self.rules, **self.whole}[mark]
        reply = engine_reply(self.template, answer(new) if callable(answer) else answer)
        self.answered.append(mark)
        self.sampled.append(sum(len(delta["ids"]) for delta in reply["deltas"]))
        return reply
