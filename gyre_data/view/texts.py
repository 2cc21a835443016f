"""What messages say, by blob: whole for those who open one, and a line of each for lists. Blobs never change, so a
line that was made once is kept.
"""

from __future__ import annotations

from typing import Any

from gyre_data.errors import DataError
from gyre_data.json_values import parsed
from gyre_data.reader import Run
from gyre_data.texts import content_text, tools_of

__all__ = ["Texts"]

_LINE_CHARS = 200


class Texts:
    """Texts of one run; what cannot be read is None, `gyre verify` names what is wrong with it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: dict[str, dict[str, Any] | None] = {}

    def plain(self, blob_id: str) -> str | None:
        """The blob as text; bytes that are not UTF-8 become U+FFFD."""
        try:
            return self._run.blob(blob_id).decode("utf-8", "replace")
        except (KeyError, DataError):
            return None

    def line(self, blob_id: str) -> dict[str, Any] | None:
        """First line and tools of a canonical message; None for what is none."""
        if blob_id not in self._lines:
            self._lines[blob_id] = _line(self.plain(blob_id))
        return self._lines[blob_id]


def _line(text: str | None) -> dict[str, Any] | None:
    message = parsed(text)
    if not isinstance(message, dict):
        return None
    said = content_text(message) or str(message.get("reasoning") or "")
    line = " ".join(said[: 4 * _LINE_CHARS].split())
    return {"line": line[:_LINE_CHARS], "tools": [name for name, _ in tools_of(message)]}
