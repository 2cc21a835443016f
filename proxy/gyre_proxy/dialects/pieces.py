"""Cuts a request body at message borders, so that a history sent again and again is stored once.

The pieces are spans of the received bytes, in order and without gaps: their concatenation *is* the body, whatever the
spacing, key order or duplicate keys. Where the body cannot be scanned it stays one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np

__all__ = ["Cut", "body_pieces", "cut_body"]

_NONE = msgspec.Raw()
_GAP = b", \t\r\n"


class _Top(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    input: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE


_decoder = msgspec.json.Decoder(_Top)
_items = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A body in pieces. `first` and `num_messages` say which of them are messages, or items of the input."""

    pieces: tuple[bytes, ...]
    first: int
    num_messages: int
    rest: bytes
    """The body without its messages: an object in which their list is empty."""
    fields: Mapping[str, bytes]
    """Large fields as sent; empty where there is none."""


def body_pieces(body: bytes) -> tuple[bytes, ...]:
    """Spans of `body`: each message or input item with the comma before it, what comes first, and what is between."""
    cut = cut_body(body, "messages")
    return (body,) if cut is None else cut.pieces


def cut_body(body: bytes, key: str) -> Cut | None:
    """The body's pieces, its messages being the list `key`; None where it cannot be scanned."""
    try:
        top = _decoder.decode(body)
        items = _items.decode(top.input) if bytes(memoryview(top.input)[:1]) == b"[" else []
    except (msgspec.MsgspecError, RecursionError):
        return None
    base = _address(body)
    cuts = {0, len(body)}
    listed = (0, 0, 0)
    for name, messages in (("messages", top.messages), ("input", items)):
        if messages:
            start = _address(messages[0]) - base
            ends = _ends(body, start, messages)
            cuts |= {start, *ends}
            if name == key:
                listed = (start, ends[-1], len(ends))
    fields = {"system": top.system, "instructions": top.instructions, "tools": top.tools}
    for raw in (*fields.values(), *(() if items else (top.input,))):
        if size := memoryview(raw).nbytes:
            start = _address(raw) - base
            cuts |= {start, start + size}
    borders = sorted(cuts)
    start, end, count = listed
    return Cut(
        pieces=tuple(body[one:two] for one, two in pairwise(borders)),
        first=borders.index(start),
        num_messages=count,
        rest=body[:start] + body[end:] if count else body,
        fields={name: bytes(raw) for name, raw in fields.items()},
    )


def _ends(body: bytes, start: int, messages: Sequence[msgspec.Raw]) -> list[int]:
    """Where the elements of a list end, the first of which begins at `start`."""
    ends: list[int] = []
    at = start
    for raw in messages:
        while ends and body[at] in _GAP:
            at += 1
        at += memoryview(raw).nbytes
        ends.append(at)
    return ends


def _address(buffer: bytes | msgspec.Raw) -> int:
    """Address of the first byte: a decoded `Raw` is a view into the body, so the difference is its exact offset."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
