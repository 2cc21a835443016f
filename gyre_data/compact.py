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

from . import rewrite
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
from .schema import TABLES, arrow_schema
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
    """Those that are rewritten; of each, the files that are not large and settled already."""
    removed: tuple[str, ...]
    """Removed executions; rows of them are left behind."""
    stale_bytes: int
    """Of files that no manifest in use names: freed when done, to be freed in a plan."""


def plan_compaction(path: str | Path, *, cold: bool = False) -> Compacted:
    """What `compact` would do now. Takes no lock."""
    run = Run(Path(path))
    work = _work(run, cold)
    return Compacted(
        path=str(path),
        cold=cold,
        manifest=None,
        tables=tuple(one.plan() for one in work),
        removed=run.manifest.removed if work else (),
        stale_bytes=sum(file.stat().st_size for file in unnamed(run.path)),
    )


def compact(path: str | Path, *, cold: bool = False) -> Compacted:
    """Rewrite a run's segments as few large ones and remove the old files that no manifest in use names.

    Large files of an earlier compaction stay if no execution in them went on. Takes the run's lock, or raises
    ConfigError that says who writes it. A crash leaves the old files or the new ones in charge, never a mix. A reader
    that has the run open keeps what it has.
    """
    path = Path(path)
    with owned(path, _WRITER) as current:
        check_sources(path, current, TABLES)
        run = Run(path)
        work = _work(run, cold)
        numbers = itertools.count(last_sequence(path, _WRITER) + 1)
        names = (f"{_WRITER}-{number:06d}" for number in numbers)
        codec = COLD_CODEC if cold else None
        made = {one.table: write_segments(path, one.table, _ordered(run, one), names, codec) for one in work}
        tables = {one.table: one.kept + made[one.table] for one in work}
        published = publish_tables(path, tables, _WRITER, removed=current.removed) if work else current
        freed = drop_unnamed(path)
    return Compacted(
        path=str(path),
        cold=cold,
        manifest=published.number,
        tables=tuple(one.plan(made[one.table]) for one in work),
        removed=current.removed if work else (),
        stale_bytes=freed,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """What is to be done in one table: `kept` come first and stay, `rows` are those of all other segments."""

    table: str
    kept: tuple[Sealed, ...]
    sealed: tuple[Sealed, ...]
    num_open: int
    rows: pa.Table

    def plan(self, made: tuple[Sealed, ...] | None = None) -> TablePlan:
        """As it is told."""
        return TablePlan(
            table=self.table,
            num_files=len(self.sealed) + self.num_open,
            num_bytes=sum(one.num_bytes for one in self.sealed),
            num_rows=self.rows.num_rows,
            new_files=None if made is None else len(made),
            new_bytes=None if made is None else sum(one.num_bytes for one in made),
        )


def _work(run: Run, cold: bool) -> list[_Work]:
    """Tables to rewrite, and which of their segments: all but those that are as this compaction would leave them."""
    found = []
    for name in (name for name in TABLES if name in run.manifest.tables):
        sealed, still_open = run.manifest.sealed.get(name, ()), run.manifest.open.get(name, ())
        parts = [rows for _, rows in run.parts(name)]
        kept = _settled(run, name, parts, COLD_CODEC if cold else None)
        if kept < len(sealed) or still_open:
            rows = pa.concat_tables([arrow_schema(name).empty_table(), *parts[kept:]])
            found.append(
                _Work(
                    table=name,
                    kept=sealed[:kept],
                    sealed=sealed[kept:],
                    num_open=len(still_open),
                    rows=run.shown(name, rows),
                )
            )
    return found


def _settled(run: Run, name: str, parts: list[pa.Table], codec: str | None) -> int:
    """How many of the first segments stay as they are."""
    sealed = run.manifest.sealed.get(name, ())
    as_wanted = [
        one.name.startswith(f"{_WRITER}-")
        and codec_of(run.path / name / one.name) == codec
        and run.shown(name, rows).num_rows == rows.num_rows
        for one, rows in zip(sealed, parts, strict=False)
    ]
    if all(as_wanted) and not run.manifest.open.get(name):
        return len(sealed)
    large = [good and one.num_bytes >= rewrite.FILE_BYTES for good, one in zip(as_wanted, sealed, strict=True)]
    count = large.index(False) if False in large else len(large)
    if name in ("nodes", "calls"):  # an execution stands in one place
        names = [set(rows.column("execution_id").unique().to_pylist()) for rows in parts]
        while count and any(names[i] & set().union(*names[count:]) for i in range(count)):
            count -= 1
    return count


def _ordered(run: Run, work: _Work) -> Iterator[pa.RecordBatch]:
    if work.table == "nodes":
        return gathered(work.rows, depth_first(work.rows, run.table("calls")))
    if work.table == "calls":
        return gathered(work.rows, np.argsort(_codes(work.rows, work.rows), kind="stable"))
    return rebatched(work.rows)  # the order of event rows may count


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
        lost = np.setdiff1d(np.arange(nodes.num_rows), out)
        named = ", ".join(sorted(set(nodes.column("execution_id").take(pa.array(lost)).to_pylist())))
        raise CorruptError(f"nodes of {named}: parents run in a circle; run `gyre verify` on the run")
    return np.asarray(out, np.int64)
