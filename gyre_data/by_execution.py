"""Rows of a run's tables by execution: each table is put in order once.

Legend: R rows of a table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import Rows, found_in, ints

__all__ = ["Part", "by_execution"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Rows of one execution in one table: their numbers in the run's table, and the columns that a tree needs."""

    rows: Rows
    small: pa.Table


def by_execution(name: str, table: pa.Table, columns: tuple[str, ...], only: Collection[str] | None) -> dict[str, Part]:
    """Rows of each execution with these columns, executions in order of first appearance.

    Rows of `calls` stand by start time, then id; those of other tables as they came. `only` wants these executions:
    of the others nothing is copied.
    """
    column, small = table.column("execution_id"), table.select(columns)
    known = pc.unique(column)
    if only is not None:
        known = known.filter(pc.is_in(known, value_set=pa.array(list(only), pa.string())))
    code_R = found_in(known, column)
    rows = np.flatnonzero(code_R >= 0)
    order = rows[np.argsort(code_R[rows], kind="stable")]
    if name == "calls":
        order = order[_by_time(code_R[order], small, order)]
    if len(order) != len(column) or (order != np.arange(len(order))).any():
        small = small.take(pa.array(order))
    bounds = np.concatenate([[0], np.cumsum(np.bincount(code_R[order], minlength=len(known)))]).tolist()
    return {
        execution_id: Part(rows=order[a:b], small=small.slice(a, b - a))
        for execution_id, a, b in zip(known.to_pylist(), bounds, bounds[1:], strict=False)
        if b > a
    }


def _by_time(code_R: Rows, calls: pa.Table, rows: Rows) -> Rows:
    """Order of these rows of `calls` by code, start time, and id where both are equal."""
    started_R = ints(calls.column("started_at").cast(pa.int64()))[rows]
    order = np.lexsort((started_R, code_R))
    code, started = code_R[order], started_R[order]
    if ((code[1:] == code[:-1]) & (started[1:] == started[:-1])).any():
        ids = calls.column("call_id").take(pa.array(rows)).to_pylist()
        order = np.array(sorted(range(len(ids)), key=lambda i: (code_R[i], started_R[i], ids[i])), np.int64)
    return order
