"""Sampled ids to reply events, with the client's own stop sequences cut off.

The engine stops at a stop sequence but leaves it in the ids; what a client sees ends before it. The ids stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_data.types import Ints

from .message import ReplyEvent
from .parse import Detokenizer, ReplyParser

__all__ = ["ReplyText", "StopSequences"]


class StopSequences:
    """Passes text on up to the first stop sequence, holding back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The part of the text that is certain to come before any stop sequence."""
        if not self._stops or self.hit is not None:
            return "" if self.hit is not None else text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            return self._release(at)
        return self._release(len(self._held) - max(map(self._overlap, self._stops)))

    def finish(self) -> str:
        """What was held back after all."""
        return "" if self.hit is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        return out

    def _overlap(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


class ReplyText:
    """Detokenizer, stop sequences and parser in a row."""

    def __init__(self, detokenizer: Detokenizer, parser: ReplyParser, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._parser, self._stops = detokenizer, parser, StopSequences(stops)

    @property
    def stopped(self) -> str | None:
        """The stop sequence that ended the visible text."""
        return self._stops.hit

    def feed(self, token_ids: Ints) -> list[ReplyEvent]:
        """Events that are certain after these ids."""
        text = self._stops.feed(self._detokenizer.feed(token_ids.tolist()))
        return self._parser.feed(text) if text else []

    def finish(self) -> list[ReplyEvent]:
        """The events that the end decides."""
        text = self._stops.finish()
        return [*(self._parser.feed(text) if text else []), *self._parser.finish()]
