"""Columns of a table as numpy arrays, whatever their chunks: codes of spellings, numbers, list columns row by row.

Legend: R rows.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .arrays import offsets_and_values

__all__ = [
    "Codes",
    "ListColumn",
    "Rows",
    "code_of",
    "codes",
    "floats",
    "found_in",
    "ints",
    "joined",
    "members",
    "valid",
]

Codes = npt.NDArray[np.int8]
Rows = npt.NDArray[np.int64]


@cache
def members(kind: type[StrEnum]) -> tuple[StrEnum, ...]:
    """The members of an enum by code."""
    return tuple(kind)


def code_of(member: StrEnum) -> int:
    """Code of one member: its place in its enum."""
    return _places(type(member))[member]  # not cached by member: members of two enums may be equal as strings


@cache
def _places(kind: type[StrEnum]) -> dict[StrEnum, int]:
    return {member: place for place, member in enumerate(kind)}


@cache
def _spellings(kind: type[StrEnum]) -> pa.Array:
    return pa.array([member.value for member in kind], pa.string())


def codes(column: pa.ChunkedArray, kind: type[StrEnum]) -> Codes:
    """Place of each spelling in its enum: -1 for null; spellings of a newer writer are `UNKNOWN_VALUE`."""
    found = np.asarray(found_in(_spellings(kind), column), np.int8)
    new_R = found < 0
    if new_R.any():
        found[new_R & valid(column)] = members(kind).index(kind("unknown_value"))
    return found


def found_in(ids: pa.Array, wanted: pa.ChunkedArray | pa.Array) -> Rows:
    """Place of each wanted id in `ids`, the first one; -1 where it is null or not there."""
    return np.asarray(pc.fill_null(pc.index_in(wanted, value_set=ids), -1).to_numpy(), np.int64)


def ints(column: pa.ChunkedArray) -> Rows:
    """Integers of a column, 0 for null."""
    return np.asarray(pc.fill_null(column, 0).to_numpy(), np.int64)


def floats(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Numbers of a column, NaN for null."""
    return np.asarray(column.to_numpy(), np.float64)


def valid(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    """Where a column is not null."""
    return np.asarray(pc.is_valid(column).to_numpy(), np.bool_)


def joined(column: pa.ChunkedArray) -> pa.Array:
    """A column of few rows in one array; copied where it lies in several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


class ListColumn:
    """A list column of a whole run: lengths at once, and any row as a read-only slice of the file's own memory."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self._chunks = column.chunks
        self.length_R = ints(pc.list_value_length(column))
        """Elements of each row; 0 for null."""
        self.valid_R = valid(column)
        self._held: dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]] = {}
        self._finite: dict[int, bool] = {}

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        chunk = int(self.chunk_of(row))
        offsets, values = self._of(chunk)
        at = row - int(self._starts[chunk])
        view: npt.NDArray[Any] = values[offsets[at] : offsets[at + 1]]
        return view

    def chunk_of(self, rows: Any) -> Any:
        """Number of the chunk that holds each row."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def finite(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Whether every element of each row is a finite number. Whole chunks are looked at once for all their rows."""
        chunk_R = self.chunk_of(rows)
        for chunk in np.unique(chunk_R).tolist():
            if chunk not in self._finite:
                self._finite[chunk] = _all_finite(self._chunks[chunk].values)
        out = np.array([self._finite[chunk] for chunk in chunk_R.tolist()], np.bool_)
        for i in np.flatnonzero(~out).tolist():
            chunk = int(chunk_R[i])
            row = self._chunks[chunk].slice(int(rows[i]) - int(self._starts[chunk]), 1)
            out[i] = _all_finite(pc.list_flatten(row))
        return out

    def _of(self, chunk: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        if chunk not in self._held:
            self._held[chunk] = offsets_and_values(self._chunks[chunk])
        return self._held[chunk]

    @cached_property
    def _starts(self) -> Rows:
        return np.cumsum([0, *(len(chunk) for chunk in self._chunks)])


def _all_finite(values: pa.Array) -> bool:
    """Whether all are finite numbers. What `lean` has for numbers says so itself."""
    return bool(pc.all(values if pa.types.is_boolean(values.type) else pc.is_finite(values), min_count=0).as_py())
