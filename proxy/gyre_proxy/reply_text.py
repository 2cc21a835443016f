"""Sampled ids to reply events, with the client's own stop sequences cut off.

The engine stops at a stop sequence but leaves it in the ids; what a client sees ends before it. The ids stay whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_data.errors import CaptureError
from gyre_data.types import Floats, Ints

from .message import ReplyEvent, Text, TokenLogprob
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

    def visible(self, token_ids: Ints, logprobs: Floats) -> tuple[TokenLogprob, ...]:
        """The tokens of a whole reply that its client sees, each cut to what is seen: joined, the visible text.

        Reasoning, calls and markers have no part in it, though they are sampled and recorded as every token is. Only
        for a fresh object, which is used up.
        """
        pieces = [self._detokenizer.feed([token]) for token in token_ids.tolist()]
        shown: list[tuple[int, str]] = []  # (characters read when it came out, text)
        num_read = 0

        def read(text: str) -> None:
            nonlocal num_read
            for character in text:
                num_read += 1
                note(self._parser.feed(character))

        def note(events: Sequence[ReplyEvent]) -> None:
            shown.extend((num_read, event.text) for event in events if isinstance(event, Text))

        for character in "".join(pieces):
            read(self._stops.feed(character))
        read(self._stops.finish())
        note(self._parser.finish())
        return _tokens_in(pieces, logprobs.tolist(), _places("".join(pieces), shown))


def _places(raw: str, shown: Sequence[tuple[int, str]]) -> bytearray:
    """For each character of `raw` whether it is shown. From the end: a text lies as late as it can, since texts come
    out as soon as they are certain."""
    seen, limit = bytearray(len(raw)), len(raw)
    for num_read, text in reversed(shown):
        begin = raw.rfind(text, 0, min(num_read, limit))
        if begin < 0:
            raise CaptureError("the visible text cannot be found in the sampled one; ask for no logprobs")
        seen[begin : begin + len(text)] = b"\1" * len(text)
        limit = begin
    return seen


def _tokens_in(pieces: Sequence[str], logprobs: Sequence[float], seen: bytearray) -> tuple[TokenLogprob, ...]:
    found: list[TokenLogprob] = []
    part: list[TokenLogprob] = []  # tokens without a text of their own: the next one completes their character
    at = 0
    for piece, logprob in zip(pieces, logprobs, strict=True):
        text = "".join(character for i, character in enumerate(piece, at) if seen[i])
        at += len(piece)
        if not piece:
            part.append(TokenLogprob(text="", logprob=logprob))
            continue
        if text:
            found += [*part, TokenLogprob(text=text, logprob=logprob)]
        part = []
    return tuple(found)
