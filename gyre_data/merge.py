"""`gyre merge`: one new run from several. No row is changed; where each execution came from is kept in `run.json`.

An id that two runs share must mean the same: a row that is equal in both is written once, anything else is refused.
Nothing of the sources is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from . import manifest as manifests
from .beside import beside
from .errors import ConfigError, DataError
from .execution import executions
from .lock import refuse_written
from .pins import split_tag
from .reader import Run
from .rewrite import check_sources, publish_tables, rebatched, write_segments
from .run_info import write_info
from .schema import RUN_TABLES, TABLES
from .segment import Sealed
from .store import open

__all__ = ["Merged", "Source", "merge"]

_WRITER = "merge"
_OWN_FACTS = ("pid", "endpoints", "read_only", "created_at", "format", "major", "minor")
# The column by which rows of a table without a key are held against those of another run.
_SHARED_BY = {"deliveries": "execution_id", "executions": "execution_id", "groups": "group_id"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A run that was merged."""

    path: str
    manifest: int
    executions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merged:
    """What a merge wrote."""

    path: str
    sources: tuple[Source, ...]
    num_rows: dict[str, int]
    num_same: int
    """Rows that several runs held, each written once; shared texts are not counted."""


def merge(runs: Sequence[str | Path], out: str | Path) -> Merged:
    """Write a new run `out` that holds all executions of `runs` (each may be RUN@TAG).

    Raises ConfigError when `out` is not new or a source is being written, DataError when an id means different things
    in two runs.
    """
    out = Path(out)
    if len(runs) < 2:
        raise ConfigError(f"wanted two runs or more to merge, got {len(runs)}; name them before -o")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"wanted a new folder to merge into, {out} is not empty; name another")
    opened = [_source(run) for run in runs]
    same = 0
    merged: dict[str, pa.Table] = {name: opened[0].table(name) for name in RUN_TABLES}
    for run in opened[1:]:
        _refuse_half_shared(merged, run)
        for name in RUN_TABLES:
            fresh, known = _fresh(name, merged[name], run)
            merged[name] = pa.concat_tables([merged[name], fresh])
            same += known if name != "blobs" else 0
    sources = tuple(
        Source(path=str(run.path), manifest=run.manifest_number, executions=tuple(executions(run))) for run in opened
    )
    _write(out, merged, _info(opened, sources))
    num_rows = {name: table.num_rows for name, table in merged.items() if table.num_rows}
    return Merged(path=str(out), sources=sources, num_rows=num_rows, num_same=same)


def _source(path: str | Path) -> Run:
    folder, tag = split_tag(path)
    if tag is None:
        refuse_written(folder)
    run = open(path)
    check_sources(run.path, run.manifest, RUN_TABLES)
    return run


def _refuse_half_shared(merged: dict[str, pa.Table], run: Run) -> None:
    """An execution that both hold must be the same one, in one of them maybe further on; else two would become one."""
    for name in ("calls", "nodes"):
        key = str(TABLES[name].key)
        here, there = (_by_execution(table, key) for table in (merged[name], run.table(name)))
        for execution_id in here.keys() & there.keys():
            mine, theirs = here[execution_id], there[execution_id]
            if mine - theirs and theirs - mine:
                raise DataError(
                    f"execution {execution_id}: wanted the same one wherever its id is, but {len(theirs - mine)} "
                    f"{name} are only in {run.path} and {len(mine - theirs)} only in the runs before it; "
                    "these are two executions under one id, and only one of the runs can be merged"
                )


def _by_execution(table: pa.Table, key: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for execution_id, value in zip(
        table.column("execution_id").to_pylist(), table.column(key).to_pylist(), strict=True
    ):
        found.setdefault(execution_id, set()).add(value)
    return found


def _fresh(name: str, have: pa.Table, run: Run) -> tuple[pa.Table, int]:
    """The rows of `run` that are not in `have`, and how many are; DataError for a key that means something else."""
    table, key = run.table(name), TABLES[name].key or _SHARED_BY.get(name, "node_id")
    shared = pc.is_in(table.column(key), value_set=pc.unique(have.column(key)))
    both = table.filter(shared)
    if not both.num_rows:
        return table, 0
    if name == "blobs":  # its id is its content
        return table.filter(pc.invert(shared)), both.num_rows
    known = have.filter(pc.is_in(have.column(key), value_set=pc.unique(both.column(key)))).to_pylist()
    if TABLES[name].key is None:
        held = {repr(row) for row in known}
        equal = pa.array([repr(row) in held for row in both.to_pylist()], pa.bool_())
        rest = both.filter(pc.invert(equal))
        return pa.concat_tables([table.filter(pc.invert(shared)), rest]), both.num_rows - rest.num_rows
    rows = {row[key]: row for row in known}
    for row in both.to_pylist():
        if repr(rows[row[key]]) != repr(row):
            differs = next(column for column in row if repr(row[column]) != repr(rows[row[key]][column]))
            raise DataError(
                f"{name} {row[key]}: wanted the same row wherever its {key} is, but its {differs} in {run.path} is not "
                "that of the runs before it; only one of the runs can be merged"
            )
    return table.filter(pc.invert(shared)), both.num_rows


def _info(runs: Sequence[Run], sources: Sequence[Source]) -> dict[str, Any]:
    """Facts that all runs share, and each run with its own ones."""
    infos = [{k: v for k, v in run.info.items() if k not in _OWN_FACTS} for run in runs]
    shared = {k: v for k, v in infos[0].items() if k != "merged_from" and all(i.get(k) == v for i in infos)}
    merged_from = [
        {
            "path": one.path,
            "manifest": one.manifest,
            "created_at": run.info.get("created_at"),
            "executions": list(one.executions),
            "info": {k: v for k, v in info.items() if k not in shared},
        }
        for run, one, info in zip(runs, sources, infos, strict=True)
    ]
    return {**shared, "merged_from": merged_from}


def _write(out: Path, merged: dict[str, pa.Table], info: dict[str, Any]) -> None:
    with beside(out, folder=True) as made:
        (made / manifests.FOLDER).mkdir(mode=0o700)
        names: Iterator[str] = (f"{_WRITER}-{number:06d}" for number in itertools.count(1))
        segments: dict[str, tuple[Sealed, ...]] = {
            name: write_segments(made, name, rebatched(table), names)
            for name, table in merged.items()
            if table.num_rows
        }
        write_info(made, info)
        publish_tables(made, segments, _WRITER, removed=())
        made.rename(out)
