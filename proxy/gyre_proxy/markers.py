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
    longest = 0
    for marker in markers:
        # Only where its first character stands may one begin, and in most texts that is nowhere near the end.
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest
