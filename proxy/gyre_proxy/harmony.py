"""Replies in channels (gpt-oss): `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final...`.

Analysis is reasoning; final, and commentary without a recipient, are text; a part with a recipient (`to=functions.F`)
is a call, and one only when `<|call|>` closes it. Blanks inside a part are shown as they are; an empty line stands
between two parts of the same kind. Text outside all parts is text. A header that is cut off is not shown, unless it is
that of a call or none that a reply may have.
"""

from __future__ import annotations

import re
from typing import Literal

from .json_text import read_object
from .markers import first_marker, open_end
from .message import Reasoning, ReplyEvent, Text, ToolCall

__all__ = ["HarmonyMachine"]

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
_FIRST = (_CHANNEL, " to=", _START, _MESSAGE)
"""What a header goes on with after the role, which the generation prompt has named."""
_PLAIN_HEADERS = tuple(
    f"{start}{_CHANNEL}{name}" for start in ("", f"{_START}assistant") for name in ("analysis", "commentary", "final")
)
_BETWEEN = "\n\n"

_Kind = Literal["reasoning", "text", "call"]


class HarmonyMachine:
    """Text pieces in, reply events out."""

    def __init__(self) -> None:
        self._undecided = True
        """Whether the reply may still begin with the rest of a header."""
        self._pending = ""
        """Undecided end of the input: the beginning of a marker, perhaps."""
        self._header: str | None = None
        """The open header."""
        self._kind: _Kind | None = None
        """What the open part is."""
        self._call_header, self._call_name, self._call_body = "", "", ""
        self._shown: _Kind | None = None
        """Kind of the last event."""
        self._fresh = True
        """Whether nothing of the open part was shown yet."""

    def feed(self, text: str) -> list[ReplyEvent]:
        """Events that are certain after `text`."""
        events: list[ReplyEvent] = []
        self._pending += text
        if self._undecided and not self._decide():
            return events
        while True:
            markers = self._markers()
            at, marker = first_marker(self._pending, markers)
            if at < 0:
                size = len(self._pending) - open_end(self._pending, markers)
                self._take(events, self._pending[:size])
                self._pending = self._pending[size:]
                return events
            self._take(events, self._pending[:at])
            self._pending = self._pending[at + len(marker) :]
            self._cross(events, marker)

    def finish(self) -> list[ReplyEvent]:
        """The events that the end of the reply decides."""
        events: list[ReplyEvent] = []
        self._take(events, self._pending)
        self._pending, self._undecided = "", False
        self._close(events, "")
        return events

    def _decide(self) -> bool:
        """Whether it is certain that the reply begins with a header, or that it does not."""
        if any(self._pending.startswith(first) for first in _FIRST):
            self._header = ""
        elif any(first.startswith(self._pending) for first in _FIRST):
            return False
        self._undecided = False
        return True

    def _markers(self) -> tuple[str, ...]:
        if self._header is not None:
            return (_MESSAGE, _START, *_ENDS)
        return (_START, *_ENDS) if self._kind else (_START, _CHANNEL, *_ENDS)

    def _take(self, events: list[ReplyEvent], text: str) -> None:
        """Text of the open header or part, none of it part of a marker."""
        if self._header is not None:
            self._header += text
        elif self._kind == "call":
            self._call_body += text
        elif text:
            kind = self._kind or "text"
            if self._fresh and self._shown == kind:
                text = _BETWEEN + text
            events.append(Reasoning(text=text) if kind == "reasoning" else Text(text=text))
            self._shown, self._fresh = kind, False

    def _cross(self, events: list[ReplyEvent], marker: str) -> None:
        """Passes a marker."""
        if marker == _MESSAGE and self._header is not None:
            self._open(self._header)
            return
        self._close(events, marker)
        if marker in (_START, _CHANNEL):
            self._header = marker

    def _open(self, header: str) -> None:
        """A part begins."""
        self._header, self._fresh = None, True
        if recipient := re.search(r"\bto=([^\s<]+)", header):
            self._kind = "call"
            self._call_header, self._call_name, self._call_body = header, recipient[1].removeprefix("functions."), ""
        else:
            self._kind = "reasoning" if re.search(r"<\|channel\|>\s*analysis\b", header) else "text"

    def _close(self, events: list[ReplyEvent], marker: str) -> None:
        """The open part or header ends at `marker`."""
        if self._header is not None and not any(plain.startswith(self._header) for plain in _PLAIN_HEADERS):
            self._verbatim(events, self._header)
        elif self._kind == "call":
            arguments = read_object(self._call_body) if marker == _CALL else None
            if arguments is None:
                end = marker if marker in _ENDS else ""
                self._verbatim(events, self._call_header + _MESSAGE + self._call_body + end)
            else:
                events.append(ToolCall(name=self._call_name, arguments=arguments))
                self._shown = "call"
        self._header = self._kind = None
        self._fresh = True

    def _verbatim(self, events: list[ReplyEvent], text: str) -> None:
        """A call or a header that is none."""
        events.append(Text(text=text, malformed_call=True))
        self._shown = "text"
