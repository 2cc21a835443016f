"""Recorded text on a terminal: shown, never obeyed.

A harness, a tool or a web page that a tool fetched writes what is recorded, and a terminal takes control characters in
it for orders: to set the title, to move the cursor over other lines, to fill the clipboard. So every line for people
goes through `printable`, and JSON through `printable_json`, into a pipe too, since a pager may be behind it.
"""

from __future__ import annotations

import re

__all__ = ["printable", "printable_json"]

# C0 but for tab and newline, DEL, C1, marks that turn the direction of text, and halves of surrogate pairs.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PICTURES = 0x2400  # Unicode has a picture of each C0 character from here on


def printable(text: str) -> str:
    """`text` of the same length, with a visible sign for each character that a terminal would obey."""
    return _CONTROL.sub(_sign, text)


def printable_json(text: str) -> str:
    """JSON with the same values, in which such characters are escaped."""
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    return "\u2421" if code == 0x7F else "\ufffd"
