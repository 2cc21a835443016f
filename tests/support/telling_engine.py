"""Scripted engines that share one policy: a token's log-prob tells which engine sampled it, and at which position."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.scripted_engine import ScriptedEngine

__all__ = ["Policy", "TellingEngine", "routed", "told"]


class Policy:
    """What each call's whole reply is, whichever engine is asked for the rest of it."""

    def __init__(self, sample: Callable[[Sequence[int]], list[int]]) -> None:
        self._sample = sample
        self.whole: dict[str, tuple[int, list[int]]] = {}

    def rest(self, call_id: str, input_ids: list[int]) -> tuple[int, list[int]]:
        """How many tokens of the call's reply `input_ids` hold already, and those that are missing."""
        start, ids = self.whole.setdefault(call_id, (len(input_ids), self._sample(input_ids)))
        assert input_ids[start:] == ids[: len(input_ids) - start], "a continuation goes on from what was sampled"
        return len(input_ids) - start, ids[len(input_ids) - start :]


class TellingEngine(ScriptedEngine):
    """`faults` are taken by one request each: after how many tokens it dies, or None. One token per delta.

    It dies once `dying` says so: what a proxy has not looked at when the connection breaks is sampled again.
    """

    def __init__(self, policy: Policy, number: int, *, pause_s: float = 0.0, **options: Any) -> None:
        super().__init__([], **options)
        self.policy, self.number, self.pause_s = policy, number, pause_s
        self.faults: list[int | None] = []
        self.dying: Callable[[], Awaitable[Any]] = lambda: asyncio.sleep(0)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        done, rest = self.policy.rest(body["rid"].rpartition(".")[0], body["input_ids"])
        fault = self.faults.pop(0) if self.faults else None
        asked = body["sampling_params"]["max_new_tokens"]
        whole = len(rest) <= asked
        deltas = [{"ids": [token], "lps": [told(self.number, done + i)]} for i, token in enumerate(rest[:asked])]
        finish = {"type": "stop", "matched": rest[-1]} if whole else {"type": "length", "length": asked}
        script = {"deltas": deltas, "finish": finish, "weight_version": self.version}
        return script if fault is None else {**script, "die_after": min(fault, len(deltas))}

    async def _chunks(self, reply: dict[str, Any], body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        async for chunk in super()._chunks(reply, body):
            if chunk is None:
                await self.dying()
            if chunk and chunk["meta_info"]["finish_reason"] and body.get("return_routed_experts"):
                last = len(body["input_ids"]) + chunk["meta_info"]["completion_tokens"] - 1
                positions = np.arange(body["routed_experts_start_len"], last)
                chunk["meta_info"]["routed_experts"] = base64.b64encode(routed(positions).tobytes()).decode()
            yield chunk
            await asyncio.sleep(self.pause_s)


def routed(positions: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """The experts of these positions, whichever engine computes them: two layers, three experts each."""
    return (positions[:, None, None] * 6 + np.arange(6).reshape(2, 3)).astype(np.int32) % 1000


def told(number: int, position: int) -> float:
    """The log-prob that engine `number` gives to a reply's token at `position`."""
    return -(number + 1) - position / 1000
