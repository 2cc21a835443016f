"""Which experts a mixture-of-experts model chose for each token, when the engine says so.

An engine that gives routings gives them once, with the end of a reply, for every position that was an input: all but
the last token sampled. They are kept with the node a position belongs to, from the first call that computed them; the
last token of a reply gets its own with the call that goes on from it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gyre_data.errors import EngineError
from gyre_data.types import RoutedExperts

__all__ = ["ExpertShape", "KnownExperts", "Routing"]

Span = tuple[str, int, int]
"""A node and the positions it covers, half open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """What one token's routing consists of."""

    num_layers: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """Routings of the positions from `start` on, as (position, layer, k)."""

    start: int
    experts: npt.NDArray[np.int16]

    @classmethod
    def read(cls, text: str, shape: ExpertShape, start: int, num_tokens: int) -> Routing:
        """Decode what an engine says of `num_tokens` positions; raise EngineError when it is of another size."""
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise EngineError(f"wanted routed experts as base64 of int32 values, got {error}") from error
        wanted = (num_tokens, shape.num_layers, shape.top_k)
        if flat.size != num_tokens * shape.num_layers * shape.top_k:
            raise EngineError(f"wanted routed experts for (token, layer, k) = {wanted}, got {flat.size} values")
        return cls(start=start, experts=flat.reshape(wanted).astype(np.int16))


class KnownExperts:
    """How many tokens of each node, from its first on, have their routing on record. One for each execution."""

    def __init__(self, rows: Iterable[RoutedExperts] = ()) -> None:
        self._known: dict[str, int] = {}
        for row in rows:
            num_tokens = len(row.experts) // (row.num_layers * row.top_k)
            self._known[row.node_id] = max(self._known.get(row.node_id, 0), (row.start or 0) + num_tokens)

    def unknown_from(self, path: Iterable[Span]) -> int:
        """First position of a prompt whose routing is not on record; its length when all are."""
        at = 0
        for node_id, start, at in path:
            known = self._known.get(node_id, 0)
            if start + known < at:
                return start + known
        return at

    def rows(self, call_id: str, path: Iterable[Span], routing: Routing) -> list[RoutedExperts]:
        """Rows for what `routing` says of a path and is not on record yet; from here on it counts as recorded."""
        rows: list[RoutedExperts] = []
        end = routing.start + len(routing.experts)
        for node_id, start, stop in path:
            known = self._known.get(node_id, 0)
            first, last = start + known, min(stop, end)
            if first >= last or first < routing.start:
                continue
            part = routing.experts[first - routing.start : last - routing.start]
            self._known[node_id] = last - start
            rows.append(
                RoutedExperts(
                    node_id=node_id,
                    call_id=call_id,
                    num_layers=part.shape[1],
                    top_k=part.shape[2],
                    start=known,
                    experts=part.reshape(-1),
                )
            )
        return rows
