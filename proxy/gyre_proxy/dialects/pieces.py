"""Cuts a request body at message borders, so that a history sent again and again is stored once.

The pieces are spans of the received bytes, in order and without gaps: their concatenation *is* the body, whatever the
spacing, key order or duplicate keys. Where the body cannot be scanned it stays one piece.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

__all__ = ["body_pieces"]

_NONE = msgspec.Raw()


class _Top(msgspec.Struct):
    messages: list[msgspec.Raw] = []
    input: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE


_decoder = msgspec.json.Decoder(_Top)
_items = msgspec.json.Decoder(list[msgspec.Raw])


def body_pieces(body: bytes) -> tuple[bytes, ...]:
    """Spans of `body`: each message or input item with the comma before it, what comes first, and what is between."""
    try:
        top = _decoder.decode(body)
        items = _items.decode(top.input) if bytes(memoryview(top.input)[:1]) == b"[" else []
    except msgspec.MsgspecError:
        return (body,)
    base = _address(body)
    cuts = {0, len(body)}
    for messages in (top.messages, items):
        for index, raw in enumerate(messages):
            start = _address(raw) - base
            if index == 0:
                cuts.add(start)
            cuts.add(start + len(bytes(raw)))
    alone = () if items else (top.input,)
    for raw in (top.system, top.instructions, top.tools, *alone):
        if bytes(raw):
            start = _address(raw) - base
            cuts |= {start, start + len(bytes(raw))}
    return tuple(body[start:end] for start, end in pairwise(sorted(cuts)))


def _address(buffer: bytes | msgspec.Raw) -> int:
    """Address of the first byte: a decoded `Raw` is a view into the body, so the difference is its exact offset."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
