"""Reading a run.

A `Run` is a snapshot: the newest manifest, its sealed segments, and its open segments up to their last good commit
record. `refresh` moves it on. Within a snapshot every call's nodes and blobs are there, because they were synced before
the call and are looked for after it. Columns are views of the memory-mapped files; small ones of many small batches are
gathered (`gather`). Every file of a snapshot is mapped when the snapshot is taken, so it stays readable when a
compaction removes the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from . import manifest as manifests
from .conform import conform, stamp_of
from .errors import ConfigError, CorruptError, SchemaError
from .gather import Gathered
from .growing import OpenSegment, read_open
from .removed import nodes_of, visible
from .run_info import read_info
from .schema import arrow_schema
from .schema import table as declared_table
from .segment import Sealed, check_bytes, check_file, iter_sealed, map_file, projected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .execution import Execution
    from .follow import Changes
    from .frame import Frame
    from .types import Score

__all__ = ["READ_ORDER", "Run", "conformed", "unpack_blob"]

_log = logging.getLogger(__name__)

_RETRIES, _RETRY_S = 50, 0.02  # a writer between two steps of sealing is waited for at most a second

# The reverse of the order in which a commit writes: what a row names is looked for after the row.
READ_ORDER = (
    "cells",
    "steps",
    "ledger",
    "scores",
    "executions",
    "groups",
    "deliveries",
    "calls",
    "teacher_logprobs",
    "top_logprobs",
    "routed_experts",
    "nodes",
    "environments",
    "blobs",
)

# Read without their checksum: token by token they would all be touched. A blob has its own, `verify` checks all.
_LARGE = ("nodes", "blobs", "routed_experts", "top_logprobs", "teacher_logprobs")

Batches = tuple[pa.Schema, Iterable[pa.RecordBatch]]


class Run:
    """A snapshot of a run folder, read-only. Get one with `open`."""

    def __init__(self, path: Path, pinned: int | None = None) -> None:
        """Snapshot of the newest manifest, or for ever of the one whose number is `pinned`."""
        self.path = path
        self._pinned = pinned
        self._manifest = manifests.EMPTY
        self._maps: dict[tuple[str, str], pa.Buffer] = {}
        self._open: dict[tuple[str, str], OpenSegment] = {}
        self._sealed: dict[tuple[str, str], pa.Table] = {}
        self._growing: dict[tuple[str, str], tuple[OpenSegment, Gathered]] = {}
        self._tables: dict[str, pa.Table] = {}
        self._hidden: pa.Array | None = None
        self._blob_rows: dict[str, int] | None = None
        self.refresh()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, manifest {self.manifest_number})"

    def __getitem__(self, prefix: str) -> Execution:
        """The execution whose id starts with `prefix`; DataError when none or several do."""
        from .execution import Execution  # the tree view reads runs, so it is loaded only when asked for

        return Execution.load(self, prefix)

    def __iter__(self) -> Iterator[Execution]:
        """The executions, oldest first; the tables are scanned once for all of them."""
        from .execution import Execution, executions
        from .tree import Forest

        forest = Forest(self)
        return (Execution(self, info, forest) for info in executions(self).values())

    def __len__(self) -> int:
        """Number of executions."""
        from .execution import executions

        return len(executions(self))

    def __contains__(self, execution_id: object) -> bool:
        from .execution import executions

        return execution_id in executions(self)

    def sql(self, query: str, **settings: Any) -> Frame:
        """Rows of a SELECT over this run's views, for example `calls` or `paths`; see `gyre_data.sql`."""
        from .query import sql

        return sql(self, query, **settings)

    def score(self, execution: Execution | str, value: float | None, *, evaluator: str, **more: Any) -> Score:
        """Append a verdict durably; `refresh` brings it into this snapshot. See `gyre_data.score`."""
        from .scores import score

        return score(self, execution, value, evaluator=evaluator, **more)

    @property
    def manifest_number(self) -> int:
        """Number of the manifest this snapshot was taken at."""
        return self._manifest.number

    @property
    def manifest(self) -> manifests.Manifest:
        """The manifest this snapshot was taken at."""
        return self._manifest

    @property
    def open_segments(self) -> dict[tuple[str, str], OpenSegment]:
        """The open segments of this snapshot by (table, stem), with what lies beyond their verified prefix."""
        return dict(self._open)

    @property
    def info(self) -> dict[str, Any]:
        """What `run.json` says (endpoints, policy, tokenizer, ...), read anew; empty when there is none."""
        return read_info(self.path)

    def refresh(self) -> bool:
        """Take a new snapshot; True if anything was added. Only what is new is read and checked."""
        for attempt in range(_RETRIES):
            current = self._current()
            if current is None:
                raise ConfigError(f"{self.path}: wanted a run folder, found no manifest in it; see `gyre ls`")
            try:
                found = self._read_open(current)
                maps = self._map_sealed(current)
                # A call that was committed meanwhile may rest on a segment that only the next manifest names.
                if not self._is_newest(current.number) and attempt < _RETRIES - 1:
                    continue
                return self._take(current, found, maps)
            except FileNotFoundError as error:
                # Sealed or recovered since the manifest was read: the next one names it.
                if attempt == _RETRIES - 1:
                    raise CorruptError(
                        f"{error.filename}: manifest {current.number} names this segment, but it is gone; "
                        f"see `gyre verify {self.path}`"
                    ) from error
                time.sleep(_RETRY_S)
            except OSError as error:
                raise CorruptError(
                    f"{error.filename}: manifest {current.number} names this segment, but it cannot be read "
                    f"({error.strerror}); restore it"
                ) from error
        raise AssertionError("the last attempt returns or raises")

    def _current(self) -> manifests.Manifest | None:
        if self._pinned is None:
            return manifests.newest(self.path)
        return manifests.read(manifests.manifest_path(self.path, self._pinned))

    def _is_newest(self, number: int) -> bool:
        return self._pinned is not None or manifests.numbers(self.path)[-1:] == [number]

    def _map(self, table: str, sealed: Sealed) -> pa.Buffer:
        return map_file(self.path / table / sealed.name)

    def _map_sealed(self, current: manifests.Manifest) -> dict[tuple[str, str], pa.Buffer]:
        """Every sealed file, mapped. One that cannot be is left out: whoever wants its table is told."""
        maps: dict[tuple[str, str], pa.Buffer] = {}
        for name, segments in current.sealed.items():
            for sealed in segments:
                known = self._maps.get((name, sealed.name))
                with contextlib.suppress(OSError):
                    maps[name, sealed.name] = self._map(name, sealed) if known is None else known
        return maps

    def _take(
        self,
        current: manifests.Manifest,
        found: dict[tuple[str, str], OpenSegment],
        maps: dict[tuple[str, str], pa.Buffer],
    ) -> bool:
        changed = current.number != self._manifest.number or any(
            key not in self._open or self._open[key].end != part.end for key, part in found.items()
        )
        if changed:
            self._manifest, self._open, self._maps = current, found, maps
            self._sealed = {key: rows for key, rows in self._sealed.items() if key in maps}
            self._growing = {key: rows for key, rows in self._growing.items() if key in found}
            self._tables.clear()
            self._hidden = None
            self._blob_rows = None
        return changed

    def _read_open(self, current: manifests.Manifest) -> dict[tuple[str, str], OpenSegment]:
        found: dict[tuple[str, str], OpenSegment] = {}
        for name in READ_ORDER:
            for stem in current.open.get(name, ()):
                folder = self.path / name
                log = (folder / f"{stem}.commit").read_bytes()
                data = folder / f"{stem}.open"
                if not data.exists():
                    data = folder / f"{stem}.arrow"
                part = read_open(data, log, self._open.get((name, stem)))
                if part.damage is not None:
                    _log.warning("%s: %s; the rows before it are used", data, part.damage)
                found[name, stem] = part
        return found

    def table(self, name: str) -> pa.Table:
        """All rows of table `name` with exactly the columns of this release, chunked as on disk; maybe no rows.

        Tokens, log-probs and blobs view the files. Raises CorruptError or SchemaError.
        """
        if name not in self._tables:
            self._tables[name] = self.shown(name, self.stored(name))
        return self._tables[name]

    def stored(self, name: str) -> pa.Table:
        """All rows that the files hold, as `table`, but with those of removed executions."""
        tables = [table for _, table in self.parts(name)]
        return pa.concat_tables(tables) if tables else arrow_schema(name).empty_table()

    def parts(self, name: str) -> list[tuple[str, pa.Table]]:
        """The rows of `stored` by segment, in order. A segment keeps its stem when it is sealed, and only grows."""
        declared_table(name)
        found = []
        for sealed in self._manifest.sealed.get(name, ()):
            key = (name, sealed.name)
            if key not in self._sealed:
                schema, batches = self._open_sealed(name, sealed)
                self._sealed[key] = Gathered(partial(conformed, name, schema), batches).table()
            found.append((sealed.name.removesuffix(".arrow"), self._sealed[key]))
        for stem in self._manifest.open.get(name, ()):
            part = self._open[name, stem]
            if part.schema is not None:
                found.append((stem, self._grown(name, stem, part)))
        return found

    def _grown(self, name: str, stem: str, part: OpenSegment) -> pa.Table:
        before, rows = self._growing.pop((name, stem), (None, None))
        if rows is None or before is None or before.mapped is not part.mapped:
            before, rows = None, Gathered(partial(conformed, name, part.schema))
        rows.add(part.batches(before))
        self._growing[name, stem] = (part, rows)
        return rows.table()

    def segments(
        self, name: str, columns: Collection[str], lengths_of: Collection[str] = ()
    ) -> list[Callable[[], Batches]]:
        """The segments of `stored`, in order, each as a function that reads `columns` of it, a batch at a time.

        A column that an older writer did not have is not there. Nothing is kept: what a cold segment unpacks to goes
        when the caller lets go of the batch. Lists in `lengths_of` may hold zeros.
        """
        found: list[Callable[[], Batches]] = [
            partial(self._open_sealed, name, sealed, columns, lengths_of)
            for sealed in self._manifest.sealed.get(name, ())
        ]
        for stem in self._manifest.open.get(name, ()):
            part = self._open[name, stem]
            if part.schema is not None:
                found.append(partial(_selected, part, projected(part.schema, columns)))
        return found

    def shown(self, name: str, rows: pa.Table) -> pa.Table:
        """`rows` of table `name` without those of removed executions."""
        return visible(name, rows, self._manifest.removed, self._hidden_nodes)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the folder changed and take a new snapshot; False when nothing did in `timeout_s` seconds."""
        from .follow import wait  # it reads runs

        return wait(self, timeout_s)

    def follow(self, *, idle_s: float | None = None) -> Iterator[Changes]:
        """Yield all rows there are and then each new one, by table, within a tenth of a second; see `follow`.

        Ends when nothing came for `idle_s` seconds; without it, never.
        """
        from .follow import follow

        return follow(self, idle_s=idle_s)

    def _hidden_nodes(self) -> pa.Array:
        if self._hidden is None:
            self._hidden = nodes_of(self.stored("nodes"), self._manifest.removed)
        return self._hidden

    def check_bytes(self, tables: Collection[str] | None = None) -> None:
        """CorruptError unless every sealed byte is what was sealed; open segments were checked when they were read.

        For what hands rows on to where their checksums do not go: reading alone does not check the large tables so.
        `tables` are those that are handed on; None means all. A file is read for this once in the life of a process.
        """
        for name, segments in self._manifest.sealed.items():
            for sealed in segments if tables is None or name in tables else ():
                path = self.path / name / sealed.name
                try:
                    check_file(path, sealed)
                except OSError:  # removed since, maybe: what this snapshot has mapped is what counts
                    check_bytes(self._bytes(name, sealed), sealed, str(path), full=True)

    def _bytes(self, name: str, sealed: Sealed) -> pa.Buffer:
        try:
            return self._maps.get((name, sealed.name)) or self._map(name, sealed)
        except OSError as error:
            where = self.path / name / sealed.name
            came = "it is gone" if isinstance(error, FileNotFoundError) else f"it cannot be read ({error})"
            raise CorruptError(
                f"{where}: manifest {self.manifest_number} names this segment, but {came}; restore it"
            ) from error

    def _open_sealed(
        self, name: str, sealed: Sealed, columns: Collection[str] | None = None, lengths_of: Collection[str] = ()
    ) -> Batches:
        where, full = f"{self.path / name / sealed.name}", name not in _LARGE
        data = self._bytes(name, sealed)
        return iter_sealed(data, sealed, where, full=full, columns=columns, lengths_of=lengths_of)

    def blob(self, blob_id: str) -> bytes:
        """The plain bytes of a blob, checked against their own hash; KeyError when the run does not hold it."""
        blobs = self.table("blobs")
        if self._blob_rows is None:
            self._blob_rows = {key: i for i, key in enumerate(blobs.column("blob_id").to_pylist())}
        row = self._blob_rows[blob_id]
        data = blobs.column("data")[row].as_buffer()
        codec, num_bytes = blobs.column("codec")[row].as_py(), blobs.column("num_bytes")[row].as_py()
        plain = unpack_blob(blob_id, codec, num_bytes, data)
        if hashlib.sha256(plain).hexdigest() != blob_id:
            raise CorruptError(f"blob {blob_id}: its bytes hash to something else; see `gyre verify {self.path}`")
        return plain


def unpack_blob(blob_id: str, codec: str, num_bytes: int, data: pa.Buffer) -> bytes:
    """Plain bytes of one row of `blobs`, not yet checked against the hash."""
    if codec == "none":
        return bytes(data)
    if codec != "zstd":
        raise SchemaError(f"blob {blob_id}: wanted codec zstd or none, got {codec!r}; upgrade gyre-rl to read it")
    try:
        return bytes(pa.Codec("zstd").decompress(data, decompressed_size=num_bytes, asbytes=True))
    except (pa.ArrowException, OSError) as error:
        raise CorruptError(f"blob {blob_id}: wanted zstd data, got damage ({error}); run `gyre verify`") from error


def conformed(
    name: str, schema: pa.Schema, batches: list[pa.RecordBatch], columns: Collection[str] | None = None
) -> pa.Table:
    """One segment of table `name` with this release's columns, or those of them in `columns`.

    SchemaError if it is of another table or newer major.
    """
    stamp = stamp_of(schema)
    if stamp.get("table", name) != name:
        raise SchemaError(f"wanted a segment of table {name}, got one of {stamp['table']}; it lies in the wrong folder")
    return conform(name, pa.Table.from_batches(batches, schema), columns)


def _selected(part: OpenSegment, schema: pa.Schema) -> Batches:
    return schema, (batch.select(schema.names) for batch in part.batches())
