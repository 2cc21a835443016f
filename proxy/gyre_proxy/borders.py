"""Where a message ends in rendered text.

A template is a black box: the only way to learn where a content went is to mark it and look. So a conversation is
rendered twice, plain and with marks at the begin and end of each content (a message with tool calls gets its end mark
as an extra argument of its last call), the marks are removed again, and the result must equal the plain text. Then a
message ends after the last stop token between its content and the next one, else where its content ends. Messages
whose marks are lost, or disturb the template, join the next message. Rendered assistant turns so end where sampled
ones do: right after their stop token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .message import Message, ToolCall

__all__ = ["Marker", "Span", "locate", "marker_for", "message_ends", "preamble_end", "spans_in"]

_WINDOW = 256
_MAX_OPENING = 24  # characters that a call format writes before the key of an argument
_MAX_RESIDUE = 80  # characters that a call format writes after the value of an argument


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Where the content of a message lies in a text: characters [begin, end)."""

    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """Marks that do not occur in the conversation. One text character class only, so that JSON leaves them alone."""

    nonce: str

    def _text(self, kind: str, index: int) -> str:
        return f"{self.nonce}{kind}{index:06d}z"

    def mark(self, message: Message, index: int) -> Message:
        """Copy of `message` with marks at both ends of its content, inside its outer blanks (templates may trim)."""
        text = message.content
        if not message.tool_calls:
            stripped = text.strip()
            lead = len(text) - len(text.lstrip()) if stripped else len(text)
            body, tail = (stripped, text[lead + len(stripped) :]) if stripped else ("", "")
            content = text[:lead] + self._text("b", index) + body + self._text("e", index) + tail
            return replace(message, content=content)
        if text.strip():
            lead = len(text) - len(text.lstrip())
            text = text[:lead] + self._text("b", index) + text[lead:]
        return replace(self.mark_end(message, index), content=text)

    def mark_end(self, message: Message, index: int) -> Message:
        """Copy of `message` with only the end of its content marked, after its outer blanks."""
        if not message.tool_calls:
            return replace(message, content=message.content + self._text("e", index))
        last = message.tool_calls[-1]
        if isinstance(last.arguments, str):
            marked: ToolCall = replace(last, arguments=last.arguments + self._text("e", index))
        else:
            extra = {self._text("k", index): self._text("v", index)}
            marked = replace(last, arguments={**last.arguments, **extra})
        return replace(message, tool_calls=(*message.tool_calls[:-1], marked))

    def find(self, text: str) -> list[re.Match[str]]:
        """Every mark in `text`, in order; group 1 is its kind (b, e, k, v), group 2 the index of its message."""
        return list(re.finditer(re.escape(self.nonce) + r"([bekv])(\d{6})z", text))

    def end_of(self, text: str, index: int) -> tuple[int, int] | None:
        """Where the end mark of message `index` begins and ends in `text`; None unless there is exactly one."""
        found = [m for m in self.find(text) if m[1] in "ev" and int(m[2]) == index]
        if len(found) != 1:
            return None
        begin = found[0].start()
        if found[0][1] == "v":
            keys = [m for m in self.find(text) if m[1] == "k" and int(m[2]) == index]
            if not keys:  # a format may write the key again after the value
                return None
            begin = keys[0].start()
        return begin, found[0].end()


def marker_for(text: str) -> Marker:
    """A marker that does not occur in `text`."""
    n = 0
    while (nonce := f"Gyre{n}Mark") in text:
        n += 1
    return Marker(nonce=nonce)


def locate(
    marker: Marker, messages: Sequence[Message], plain: str, render: Callable[[Sequence[Message]], str]
) -> list[Span | None]:
    """Spans of the contents of `messages` in `plain` = render(messages); None where marks are lost or disturb.

    When marking everything changes the text, each message is tried alone, which costs a rendering per message.
    """

    def attempt(chosen: set[int]) -> dict[int, Span] | None:
        marked = [marker.mark(m, i) if i in chosen else m for i, m in enumerate(messages)]
        return spans_in(marker, render(marked), plain)

    everything = set(range(len(messages)))
    spans = attempt(everything)
    if spans is None:
        harmless = {i for i in everything if attempt({i}) is not None}
        spans = attempt(harmless) or {}
    return [spans.get(i) for i in range(len(messages))]


def spans_in(marker: Marker, marked: str, plain: str) -> dict[int, Span] | None:
    """Spans in `plain` of the messages marked in `marked`; None unless removing the marks gives `plain` back.

    A message is left out when one of its marks is missing or stands twice.
    """
    stripped, marks, inserts = _strip(marker, marked)
    removed = _align(stripped, plain, inserts)
    if removed is None:
        return None

    def place(position: int) -> int:
        shift = 0
        for begin, end in removed:
            if position <= begin:
                break
            shift += min(position, end) - begin
        return position - shift

    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for kind, index, position in marks:
        (begins if kind in "bk" else ends).setdefault(index, []).append(place(position))
    spans: dict[int, Span] = {}
    for index, at in ends.items():
        starts = begins.get(index, at)  # with calls and no text there is only the extra argument
        if len(at) == 1 and len(starts) in (1, 2) and starts[0] <= at[0]:
            spans[index] = Span(begin=starts[0], end=at[0])
    return spans


def _strip(marker: Marker, marked: str) -> tuple[str, list[tuple[str, int, int]], list[tuple[int, int]]]:
    """Text without its content marks; the marks as (kind, message, position); the extra arguments as (key, end)."""
    pieces: list[str] = []
    marks: list[tuple[str, int, int]] = []
    inserts: list[tuple[int, int]] = []
    keys: dict[int, int] = {}
    at = length = 0
    for match in marker.find(marked):
        kind, index = match[1], int(match[2])
        stop = match.start() if kind in "be" else match.end()
        pieces.append(marked[at:stop])
        length += stop - at
        at = match.end()
        if kind == "k":
            keys[index] = length - len(match[0])
            marks.append((kind, index, keys[index]))
        elif kind == "v":
            inserts.append((keys.get(index, length - len(match[0])), length))
            marks.append((kind, index, length))
        else:
            marks.append((kind, index, length))
    pieces.append(marked[at:])
    return "".join(pieces), marks, inserts


def _align(marked: str, plain: str, inserts: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Ranges of `marked` whose removal gives `plain`, one around each (key, end of value); None if there are none."""
    removed: list[tuple[int, int]] = []
    m = p = 0
    for n, (key, value_end) in enumerate(inserts):
        limit = inserts[n + 1][0] if n + 1 < len(inserts) else len(marked)
        same = _common(marked, m, plain, p, key - m)
        m, p = m + same, p + same
        for end in range(value_end, min(value_end + _MAX_RESIDUE, limit)):
            # Equal up to where the next extra argument begins, a few characters of its format aside.
            agree = _common(marked, end, plain, p, min(_WINDOW, limit - end))
            if agree == _WINDOW or end + agree == len(marked) or (agree > 0 and limit - end - agree < _MAX_OPENING):
                removed.append((m, end))
                m = end
                break
        else:
            return None
    return removed if marked[m:] == plain[p:] else None


def _common(a: str, i: int, b: str, j: int, limit: int) -> int:
    """Length of the common prefix of a[i:] and b[j:], at most `limit`; halving, since slices compare fast."""
    low, high = 0, max(0, min(limit, len(a) - i, len(b) - j))
    while low < high:
        middle = (low + high + 1) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def message_ends(text: str, spans: Sequence[Span | None], stops: Sequence[str]) -> list[int | None]:
    """Characters where the messages end in `text`; None for a message that joins the next.

    Text after the last end is the generation prompt. A message before one whose marks are lost ends after the first
    stop token, so that the lost one is not swallowed. A content that stands before an earlier message's is lost too.
    """
    spans = list(spans)
    reached = 0
    for i, span in enumerate(spans):
        if span is not None and span.begin < reached:
            spans[i] = None
        elif span is not None:
            reached = span.end
    ends: list[int | None] = []
    for i, span in enumerate(spans):
        if span is None:
            ends.append(None)
            continue
        following = next((s for s in spans[i + 1 :] if s is not None), None)
        limit = following.begin if following else len(text)
        lost_next = i + 1 < len(spans) and spans[i + 1] is None
        cut = _stop(text, span.end, limit, stops, last=not lost_next)
        ends.append(span.end if cut is None else cut)
    if ends and ends[-1] is None:
        known = [end for end in ends if end is not None]
        ends[-1] = _stop(text, known[-1] if known else 0, len(text), stops, last=True)
    return ends


def preamble_end(text: str, first: Span | None, stops: Sequence[str]) -> int:
    """Where what the template writes before the first content ends: after its last stop token, else 0."""
    return _stop(text, 0, first.begin, stops, last=True) or 0 if first else 0


def _stop(text: str, begin: int, end: int, stops: Sequence[str], *, last: bool) -> int | None:
    """End of the last (or first) stop token that lies whole in text[begin:end]."""
    if last:
        found = [(at, at + len(stop)) for stop in stops if (at := text.rfind(stop, begin, end)) >= 0]
        return max(found)[1] if found else None
    found = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, begin, end)) >= 0]
    return min(found)[1] if found else None
