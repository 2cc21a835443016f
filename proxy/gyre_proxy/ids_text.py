"""Prompts as JSON: the next prompt of a conversation is the last one and more, so only what is new is written."""

from __future__ import annotations

import numpy as np
import orjson

from gyre_data.types import Ints

__all__ = ["IdsText"]


class IdsText:
    """The last prompt of an execution, as ids and as text. Another conversation's prompt is written in full."""

    def __init__(self) -> None:
        self._ids: Ints = np.empty(0, np.int32)
        self._text = b"[]"

    def of(self, ids: Ints) -> bytes:
        """JSON array of `ids` (int32)."""
        size = len(self._ids)
        if not 0 < size < len(ids) or not np.array_equal(ids[:size], self._ids):
            text = _written(ids)
        else:
            text = b"%b,%b" % (self._text[:-1], _written(ids[size:])[1:])
        self._ids, self._text = ids, text
        return text


def _written(ids: Ints) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)
