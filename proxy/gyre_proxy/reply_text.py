"""Sampled ids to reply events, with the client's own stop sequences cut off.

The engine stops at a stop sequence but leaves it in the ids; what a client sees ends before it. The ids stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_data.types import Ints

from .message import ReplyEvent
from .parse import Detokenizer, ReplyParser, StopText

__all__ = ["ReplyText"]


class ReplyText:
    """Detokenizer, stop sequences and parser in a row."""

    def __init__(self, detokenizer: Detokenizer, parser: ReplyParser, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._parser, self._stops = detokenizer, parser, StopText(stops)

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
