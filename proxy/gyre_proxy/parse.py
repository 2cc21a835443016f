"""From sampled ids to reply events: one detokenizer and one parser, for the stream and for the record.

Guarantees: events folded are the same for any cut of the ids or the text; a tool call is one event, sent once its close
marker has been seen; a malformed or cut-off call comes out verbatim as text; nothing stays in a buffer after `finish`.
Blanks next to a marker belong to the format and are not shown; all other blanks are.

Why not `transformers.utils.chat_parsing.ResponseParser`: its events carry neither the text of the markers nor whether
the close marker was seen, so a malformed call cannot be given back verbatim. It is the oracle of our tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gyre_proxy.families import Region, family
from gyre_proxy.message import Reasoning, Reply, ReplyEvent, Text

__all__ = ["Decoder", "Detokenizer", "ReplyParser", "StopText", "fold", "hidden_ids", "parse_reply"]

_BLANKS = " \t\r\n"
_CUT = "\ufffd"
_MAX_CUT_BYTES = 3
_WINDOW = 64


class Decoder(Protocol):
    """Ids to text, special tokens included; a piece of a character may decode to U+FFFD."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""


class Detokenizer:
    """Ids to text pieces that never split a character; `hidden` ids (stop and control tokens) have no text.

    A character of which only some bytes have come is held back, and never shown when the rest does not come. Text is
    decoded in a short window with the ids before it, as `tokenizers.decoders.DecodeStream` does, so that decoders which
    look at the left neighbour work too.
    """

    def __init__(self, decoder: Decoder, hidden: Iterable[int] = ()) -> None:
        self._decoder = decoder
        self._hidden = frozenset(hidden)
        self._ids: list[int] = []
        self._num_settled = 0
        self._num_shown = 0

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        fresh = [int(token) for token in ids if int(token) not in self._hidden]
        if not fresh:
            return ""
        self._ids += fresh
        whole = self._decoder.decode(self._ids)
        stable = _without_cut_character(whole)
        piece = stable[self._num_shown :]
        self._num_shown = max(self._num_shown, len(stable))
        if stable == whole or len(self._ids) - self._num_settled > _WINDOW:
            self._settle()
        return piece

    def _settle(self) -> None:
        """Forgets the ids before the last settling point; the ids since then become the left neighbours."""
        self._ids = self._ids[self._num_settled :]
        self._num_settled = len(self._ids)
        self._num_shown = len(_without_cut_character(self._decoder.decode(self._ids)))


def _without_cut_character(text: str) -> str:
    """`text` without the replacement marks at its end that an incomplete character (three bytes at most) can cause."""
    marks = len(text) - len(text.rstrip(_CUT))
    return text[: len(text) - min(marks, _MAX_CUT_BYTES)]


def hidden_ids(special: Mapping[str, int], name: str = "hermes") -> frozenset[int]:
    """Ids of the special tokens that are not markers of the family: pass them to `Detokenizer`."""
    markers = family(name).markers
    return frozenset(token for text, token in special.items() if text not in markers)


class StopText:
    """Text up to the first stop sequence that is complete, which is where an engine stops; `hit` says which it was."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain not to belong to a stop sequence."""
        if self.hit is not None or not self._stops:
            return text if self.hit is None else ""
        self._pending += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if found:
            _, size, self.hit = min(found)
        else:
            size = len(self._pending) - _open_end(self._pending, self._stops)
        shown, self._pending = self._pending[:size], self._pending[size:]
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be text."""
        shown, self._pending = ("" if self.hit is not None else self._pending), ""
        return shown


class ReplyParser:
    """Text pieces in, reply events out.

    `prefix` is the generation prompt as rendered: a reasoning block that the template opens there is open when the
    reply begins.
    """

    def __init__(self, family_name: str = "hermes", prefix: str = "") -> None:
        declared = family(family_name)
        self._regions = {region.open: region for region in declared.regions}
        self._region: Region | None = None
        self._pending = ""
        """Undecided end of the input: the beginning of a marker, perhaps."""
        self._body: list[str] = []
        """Text inside an open call."""
        self._blanks = ""
        """Blanks that are shown if text follows them."""
        self._at_marker = False
        self._shown = False
        if prefix:
            self._advance(prefix.rpartition(declared.turn_opener)[2])

    def feed(self, text: str) -> list[ReplyEvent]:
        """Events that are certain after `text`."""
        return self._advance(text)

    def finish(self) -> list[ReplyEvent]:
        """The events that the end of the reply decides."""
        events: list[ReplyEvent] = []
        if self._region is not None and self._region.read is not None:
            self._body.append(self._pending)
            self._verbatim(events, self._region.open + "".join(self._body))
        else:
            self._take(events, self._pending)
            if self._region is None and self._shown:
                self._put(events, self._blanks)
        self._pending = self._blanks = ""
        self._body = []
        self._region = None
        return events

    def _advance(self, text: str) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        self._pending += text
        while True:
            markers = [self._region.close] if self._region else list(self._regions)
            at, marker = _first(self._pending, markers)
            if at < 0:
                keep = _open_end(self._pending, markers)
                self._take(events, self._pending[: len(self._pending) - keep])
                self._pending = self._pending[len(self._pending) - keep :]
                return events
            self._take(events, self._pending[:at])
            self._pending = self._pending[at + len(marker) :]
            self._cross(events, marker)

    def _cross(self, events: list[ReplyEvent], marker: str) -> None:
        """Passes a marker: opens a region, or closes the open one."""
        region = self._region
        if region is None:
            self._region = self._regions[marker]
            self._body = []
            if self._region.read is None:
                self._rest()
            return
        self._region = None
        if region.read is None:
            self._rest()
            return
        body = "".join(self._body)
        calls = region.read(body)
        if calls is None:
            self._verbatim(events, region.open + body + region.close)
            return
        self._rest()
        events.extend(calls)

    def _rest(self) -> None:
        """Beside a marker that counts: blanks before it are dropped, and so will be those after it."""
        self._blanks = ""
        self._at_marker = True
        self._shown = False

    def _take(self, events: list[ReplyEvent], text: str) -> None:
        """Text inside the current region, none of it part of a marker."""
        if self._region is not None and self._region.read is not None:
            self._body.append(text)
            return
        text = self._blanks + text
        if self._at_marker:
            text = text.lstrip(_BLANKS)
        visible = text.rstrip(_BLANKS)
        self._blanks = text[len(visible) :]
        if visible:
            self._put(events, visible)
            self._at_marker = False
            self._shown = True

    def _put(self, events: list[ReplyEvent], text: str) -> None:
        if text:
            events.append(Reasoning(text=text) if self._region else Text(text=text))

    def _verbatim(self, events: list[ReplyEvent], text: str) -> None:
        """A call that is none: all of it is text, with the blanks around it."""
        self._region = None
        self._put(events, self._blanks)
        events.append(Text(text=text, malformed_call=True))
        self._blanks = ""
        self._body = []
        self._at_marker = False
        self._shown = True


def fold(events: Iterable[ReplyEvent]) -> tuple[ReplyEvent, ...]:
    """Joins neighbouring pieces of the same kind and drops empty ones: equal for a stream and its batch twin."""
    folded: list[ReplyEvent] = []
    for event in events:
        last = folded[-1] if folded else None
        if isinstance(event, Text):
            if not event.text:
                continue
            if isinstance(last, Text) and last.malformed_call == event.malformed_call:
                folded[-1] = Text(text=last.text + event.text, malformed_call=event.malformed_call)
                continue
        elif isinstance(event, Reasoning):
            if not event.text:
                continue
            if isinstance(last, Reasoning):
                folded[-1] = Reasoning(text=last.text + event.text)
                continue
        folded.append(event)
    return tuple(folded)


def parse_reply(text: str, finish: str, family_name: str = "hermes", prefix: str = "") -> Reply:
    """The whole text at once: equal to the folded events of any stream of it."""
    parser = ReplyParser(family_name, prefix)
    return Reply(events=fold([*parser.feed(text), *parser.finish()]), finish=finish)


def _first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker begins, and which it is; -1 when there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def _open_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
