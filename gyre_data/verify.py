"""`verify`: is a run what was written, and do its rows agree with one another?

It reads every byte of every segment against its CRC, validates Arrow fully, holds columns against the schema, and then
checks what must hold between rows (`checks.py`, `sampling_checks.py`). It reports damage and mends nothing: `salvage`
does, and the writer that opens the folder next recovers what a crash left open. A run that is being written can be
verified: its snapshot is consistent.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from . import manifest as manifests
from .checks import CHECKS, Problem, ProblemKind
from .commit_log import later_records, read_log
from .errors import CorruptError, DataError, GyreError, SchemaError
from .growing import OpenSegment
from .lock import LOCK, is_locked
from .pins import TAGS, find_tag, split_tag
from .reader import Run, conformed
from .recovery import QUARANTINE, lost_manifest
from .removed import nodes_of, visible
from .rewrite import unnamed
from .run_info import INFO, read_info
from .sampling_checks import SAMPLING_CHECKS
from .schema import TABLES, arrow_schema
from .segment import open_sealed

__all__ = ["Report", "verify"]

_TRIES = 20  # looks at a folder that is rewritten under each: more than anybody does to it in a row
_TORN_WAIT_S = 0.1  # a live writer finishes a record that was seen half-written well within this


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Outcome of `verify`. `usable` is False when the run cannot be opened at all."""

    path: str
    manifest: int
    usable: bool
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    num_rows: dict[str, int]

    @property
    def exit_status(self) -> int:
        """0 clean, 1 problems (also when the run cannot be opened); a command line uses 2 for wrong use."""
        return 1 if self.problems else 0


def verify(path: str | Path) -> Report:
    """Check the run folder at `path` and say all that is wrong. ConfigError when it is not a run folder.

    `RUN@NAME` checks a dataset version; a run by itself also has the bytes of its tags checked. What was compacted or
    purged meanwhile is no fault: it is looked at again.
    """
    folder, tag = split_tag(path)
    report = _verify(folder, tag)
    for _ in range(_TRIES):
        if not report.problems or tag is not None or report.manifest in (0, *manifests.numbers(folder)[-1:]):
            break
        report = _verify(folder, tag)
    return report


def _verify(path: Path, tag: str | None) -> Report:
    problems = [*_check_info(path), *_check_manifests(path)]
    notes: list[str] = []
    try:
        run = Run(path, None if tag is None else find_tag(path, tag).manifest)
    except (DataError, OSError) as error:
        problems.append(Problem(kind=ProblemKind.UNUSABLE, where=str(path), detail=str(error)))
        return Report(path=str(path), manifest=0, usable=False, problems=tuple(problems), notes=(), num_rows={})
    if any(part.damage for part in run.open_segments.values()):
        time.sleep(_TORN_WAIT_S)
        run.refresh()
    problems += _check_open(run, notes)
    tables: dict[str, pa.Table] = {}
    unread: set[str] = {p.where.partition("/")[0] for p in problems if p.kind == ProblemKind.CORRUPT}
    for name in sorted({*run.manifest.tables, *TABLES}):
        found = list(_read_table(run, name, tables, notes))
        problems += found
        if found:
            unread.add(name)
    tables = _visible(run, tables, notes)
    for check in (*CHECKS, *SAMPLING_CHECKS):
        if unread & set(check.tables):
            notes.append(f"not checked, since {', '.join(sorted(unread & set(check.tables)))} is damaged: {check.says}")
            continue
        problems += check.run({name: tables[name] for name in check.tables}, notes)
    if tag is None:
        problems += _check_tags(run)
        notes += [*_log_notes(run), *_folder_notes(path)]
    return Report(
        path=str(path),
        manifest=run.manifest_number,
        usable=True,
        problems=tuple(problems),
        notes=tuple(notes),
        num_rows={name: table.num_rows for name, table in tables.items() if table.num_rows},
    )


def _check_info(path: Path) -> list[Problem]:
    try:
        read_info(path)
    except (DataError, OSError) as error:
        return [Problem(kind=ProblemKind.INFO, where=INFO, detail=str(error))]
    return []


def _check_manifests(path: Path) -> list[Problem]:
    """Every manifest reads, their numbers have no gap, and the newest one knows all segments."""
    problems = []
    found = manifests.numbers(path)
    for number in found:
        where = f"{manifests.FOLDER}/{number:08d}.json"
        try:
            manifests.read(manifests.manifest_path(path, number))
        except (DataError, OSError) as error:
            problems.append(Problem(kind=ProblemKind.MANIFEST, where=where, detail=str(error)))
        if number > found[0] and number - 1 not in found:
            detail = f"wanted number {number - 1} before it, found none; restore the file from a copy"
            problems.append(Problem(kind=ProblemKind.MANIFEST, where=where, detail=detail))
    with contextlib.suppress(DataError, OSError):  # of the newest one: told already
        if (lost := lost_manifest(path)) is not None:
            problems.append(Problem(kind=ProblemKind.MANIFEST, where=manifests.FOLDER, detail=lost))
    return problems


def _check_open(run: Run, notes: list[str]) -> list[Problem]:
    """Open segments: nothing beyond the verified prefix, unless their writer is alive and at work."""
    problems = []
    for (name, stem), part in run.open_segments.items():
        where = f"{name}/{stem}.open"
        log = run.path / name / f"{stem}.commit"
        try:
            records = log.read_bytes()
        except FileNotFoundError:
            continue  # sealed since
        if part.damage is None and (is_locked(log) or is_locked(run.path / LOCK)):
            continue  # being written, or sealed right now
        if part.damage is None and not part.data_tail and not part.log_tail:
            notes.append(f"{where} was left open with {part.num_rows} rows; the next writer of this folder seals it")
            continue
        problems.append(_tail_problem(f"{name}/{stem}.open", part, records))
    return problems


def _tail_problem(where: str, part: OpenSegment, log: bytes) -> Problem:
    later = later_records(log[part.log_end :])
    detail = (
        f"{part.damage or 'bytes after the last commit'}; {part.num_rows} rows before it are good, "
        f"{part.data_tail} bytes of data and {part.log_tail} of log lie after"
    )
    if later:
        detail += f", among them {later} later commits that were acknowledged: restore the file from a copy"
        return Problem(kind=ProblemKind.CORRUPT, where=where, detail=detail)
    detail += ": a crash in mid-write leaves this; the next writer of this folder moves it to quarantine/"
    return Problem(kind=ProblemKind.TAIL, where=where, detail=detail)


def _read_table(run: Run, name: str, tables: dict[str, pa.Table], notes: list[str]) -> list[Problem]:
    """Read every segment of one table with all checks, and put the rows that could be read into `tables`."""
    problems: list[Problem] = []
    if name not in TABLES:
        notes.append(f"{name}/ is a table of a newer release; its rows were not checked")
        return problems
    parts = []
    for sealed in run.manifest.sealed.get(name, ()):
        where = f"{name}/{sealed.name}"
        try:
            schema, batches = open_sealed(run.path / name / sealed.name, sealed, full=True)
            parts.append(conformed(name, schema, batches))
        except FileNotFoundError:
            detail = "the manifest names it, but it is gone; restore it from a copy"
            problems.append(Problem(kind=ProblemKind.MISSING, where=where, detail=detail))
        except SchemaError as error:
            problems.append(Problem(kind=ProblemKind.SCHEMA, where=where, detail=str(error)))
        except (CorruptError, OSError) as error:
            problems.append(Problem(kind=ProblemKind.CORRUPT, where=where, detail=str(error)))
    for stem in run.manifest.open.get(name, ()):
        part = run.open_segments[name, stem]
        if part.schema is None:
            continue
        try:
            parts.append(conformed(name, part.schema, list(part.batches())))
        except SchemaError as error:
            problems.append(Problem(kind=ProblemKind.SCHEMA, where=f"{name}/{stem}.open", detail=str(error)))
        except (CorruptError, pa.ArrowException) as error:
            problems.append(Problem(kind=ProblemKind.CORRUPT, where=f"{name}/{stem}.open", detail=str(error)))
    tables[name] = pa.concat_tables(parts) if parts else arrow_schema(name).empty_table()
    problems += _check_nulls(name, tables[name])
    return problems


def _check_nulls(name: str, table: pa.Table) -> list[Problem]:
    """No null where the schema promises a value; Arrow itself does not check this."""
    return [
        Problem(
            kind=ProblemKind.SCHEMA,
            where=f"{name}.{column.name}",
            detail=f"wanted a value in every row, found {table.column(column.name).null_count} nulls",
        )
        for column in TABLES[name].columns
        if not column.nullable and table.column(column.name).null_count
    ]


def _visible(run: Run, tables: dict[str, pa.Table], notes: list[str]) -> dict[str, pa.Table]:
    """The rows that readers show: those of removed executions need not hang together with them."""
    removed = run.manifest.removed
    if not removed:
        return tables
    hidden = nodes_of(tables["nodes"], removed)
    notes.append(f"removed executions: {len(removed)}; `gyre rm {run.path} --purge` clears what is left of them")
    return {name: visible(name, table, removed, lambda: hidden) for name, table in tables.items()}


def _check_tags(run: Run) -> list[Problem]:
    """Every byte of the segments that only tags name."""
    problems = []
    current = set(run.manifest.stems())
    for file in sorted((run.path / TAGS).glob("[!.]*.json")):
        try:
            tag = find_tag(run.path, file.stem)
            named = manifests.read(manifests.manifest_path(run.path, tag.manifest))
        except (GyreError, OSError) as error:
            problems.append(Problem(kind=ProblemKind.MANIFEST, where=f"{TAGS}/{file.name}", detail=str(error)))
            continue
        for name, segments in named.sealed.items():
            for sealed in segments:
                if (name, sealed.name.removesuffix(".arrow")) in current:
                    continue
                try:
                    open_sealed(run.path / name / sealed.name, sealed, full=True)
                except (CorruptError, OSError) as error:
                    where = f"tag {tag.name}: {name}/{sealed.name}"
                    problems.append(Problem(kind=ProblemKind.CORRUPT, where=where, detail=str(error)))
    return problems


def _log_notes(run: Run) -> list[str]:
    notes = []
    for name, segments in run.manifest.sealed.items():
        for sealed in segments:
            log = (run.path / name / sealed.name).with_suffix(".crc")
            with contextlib.suppress(FileNotFoundError):  # before format 1.2 there was none
                try:
                    records, damage = read_log(log.read_bytes())
                except (IsADirectoryError, PermissionError) as error:
                    records, damage = [], str(error)
                if damage or sum(record.num_rows for record in records) != sealed.num_rows:
                    notes.append(
                        f"{name}/{log.name} is damaged ({damage or 'it counts other rows'}): the segment is whole, but "
                        "should it be damaged one day, less of it can be saved; restore the log from a copy"
                    )
    return notes


def _folder_notes(path: Path) -> list[str]:
    notes = []
    folder = path / QUARANTINE
    if files := [p for p in folder.rglob("*") if p.is_file()] if folder.exists() else []:
        notes.append(f"{QUARANTINE}/ holds {len(files)} files of crashed or damaged segments; no reader looks there")
    with contextlib.suppress(GyreError, OSError):  # of a tag: told already
        if not is_locked(path / "lock") and (stale := unnamed(path)):
            notes.append(f"{len(stale)} files are named by nothing any more; `gyre compact {path} --yes` removes them")
    return notes
