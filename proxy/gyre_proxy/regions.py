"""Replies whose reasoning and calls stand between two literal markers, in text that is shown otherwise.

Blanks next to a marker belong to the format and are not shown; all other blanks are.
"""

from __future__ import annotations

from .families import Family, Region
from .markers import first_marker, open_end
from .message import Reasoning, ReplyEvent, Text
from .xml_calls import Schemas

__all__ = ["RegionMachine"]

_BLANKS = " \t\r\n"


class RegionMachine:
    """Text pieces in, reply events out. `schemas` are those of the tools that the reply may call."""

    def __init__(self, declared: Family, schemas: Schemas) -> None:
        self._schemas = schemas
        self._regions = {region.open: region for region in declared.regions}
        self._outside = (*self._regions, *declared.silent)
        self._region: Region | None = None
        self._pending = ""
        """Undecided end of the input: the beginning of a marker, perhaps."""
        self._body: list[str] = []
        """Text inside an open call."""
        self._blanks = ""
        """Blanks that are shown if text follows them."""
        self._at_marker = False
        self._shown = False

    def feed(self, text: str) -> list[ReplyEvent]:
        """Events that are certain after `text`."""
        events: list[ReplyEvent] = []
        self._pending += text
        while True:
            markers = (self._region.close,) if self._region else self._outside
            at, marker = first_marker(self._pending, markers)
            if at < 0:
                keep = open_end(self._pending, markers)
                self._take(events, self._pending[: len(self._pending) - keep])
                self._pending = self._pending[len(self._pending) - keep :]
                return events
            self._take(events, self._pending[:at])
            self._pending = self._pending[at + len(marker) :]
            self._cross(events, marker)

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

    def _cross(self, events: list[ReplyEvent], marker: str) -> None:
        """Passes a marker: opens a region, or closes the open one."""
        region = self._region
        if region is None:
            self._region = self._regions.get(marker)
            self._body = []
            if self._region is None or self._region.read is None:
                self._rest()
            return
        self._region = None
        if region.read is None:
            self._rest()
            return
        body = "".join(self._body)
        calls = region.read(body, self._schemas)
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
