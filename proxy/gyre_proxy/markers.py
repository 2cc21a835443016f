"""Finding literal markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_marker", "open_end"]


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first marker begins, and which it is; -1 when there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=(-1, ""))


def open_end(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = min(max(map(len, markers), default=1) - 1, len(text))
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
