"""Server-sent events of a reply, as data."""

from __future__ import annotations

import re
from typing import Any

from gyre_proxy.json_text import load_tolerant

__all__ = ["StreamEnd", "read_events"]

# The last event of each wire. JSON has no bare line break, so a line that begins so is an event of its own.
_LAST = re.compile(
    rb"(?:^|\n|\r)"
    rb"(?:event: ?(?:message_stop|error|response\.(?:completed|incomplete|failed))|data: ?\[DONE\])[ \t]*[\r\n]"
)
_BLANK = re.compile(rb"\r?\n\r?\n|\r\r")
_LONGEST = 64  # bytes of such a line


class StreamEnd:
    """Finds the end of the last event in a body that grows."""

    def __init__(self) -> None:
        self._searched = 0
        self._last: int | None = None

    def reached(self, body: bytearray) -> bool:
        """Whether the last event has come whole. `body` is what was given before, and more."""
        if self._last is None:
            found = _LAST.search(body, max(self._searched - _LONGEST, 0))
            self._searched = len(body)
            if found is None:
                return False
            self._last = found.end() - 1
        return _BLANK.search(body, self._last) is not None


def read_events(body: bytes) -> tuple[list[Any], list[str]]:
    """Data of each event in order (JSON, or text where it is none), and what could not be read, in words."""
    found: list[Any] = []
    odd: list[str] = []
    for block in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if not lines or lines == [b"[DONE]"]:
            continue
        data = b"\n".join(lines)
        try:
            found.append(load_tolerant(data))
        except ValueError as error:
            odd.append(f"an event is no JSON ({error}): {data[:80]!r}")
    return found, odd
