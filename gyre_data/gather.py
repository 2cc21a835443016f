"""Batches of one segment as one table, whatever their size.

A proxy commits a call at a time, so a run of long executions has tens of thousands of batches of a row or three. Each
costs a table its columns in memory and every later step a piece of work. So runs of small batches are gathered: tokens,
log-probs and blobs stay views of the file, all other columns are copied into one chunk per hundred batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pyarrow as pa

__all__ = ["AT_ONCE", "Gathered", "is_small"]

_SMALL_ROWS = 64
AT_ONCE = 128
"""Small batches that become one chunk."""


class Gathered:
    """A table that grows by batches. `table_of` makes a table of some batches."""

    def __init__(self, table_of: Callable[[list[pa.RecordBatch]], pa.Table], batches: Iterable[pa.RecordBatch] = ()):
        self._table_of = table_of
        self._done: list[pa.Table] = []
        self._open: list[pa.RecordBatch] = []
        self.add(batches)

    def table(self) -> pa.Table:
        """All rows, in order."""
        rest = [self._table_of(self._open)] if self._open or not self._done else []
        return pa.concat_tables([*self._done, *rest])

    def add(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Append them."""
        for batch in batches:
            self._add(batch)

    def _add(self, batch: pa.RecordBatch) -> None:
        if self._open and (is_small(batch) != is_small(self._open[0]) or len(self._open) == AT_ONCE):
            table = self._table_of(self._open)
            self._done.append(_joined(table) if is_small(self._open[0]) else table)
            self._open = []
        self._open.append(batch)


def is_small(batch: pa.RecordBatch) -> bool:
    """Whether a batch is one of the many that single commits leave."""
    return bool(batch.num_rows < _SMALL_ROWS)


def _joined(table: pa.Table) -> pa.Table:
    """The same rows, each column in one chunk but those that hold much."""
    return pa.Table.from_arrays([_in_one(column) for column in table.columns], schema=table.schema)


def _in_one(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    if pa.types.is_large_list(column.type) or pa.types.is_large_binary(column.type):
        return column
    if column.null_count == len(column):  # half the columns of a call: nothing to copy
        return pa.nulls(len(column), column.type)
    return pa.concat_arrays(column.chunks)
