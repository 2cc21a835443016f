"""`gyre compact`: few large files, each execution's nodes depth first, so that a branch is one contiguous read.

No row is changed or lost, except those of removed executions, which are left behind. With `cold` every buffer is
compressed; any Arrow reader unpacks it, but no longer without a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import CorruptError
from .reader import Run
from .rewrite import (
    check_sources,
    codec_of,
    drop_unnamed,
    gathered,
    last_sequence,
    owned,
    publish_tables,
    rebatched,
    unnamed,
    write_segments,
)
from .schema import TABLES
from .segment import Sealed

__all__ = ["COLD_CODEC", "Compacted", "TablePlan", "compact", "depth_first", "plan_compaction"]

COLD_CODEC = "zstd"
_WRITER = "compact"


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """What compaction finds in one table, and what it makes of it."""

    table: str
    num_files: int
    num_bytes: int
    num_rows: int
    new_files: int | None = None
    """None in a plan."""
    new_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Compacted:
    """A compaction that was done, or with `manifest` None the plan of one."""

    path: str
    cold: bool
    manifest: int | None
    tables: tuple[TablePlan, ...]
    """Those that are rewritten."""
    removed: tuple[str, ...]
    """Removed executions; rows of them are left behind."""
    stale_bytes: int
    """Of files that no manifest in use names: freed when done, to be freed in a plan."""


def plan_compaction(path: str | Path, *, cold: bool = False) -> Compacted:
    """What `compact` would do now. Takes no lock."""
    run = Run(Path(path))
    tables = tuple(
        TablePlan(
            table=name,
            num_files=len(run.manifest.sealed.get(name, ())) + len(run.manifest.open.get(name, ())),
            num_bytes=sum(one.num_bytes for one in run.manifest.sealed.get(name, ())),
            num_rows=run.table(name).num_rows,
        )
        for name in _wanted(run, cold)
    )
    stale = sum(file.stat().st_size for file in unnamed(run.path))
    return Compacted(
        path=str(path),
        cold=cold,
        manifest=None,
        tables=tables,
        removed=run.manifest.removed if tables else (),
        stale_bytes=stale,
    )


def compact(path: str | Path, *, cold: bool = False) -> Compacted:
    """Rewrite a run's segments as few large ones and remove the old files that no manifest in use names.

    Takes the run's lock, or raises ConfigError that says who writes it. A crash leaves the old files or the new ones
    in charge, never a mix. A reader that has the run open keeps what it has.
    """
    path = Path(path)
    with owned(path, _WRITER) as current:
        run = Run(path)
        wanted = _wanted(run, cold)
        check_sources(path, current, {*wanted, "nodes", "calls"} if wanted else ())
        numbers = itertools.count(last_sequence(path, _WRITER) + 1)
        names = (f"{_WRITER}-{number:06d}" for number in numbers)
        codec = COLD_CODEC if cold else None
        made: dict[str, tuple[Sealed, ...]] = {}
        for name in wanted:
            made[name] = write_segments(path, name, _ordered(run, name), names, codec)
        published = publish_tables(path, made, _WRITER, removed=current.removed) if made else current
        freed = drop_unnamed(path)
    tables = tuple(
        TablePlan(
            table=name,
            num_files=len(current.sealed.get(name, ())),
            num_bytes=sum(one.num_bytes for one in current.sealed.get(name, ())),
            num_rows=sum(one.num_rows for one in made[name]),
            new_files=len(made[name]),
            new_bytes=sum(one.num_bytes for one in made[name]),
        )
        for name in wanted
    )
    return Compacted(
        path=str(path),
        cold=cold,
        manifest=published.number,
        tables=tables,
        removed=current.removed if made else (),
        stale_bytes=freed,
    )


def _wanted(run: Run, cold: bool) -> list[str]:
    """Tables to rewrite: all but those that are as this compaction would leave them."""
    codec, current = COLD_CODEC if cold else None, run.manifest
    return [
        name
        for name in TABLES
        if name in current.tables
        and (
            current.open.get(name)
            or any(
                not one.name.startswith(f"{_WRITER}-") or codec_of(run.path / name / one.name) != codec
                for one in current.sealed[name]
            )
            or (current.removed and run.stored(name).num_rows != run.table(name).num_rows)
        )
    ]


def _ordered(run: Run, name: str) -> Iterator[pa.RecordBatch]:
    table = run.table(name)
    if name == "nodes":
        return gathered(table, depth_first(table, run.table("calls")))
    if name == "calls":
        return gathered(table, np.argsort(_codes(table, table), kind="stable"))
    return rebatched(table)  # the order of event rows may count


def _codes(table: pa.Table, calls: pa.Table) -> npt.NDArray[np.int64]:
    """Number of each row's execution: in the order of their first calls, then those that have none."""
    first = pc.unique(calls.column("execution_id"))
    column = table.column("execution_id")
    known = pc.unique(pa.chunked_array([first, pc.unique(column)]))
    return np.asarray(pc.index_in(column, value_set=known), np.int64)


def depth_first(nodes: pa.Table, calls: pa.Table) -> npt.NDArray[np.int64]:
    """Rows of `nodes`, execution by execution, each tree depth first.

    Siblings stand by the time of the call that added them, then by id, as in a `Tree`. Every row occurs once.
    """
    if not nodes.num_rows:
        return np.zeros(0, np.int64)
    ids = pc.unique(nodes.column("node_id"))
    if len(ids) != nodes.num_rows:
        raise CorruptError("nodes: wanted every node_id once, found some twice; run `gyre verify` on the run")
    parent_N = pc.fill_null(pc.index_in(nodes.column("parent_id"), value_set=ids), -1).to_numpy().astype(np.int64)
    # Keys from the least to the most significant: id, time of the call, parent, execution.
    by_time = calls.select(["call_id", "started_at"]).sort_by([("started_at", "ascending"), ("call_id", "ascending")])
    started_N = pc.fill_null(
        pc.index_in(nodes.column("call_id"), value_set=pc.unique(by_time.column("call_id"))), calls.num_rows
    ).to_numpy()
    by_id = pc.array_sort_indices(ids).to_numpy()
    rank_N = np.empty(nodes.num_rows, np.int64)
    rank_N[by_id] = np.arange(nodes.num_rows)
    order_N = np.lexsort((rank_N, started_N, parent_N, _codes(nodes, calls))).tolist()
    parents = parent_N.tolist()
    children: dict[int, list[int]] = {}
    roots: list[int] = []
    for row in order_N:
        if parents[row] >= 0:
            children.setdefault(parents[row], []).append(row)
        else:
            roots.append(row)
    out: list[int] = []
    stack = roots[::-1]
    while stack:
        row = stack.pop()
        out.append(row)
        stack.extend(reversed(children.get(row, ())))
    if len(out) != nodes.num_rows:
        raise CorruptError("nodes: parents run in a circle; run `gyre verify` on the run")
    return np.asarray(out, np.int64)
