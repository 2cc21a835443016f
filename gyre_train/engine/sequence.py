"""One request inside the engine: what was asked, what has been computed, what has been sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .kv import KvBuffer
from .sampling import SamplingParams

__all__ = ["Sequence"]

Finish = Mapping[str, Any]


class Sequence:
    """State of one request. The loop's thread writes it; other threads read only what `snapshot` returns.

    `output_ids`, `logprobs` and the version spans only grow and always agree in length; `finish_reason` is set last and
    once; `on_change` is called after every change.
    """

    __slots__ = (
        "_ids",
        "_num_visible",
        "_spans",
        "arrived_at",
        "buffer",
        "cached_tokens",
        "extra_key",
        "finish_reason",
        "finished_at",
        "limit",
        "logprobs",
        "num_retractions",
        "on_change",
        "output_ids",
        "params",
        "prompt_ids",
        "rid",
        "routes",
    )

    def __init__(
        self,
        *,
        rid: str,
        prompt_ids: np.ndarray,
        params: SamplingParams,
        extra_key: str | None,
        on_change: Callable[[], None],
    ) -> None:
        self.rid = rid
        self.prompt_ids = prompt_ids
        self.params = params
        self.extra_key = extra_key
        self.on_change = on_change
        self.limit = 0
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.buffer: KvBuffer | None = None
        self.cached_tokens = 0
        self.num_retractions = 0
        self.finish_reason: Finish | None = None
        self.routes: np.ndarray | None = None
        self.arrived_at = time.monotonic()
        self.finished_at = 0.0
        self._ids = prompt_ids
        self._spans: list[tuple[str, int]] = []
        self._num_visible = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def known_ids(self, start: int, end: int) -> np.ndarray:
        """Tokens `start` to `end` of prompt and output together, as a view."""
        return self._ids[start:end]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Add one sampled token with its log-prob and the weights that gave it."""
        position = self.num_tokens
        if position >= len(self._ids):
            grown = np.empty(max(64, position * 3 // 2), dtype=np.int32)
            grown[:position] = self._ids[:position]
            self._ids = grown
        self._ids[position] = token
        if not self._spans or self._spans[-1][0] != version:
            self._spans.append((version, len(self.output_ids)))
        self.logprobs.append(logprob)
        self.output_ids.append(token)
        self._num_visible += 1

    def finish(self, reason: Finish) -> None:
        """End the request; nothing is added to it afterwards. `routes` are those of all tokens that were inputs."""
        if self.buffer is not None and self.buffer.routes.shape[2]:
            self.routes = self.buffer.routes[: self.buffer.length].copy()
        self.buffer = None
        self.finished_at = time.monotonic()
        self.finish_reason = reason

    def snapshot(self) -> tuple[Finish | None, int]:
        """The finish reason and how many outputs may be read; in this order, so that a finished one is whole."""
        reason = self.finish_reason
        return reason, self._num_visible

    def spans(self, num: int, current: str) -> list[dict[str, Any]]:
        """Which weights gave outputs 0 to `num`, as ranges that cover them without a gap."""
        starts = [span for span in list(self._spans) if span[1] < num] or [(current, 0)]
        ends = [start for _, start in starts[1:]] + [num]
        return [
            {"version": version, "start": start, "end": end} for (version, start), end in zip(starts, ends, strict=True)
        ]
