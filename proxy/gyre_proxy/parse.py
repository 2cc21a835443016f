"""From sampled ids to reply events: one detokenizer and one parser, for the stream and for the record.

Guarantees: events folded are the same for any cut of the ids or the text; a tool call is one event, sent once its close
marker has been seen; a malformed or cut-off call comes out verbatim as text; nothing stays in a buffer after `finish`.
Blanks next to a marker belong to the format and are not shown; all other blanks are.

Why not `transformers.utils.chat_parsing.ResponseParser`: its events carry neither the text of the markers nor whether
the close marker was seen, so a malformed call cannot be given back verbatim. It is the oracle of our tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from .families import family
from .harmony import HarmonyMachine
from .markers import open_end
from .message import Reasoning, Reply, ReplyEvent, Text
from .regions import RegionMachine
from .xml_calls import schemas_of

__all__ = ["Decoder", "Detokenizer", "ReplyParser", "StopText", "fold", "hidden_ids", "parse_reply"]

_CUT = "\ufffd"
_MAX_CUT_BYTES = 3
_SETTLED_FROM, _WINDOW = 16, 64
"""Ids after which the window is moved on where that splits no character, and where it may: moving it decodes again."""


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
        fresh = [token for token in map(int, ids) if token not in self._hidden]
        if not fresh:
            return ""
        self._ids += fresh
        whole = self._decoder.decode(self._ids)
        stable = _without_cut_character(whole)
        piece = stable[self._num_shown :]
        self._num_shown = max(self._num_shown, len(stable))
        num_open = len(self._ids) - self._num_settled
        if num_open > _WINDOW or (num_open >= _SETTLED_FROM and stable == whole):
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
            size = len(self._pending) - open_end(self._pending, self._stops)
        shown, self._pending = self._pending[:size], self._pending[size:]
        return shown

    def finish(self) -> str:
        """What was held back and turned out to be text."""
        shown, self._pending = ("" if self.hit is not None else self._pending), ""
        return shown


class ReplyParser:
    """Text pieces in, reply events out.

    `prefix` is the generation prompt as rendered: a reasoning block that the template opens there is open when the
    reply begins. `tools` are the request's; some families need their schemas to tell text from numbers.
    """

    def __init__(self, family_name: str = "hermes", prefix: str = "", tools: Sequence[Mapping[str, Any]] = ()) -> None:
        declared = family(family_name)
        self._machine: RegionMachine | HarmonyMachine = (
            HarmonyMachine() if declared.channels else RegionMachine(declared, schemas_of(tools))
        )
        if prefix:
            opener = declared.turn_opener
            self._machine.feed(prefix.rpartition(opener)[2] if opener else prefix)

    def feed(self, text: str) -> list[ReplyEvent]:
        """Events that are certain after `text`."""
        return self._machine.feed(text)

    def finish(self) -> list[ReplyEvent]:
        """The events that the end of the reply decides."""
        return self._machine.finish()


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


def parse_reply(
    text: str, finish: str, family_name: str = "hermes", prefix: str = "", tools: Sequence[Mapping[str, Any]] = ()
) -> Reply:
    """The whole text at once: equal to the folded events of any stream of it."""
    parser = ReplyParser(family_name, prefix, tools)
    return Reply(events=fold([*parser.feed(text), *parser.finish()]), finish=finish)
