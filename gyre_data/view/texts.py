"""What messages say, by blob: whole for those who open one, and a line of each for lists. Blobs never change, so a
line that was made once is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gyre_data.errors import DataError

__all__ = ["Texts", "message_text"]

_PREVIEW_CHARS = 200


class Texts:
    """Texts of one run; what cannot be read is None, `gyre verify` names what is wrong with it."""

    def __init__(self, run: Any) -> None:
        self._blob = getattr(run, "blob", None)
        self._previews: dict[str, dict[str, Any] | None] = {}

    def plain(self, blob_id: str) -> str | None:
        """The blob as text; bytes that are not UTF-8 keep their place as U+FFFD."""
        if self._blob is None:
            return None
        try:
            return bytes(self._blob(blob_id)).decode("utf-8", "replace")
        except (KeyError, DataError):
            return None

    def preview(self, blob_id: str) -> dict[str, Any] | None:
        """Role, first line, length and tools of a canonical message."""
        if blob_id not in self._previews:
            self._previews[blob_id] = _preview(self.plain(blob_id))
        return self._previews[blob_id]


def message_text(content: Any) -> str:
    """Content of a canonical message as text; blocks that are no text are named."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(block.get("text", f"[{block.get('type', 'block')}]")) if isinstance(block, Mapping) else str(block)
            for block in content
        )
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def _preview(text: str | None) -> dict[str, Any] | None:
    try:
        message = json.loads(text) if text is not None else None
    except ValueError:
        return None
    if not isinstance(message, dict):
        return None
    content, reasoning = message_text(message.get("content")), message_text(message.get("reasoning"))
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    line = " ".join(content[: 4 * _PREVIEW_CHARS].split()) or " ".join(reasoning[: 4 * _PREVIEW_CHARS].split())
    return {
        "role": message.get("role"),
        "line": line[:_PREVIEW_CHARS],
        "num_chars": len(content) + len(reasoning),
        "tools": [str(call.get("name")) for call in calls],
        "tool_ids": [call.get("id") for call in calls],
        "answers": message.get("tool_call_id"),
    }
