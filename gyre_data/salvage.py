"""`gyre verify --salvage`: what damage left of a run becomes a run again; what is broken goes to `quarantine/`.

A commit is good if its bytes have the CRC-32 of its record, whatever lies before or after it; the records are in the
log of an open segment and in the `.crc` file of a sealed one. The good commits of a damaged segment become a new sealed
segment. A sealed file without its log (releases before format 1.2 did not keep it) has one CRC for all its bytes, so
nothing of it is known to be good: it is left where it is, to be restored from a copy.

A tree must hang together to be read, so calls that rest on a lost node are left out too, with their deliveries. Every
file that is replaced goes to `quarantine/`; none is deleted. One that a tag names stays in its place as well.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from . import manifest as manifests
from .commit_log import RECORD_BYTES, read_record
from .errors import CorruptError, DataError
from .lock import FolderLock
from .manifest import Manifest
from .pins import pinned_manifests
from .reader import conformed
from .recovery import QUARANTINE, free_name, lost_manifest
from .rewrite import last_sequence, rebatched, write_segments
from .schema import TABLES, arrow_schema
from .segment import Sealed, check_bytes, fsync_folder, map_file, parse_pieces

__all__ = ["Broken", "Salvage", "plan_salvage", "salvage"]

_WRITER = "salvage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """One damaged segment and what is left of it."""

    table: str
    name: str
    num_rows: int | None
    """Rows it should hold; None where only its damaged log says it."""
    num_good: int
    detail: str
    left_alone: bool = False
    """Nothing of it is known to be good; it stays in its place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Salvage:
    """A salvage that was done, or with `manifest` None the plan of one."""

    path: str
    manifest: int | None
    broken: tuple[Broken, ...]
    calls_left_out: tuple[str, ...]
    """Good calls that rest on a node that is lost."""
    nodes_left_out: int
    """Good nodes whose parents are lost."""
    executions: tuple[str, ...]
    """Executions that lose calls or nodes by that."""


@dataclass(kw_only=True, slots=True)
class _Found:
    """The state of a folder: good rows by table and segment, in order, and what is damaged."""

    current: Manifest
    parts: dict[str, list[tuple[str, pa.Table]]]  # by table: file name, its good rows
    broken: list[Broken]
    dropped: dict[str, pa.Array]  # by table: keys of good rows that are left out
    executions: set[str]


def plan_salvage(path: str | Path) -> Salvage:
    """What `salvage` would do now. Takes no lock: of a run that is being written it may say too much."""
    found = _look(Path(path))
    return _record(path, found, None)


def salvage(path: str | Path) -> Salvage:
    """Put damaged segments into quarantine and what is good of them into new ones, in one manifest.

    Takes the run's lock, or raises ConfigError that says who writes it. A crash leaves the folder as it was or as it
    becomes. Without damage nothing is done.
    """
    path = Path(path)
    lock = FolderLock(path)
    try:
        found = _look(path)
        replaced = _replaced(found)
        if not replaced:
            return _record(path, found, found.current.number)
        numbers = itertools.count(last_sequence(path, _WRITER) + 1)
        names = (f"{_WRITER}-{number:06d}" for number in numbers)
        made = {(t, name): write_segments(path, t, rebatched(rows), names) for (t, name), rows in replaced.items()}
        for table, name in replaced:
            _copy_away(path, table, name)
        published = manifests.publish(path, lambda base: _changed(base, made), _WRITER)
        pinned = {pair for one in pinned_manifests(path) for pair in one.stems()}
        for table, name in replaced:
            for file in _files(path, table, name):
                if (table, file.stem) not in pinned:
                    file.unlink(missing_ok=True)
        return _record(path, found, published.number)
    finally:
        lock.release()


def _record(path: str | Path, found: _Found, manifest: int | None) -> Salvage:
    calls = found.dropped.get("calls", pa.array([], pa.string())).to_pylist()
    return Salvage(
        path=str(path),
        manifest=manifest,
        broken=tuple(found.broken),
        calls_left_out=tuple(calls),
        nodes_left_out=len(found.dropped.get("nodes", ())),
        executions=tuple(sorted(found.executions)),
    )


# --- looking -------------------------------------------------------------------------------------------------------


def _look(path: Path) -> _Found:
    current = manifests.newest(path)
    if current is None:
        raise DataError(f"{path}: wanted a run folder, found no manifest in it; see `gyre ls`")
    if (lost := lost_manifest(path)) is not None:  # else what only that one named would be given up
        raise CorruptError(f"{path}: {lost}")
    found = _Found(current=current, parts={}, broken=[], dropped={}, executions=set())
    for name in (name for name in TABLES if name in current.tables):
        healthy: list[pa.Schema] = [arrow_schema(name)]
        parts = found.parts.setdefault(name, [])
        late: list[tuple[str, Path, bytes, int | None]] = []
        for one in current.sealed.get(name, ()):
            file = path / name / one.name
            try:
                data = map_file(file)
                check_bytes(data, one, one.name, full=True)
                reader = pa.ipc.open_file(pa.BufferReader(data))
                healthy.insert(0, reader.schema)
                batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
                parts.append((one.name, conformed(name, reader.schema, batches)))
            except FileNotFoundError:
                _lost(found, name, one, "the manifest names it, but it is gone")
                parts.append((one.name, arrow_schema(name).empty_table()))
            except CorruptError:
                log = file.with_suffix(".crc")
                if not log.exists():
                    _lost(found, name, one, "it has no log beside it, so nothing of it is known to be good", alone=True)
                    continue
                late.append((one.name, file, log.read_bytes(), one.num_rows))
                parts.append((one.name, arrow_schema(name).empty_table()))
        for stem in current.open.get(name, ()):
            file = path / name / f"{stem}.open"
            log = file.with_suffix(".commit")
            if file.exists() and log.exists():
                late.append((file.name, file, log.read_bytes(), None))
                parts.append((file.name, arrow_schema(name).empty_table()))
        for file_name, file, log_bytes, num_rows in late:
            _good_part(found, name, file_name, file, log_bytes, num_rows, healthy)
    _drop_dependents(found)
    return found


def _lost(found: _Found, table: str, one: Sealed, why: str, *, alone: bool = False) -> None:
    found.broken.append(
        Broken(table=table, name=one.name, num_rows=one.num_rows, num_good=0, detail=why, left_alone=alone)
    )


def _good_part(
    found: _Found, table: str, name: str, file: Path, log: bytes, num_rows: int | None, schemas: Sequence[pa.Schema]
) -> None:
    """Keep the commits that check out; an open segment whose commits all do is not damaged."""
    data = map_file(file)
    spans, bad = _checked(data, log)
    rows = arrow_schema(table).empty_table()
    for schema in schemas:
        try:
            rows = conformed(table, *parse_pieces(data, spans, schema))
        except (pa.ArrowException, OSError, DataError, StopIteration):
            continue
        break
    found.parts[table] = [(n, rows if n == name else part) for n, part in found.parts[table]]
    if num_rows is None and not bad:
        return  # whoever writes next recovers it
    detail = f"{bad} of {bad + len(spans)} commits are damaged" if bad else "its commits are good, its end is damaged"
    found.broken.append(Broken(table=table, name=name, num_rows=num_rows, num_good=rows.num_rows, detail=detail))


def _checked(data: pa.Buffer, log: bytes) -> tuple[list[tuple[int, int]], int]:
    """Byte ranges of the commits that check out, and how many do not: after a damaged record the start is not known."""
    view = memoryview(data)
    spans: list[tuple[int, int]] = []
    bad, start = 0, 0
    known = True
    for at in range(0, len(log), RECORD_BYTES):
        record = read_record(log[at : at + RECORD_BYTES])
        if record is None:
            bad, known = bad + 1, False
            continue
        good = known and start < record.end <= data.size and zlib.crc32(view[start : record.end]) == record.crc32
        if good:
            spans.append((start, record.end))
        else:
            bad += 1
        start, known = record.end, True
    return spans, bad


def _drop_dependents(found: _Found) -> None:
    """Good rows that no tree can be read with: nodes without their parents, calls without their nodes."""
    if not found.broken:
        return
    nodes, calls = _whole(found, "nodes"), _whole(found, "calls")
    if nodes is None or calls is None:
        return  # a table that is left alone: nothing can be said of what rests on it
    parent = dict(zip(nodes.column("node_id").to_pylist(), nodes.column("parent_id").to_pylist(), strict=True))
    stands: dict[str, bool] = {}
    for node_id in parent:
        path: list[str] = []
        at: str | None = node_id
        while at is not None and at in parent and at not in stands:
            path.append(at)
            at = parent[at]
        good = at is None or stands.get(at, False)
        stands.update(dict.fromkeys(path, good))
    lost_nodes = [node_id for node_id, good in stands.items() if not good]
    gone_calls = [
        row["call_id"]
        for row in calls.select(["call_id", "prompt_node", "output_node"]).to_pylist()
        if not all(stands.get(row[end], False) for end in ("prompt_node", "output_node") if row[end] is not None)
    ]
    found.dropped = {
        "nodes": pa.array(lost_nodes, pa.string()),
        "calls": pa.array(gone_calls, pa.string()),
    }
    here = set(calls.column("call_id").to_pylist()) - set(gone_calls)
    deliveries = _whole(found, "deliveries")
    if deliveries is not None:
        told = set(deliveries.column("call_id").to_pylist())
        found.dropped["deliveries"] = pa.array(sorted(told - here), pa.string())
    for table, key in (("nodes", "node_id"), ("calls", "call_id")):
        rows = nodes if table == "nodes" else calls
        mask = pc.is_in(rows.column(key), value_set=found.dropped[table])
        found.executions |= set(rows.column("execution_id").filter(mask).to_pylist())


def _whole(found: _Found, table: str) -> pa.Table | None:
    """All good rows of a table; None when a segment of it is left alone."""
    if any(one.table == table and one.left_alone for one in found.broken):
        return None
    parts = [rows for _, rows in found.parts.get(table, ())]
    return pa.concat_tables(parts) if parts else arrow_schema(table).empty_table()


# --- writing -------------------------------------------------------------------------------------------------------


def _kept(found: _Found, table: str, rows: pa.Table) -> pa.Table:
    gone = found.dropped.get(table)
    if gone is None or not len(gone):
        return rows
    key = TABLES[table].key or "call_id"
    return rows.filter(pc.invert(pc.is_in(rows.column(key), value_set=gone)))


def _replaced(found: _Found) -> dict[tuple[str, str], pa.Table]:
    """Files that are replaced, with the rows that stay of each."""
    broken = {(one.table, one.name) for one in found.broken if not one.left_alone}
    return {
        (table, name): kept
        for table, parts in found.parts.items()
        for name, rows in parts
        if (kept := _kept(found, table, rows)).num_rows != rows.num_rows or (table, name) in broken
    }


def _changed(base: Manifest, made: Mapping[tuple[str, str], tuple[Sealed, ...]]) -> Manifest:
    for table in {table for table, _ in made}:
        sealed = tuple(new for one in base.sealed.get(table, ()) for new in made.get((table, one.name), (one,)))
        still_open = []
        for stem in base.open.get(table, ()):
            if (table, f"{stem}.open") in made:
                sealed += made[table, f"{stem}.open"]
            else:
                still_open.append(stem)
        base = base.with_table(table, sealed, tuple(still_open))
    return base


def _files(path: Path, table: str, name: str) -> list[Path]:
    file = path / table / name
    return [file, file.with_suffix(".commit" if name.endswith(".open") else ".crc")]


def _copy_away(path: Path, table: str, name: str) -> None:
    """Give the files a second name in quarantine, before the manifest lets go of the first."""
    target = path / QUARANTINE / table
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    for file in _files(path, table, name):
        if file.exists():
            os.link(file, free_name(target / file.name))
    fsync_folder(target)
