"""`gyre import`: sessions that other tools recorded become executions of a run.

What is imported is text: its tokens are counted locally and their ids are not known, so it is never trained by RL
(reason `text_only`). Importing the same source again changes nothing: an execution's id follows from the session's own
id, and one that the run holds is passed over by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gyre_data.arrays import table_of
from gyre_data.counting import TokenCounter, load_counter
from gyre_data.errors import ConfigError, DataError
from gyre_data.execution import executions
from gyre_data.json_values import object_of
from gyre_data.reader import Run
from gyre_data.types import ExecutionEvent
from gyre_data.writer import RunWriter

from .builder import TreeBuilder
from .calls import Report, Session
from .formats import FORMATS, Importer, expand, importer_of
from .lines import Files

__all__ = ["Imported", "ImportedSession", "Skipped", "import_sessions", "source_bytes"]

_COMMIT_BYTES, _COMMIT_ROWS = 32 << 20, 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedSession:
    """A session that is in the run now, and what was found in its files."""

    name: str
    format: str
    execution_id: str
    num_calls: int
    num_failed: int
    """Calls that failed or were aborted."""
    num_nodes: int
    num_files: int
    not_understood: dict[str, int]
    """Kind -> records that no importer understands; they are kept in the execution's attributes."""
    beside: dict[str, int]
    """Kind -> records that are no part of a conversation."""
    damaged: tuple[str, ...]
    """`file:line: why` of lines that could not be read."""
    num_twice: int
    num_unanswered: int
    """Messages that no reply follows, so that no call holds them."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A source that was not imported, and why."""

    name: str
    why: str
    execution_id: str | None = None
    """The execution that the run holds already."""
    failed: bool = False
    """The source could not be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import did."""

    path: Path
    sessions: tuple[ImportedSession, ...]
    skipped: tuple[Skipped, ...]


def import_sessions(
    sources: str | Path | Iterable[str | Path],
    out: str | Path,
    *,
    format: str | None = None,
    tokenizer: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Read `sources` (session files, or folders of them) into the run `out`, new or existing.

    `format` forces a format for all of them; else each file's is found out. `tokenizer` is a folder or file to count
    tokens with; without it a quarter of the bytes counts. `progress` is told of bytes as they are read. Raises
    ConfigError when a source is of no known format, or the run cannot be written.
    """
    given = [Path(sources)] if isinstance(sources, str | Path) else [Path(one) for one in sources]
    chosen = _forced(format)
    work = [item for source in given for item in _work(source, chosen)]
    counter, files, owners = _counter(tokenizer), Files(progress), dict[str, str]()
    done: list[ImportedSession] = []
    skipped: list[Skipped] = []
    writer = RunWriter(out)
    try:
        run = Run(writer.path)
        there = _there(run)
        sink = _Sink(writer=writer, begun=_begun(run, there))
        if not there:
            writer.update_info({"mode": "import"})
        for path, importer in work:
            if importer is None:
                skipped.append(Skipped(name=path.name, why="no format that is known; --format forces one"))
                continue
            before = len(done) + len(skipped)
            try:
                for session in importer.sessions(path, files, owners):
                    execution_id = _execution_id(importer, session)
                    if execution_id in there:
                        why = _why_there(path, there[execution_id])
                        skipped.append(Skipped(name=session.name, why=why, execution_id=execution_id))
                        continue
                    done.append(_import(session, importer, execution_id, counter, sink))
                    there[execution_id] = {}
            except DataError as error:
                skipped.append(Skipped(name=path.name, why=str(error), failed=True))
            if len(done) + len(skipped) == before:
                skipped.append(Skipped(name=path.name, why="no conversation in it", failed=True))
        sink.commit()
    except BaseException:
        writer.discard()
        raise
    writer.close() if done else writer.discard()
    return Imported(path=Path(out), sessions=tuple(done), skipped=tuple(skipped))


def source_bytes(sources: Iterable[str | Path]) -> int:
    """Bytes of the files that sources mean: what `progress` counts towards."""
    return sum(path.stat().st_size for source in sources for path in expand(Path(source)))


@dataclass(kw_only=True, slots=True)
class _Sink:
    """Gathers rows for the writer and commits now and then: a session may be one line, and a commit costs time."""

    writer: RunWriter
    begun: frozenset[tuple[str, str]] = frozenset()
    """(table, key) of rows that an import which was killed wrote of executions that it never finished."""
    _bytes: int = 0
    _rows: list[Any] = field(default_factory=list)

    def store(self, data: bytes) -> str:
        """Queue a blob."""
        self._bytes += len(data)
        if self._bytes >= _COMMIT_BYTES:
            self.commit()
        return self.writer.put_blob(data)

    def append(self, rows: Sequence[Any]) -> None:
        """Gather all rows of an execution, which become durable together."""
        self._rows += [row for row in rows if not self.begun or _key(row) not in self.begun]
        if len(self._rows) >= _COMMIT_ROWS:
            self.commit()

    def commit(self) -> None:
        """Make durable what was gathered."""
        self.writer.write(self._rows)
        self._bytes, self._rows = 0, []


def _forced(name: str | None) -> Importer | None:
    if name is None or name in FORMATS:
        return FORMATS[name] if name else None
    raise ConfigError(f"--format: wanted one of {', '.join(FORMATS)}, got {name!r}")


def _work(source: Path, chosen: Importer | None) -> Iterator[tuple[Path, Importer | None]]:
    """The files to read, each with its importer; in a folder, files of no known format are passed over."""
    for path in expand(source):
        if path != source and any(module.belongs(path) for module in FORMATS.values()):
            continue
        importer = chosen or importer_of(path)
        if importer is None and path == source:
            raise ConfigError(
                f"wanted a session in one of the formats {', '.join(FORMATS)}, {path} looks like none of them; "
                "--format forces one"
            )
        yield path, importer


def _counter(tokenizer: str | Path | None) -> TokenCounter:
    if tokenizer is None or Path(tokenizer).exists():
        return load_counter(Path(tokenizer) if tokenizer is not None else None)
    try:
        from huggingface_hub import hf_hub_download

        return load_counter(Path(hf_hub_download(str(tokenizer), "tokenizer.json")))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"--tokenizer: wanted a folder, a tokenizer.json or a model's name, got {tokenizer} ({error!s:.200}); "
            "give a folder with a tokenizer.json"
        ) from error


def _there(run: Run) -> dict[str, dict[str, Any]]:
    """Executions that the run holds whole, with what their attributes say of an import.

    The events of an execution are written last, so one without any was cut off.
    """
    whole = set(run.table("executions").column("execution_id").to_pylist())
    found: dict[str, dict[str, Any]] = {}
    for info in executions(run).values():
        if info.execution_id in whole:
            told = object_of(info.attributes).get("import")
            found[info.execution_id] = told if isinstance(told, dict) else {}
    return found


_KEYS = {"nodes": "node_id", "calls": "call_id", "deliveries": "call_id"}


def _begun(run: Run, whole: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Rows of the others. Ids follow from the source, so the same rows come again, and need not be written twice."""
    value_set, found = pa.array(sorted(whole), pa.string()), set[tuple[str, str]]()
    for name, key in _KEYS.items():
        rows = run.table(name)
        cut_off = rows.filter(pc.invert(pc.is_in(rows.column("execution_id"), value_set=value_set)))
        found |= {(name, value) for value in cut_off.column(key).to_pylist()}
    return frozenset(found)


def _key(row: Any) -> tuple[str, str] | None:
    name = table_of(row)
    return (name, getattr(row, _KEYS[name])) if name in _KEYS else None


def _execution_id(importer: Importer, session: Session) -> str:
    name = f"{importer.FORMAT}\0{session.key}"
    return f"e_{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:20]}"


def _why_there(path: Path, told: dict[str, Any]) -> str:
    """Why a session is passed over; says so when its file is not the one that was read."""
    files = told.get("files") or [{}]
    if (known := files[0].get("sha256")) and known != hashlib.sha256(path.read_bytes()).hexdigest():
        return "the run holds it already, from a file that was different then; import it into another run"
    return "the run holds it already"


def _import(
    session: Session, importer: Importer, execution_id: str, counter: TokenCounter, sink: _Sink
) -> ImportedSession:
    builder = TreeBuilder(execution_id, counter, sink.store)
    num_failed = 0
    for call in session.calls:
        builder.add(call, at=session.at)
        num_failed += call.status != "ok"
    sink.append([*builder.rows(), *_events(session, importer, execution_id, counter, builder)])
    report = session.report
    return ImportedSession(
        name=session.name,
        format=importer.FORMAT,
        execution_id=execution_id,
        num_calls=builder.num_calls,
        num_failed=num_failed,
        num_nodes=builder.num_nodes,
        num_files=len(session.files),
        not_understood=dict(report.not_understood),
        beside=dict(report.beside),
        damaged=tuple(report.damaged),
        num_twice=report.twice,
        num_unanswered=report.unanswered,
        notes=tuple(report.notes),
    )


def _events(
    session: Session, importer: Importer, execution_id: str, counter: TokenCounter, builder: TreeBuilder
) -> Sequence[ExecutionEvent]:
    """The execution's rows. Why it ended is not in any source, so it is null."""
    begin, end = builder.span() or (session.at or datetime.now(UTC),) * 2
    attributes = {
        "import": {
            "format": importer.FORMAT,
            "importer": f"{importer.FORMAT}/{importer.VERSION}",
            "source": session.name,
            "files": [{"name": f.name, "num_bytes": f.num_bytes, "sha256": f.sha256} for f in session.files],
            "tokens": counter.name,
            **_found(session.report),
        },
        **session.attributes,
    }
    started = ExecutionEvent(
        execution_id=execution_id,
        event="started",
        at=begin,
        group_id=session.group_id,
        task_id=session.task_id,
        harness=session.harness,
        harness_version=session.harness_version,
        attributes=json.dumps(attributes, ensure_ascii=False),
    )
    return started, ExecutionEvent(execution_id=execution_id, event="ended", at=end)


def _found(report: Report) -> dict[str, Any]:
    """What the report says, without what is empty."""
    found = {
        "records": dict(report.records),
        "beside": dict(report.beside),
        "not_understood": dict(report.not_understood),
        "kept": report.kept,
        "damaged": report.damaged,
        "twice": report.twice,
        "unanswered": report.unanswered,
        "notes": report.notes,
    }
    return {name: value for name, value in found.items() if value}
