"""`RunWriter`: makes rows durable in a run folder, in the order in which readers rely on.

One commit writes and syncs blobs, nodes and side tables first, then calls, then event rows. So a call that can be read
has all it names. Commits of several threads are grouped: whoever holds the lock writes what all have queued.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from . import manifest as manifests
from .arrays import table_of, to_batches
from .errors import CaptureError, ConfigError, GyreError
from .lock import FolderLock
from .reader import READ_ORDER, Run
from .recovery import REWRITERS, Recovered, leftovers, recover
from .rewrite import last_sequence
from .run_info import INFO, write_info
from .schema import TABLES
from .segment import Sealed, SegmentWriter, fsync_folder
from .types import Blob

__all__ = ["COMMIT_ORDER", "SEAL_AGE_S", "SEAL_BYTES", "RunWriter"]

SEAL_BYTES = 256 << 20
SEAL_AGE_S = 3600.0

# Whatever a row names comes before it.
COMMIT_ORDER = tuple(reversed(READ_ORDER))

_COMPRESS_FROM = 128  # bytes; below, zstd's own header eats the gain


@dataclass(kw_only=True, slots=True)
class _Entry:
    """Rows queued by one call. `owned`: their caller waits, and drops them when the commit fails."""

    rows: dict[str, list[Any]]
    batches: dict[str, list[pa.RecordBatch]]
    owned: bool
    error: Exception | None = None
    done: bool = False


@dataclass(kw_only=True, slots=True)
class _Live:
    """An open segment of this writer; `named` once a manifest names it."""

    segment: SegmentWriter
    opened_at: float = field(default_factory=time.monotonic)
    named: bool = False


class RunWriter:
    """Appends rows to a run. Thread-safe; use as a context manager or call `close`.

    `write(rows)` is the one to use when several threads record: its rows are committed together or not at all, and it
    raises if they were not. `append` and `put_blob` only queue; what they queued stays queued until a commit succeeds.
    """

    def __init__(self, path: str | Path, writer: str = "w0", *, create: bool = True, lock: bool = True) -> None:
        """Open `path` as its owner, or with `lock=False` as a worker of the owner under a writer name of its own.

        Left-over segments of a crash are recovered first (the owner: all; a worker: its own); see `recovered`.
        """
        if not re.fullmatch(r"[A-Za-z0-9_]{1,64}", writer):
            raise ConfigError(f"wanted a writer name of letters, digits and _, got {writer!r}; it becomes a file name")
        if writer in REWRITERS:
            raise ConfigError(f"wanted a writer name of your own, got {writer!r}; changes of a folder use it")
        self.path, self.writer = Path(path), writer
        if not create and not manifests.numbers(self.path):
            raise ConfigError(f"wanted a run folder, {path} holds no manifest; record one first")
        self._made = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.path / manifests.FOLDER).mkdir(exist_ok=True, mode=0o700)
            self._lock = FolderLock(self.path) if lock else None
        except OSError as error:
            raise ConfigError(
                f"wanted to record to {path}, got {error.strerror}; give a run folder that can be written"
            ) from error
        self._queue_lock, self._commit_lock = threading.Lock(), threading.RLock()
        self._queue: list[_Entry] = []
        self._live: dict[str, _Live] = {}
        self._broken: list[tuple[str, str]] = []
        self._untaken: list[SegmentWriter] = []
        self._strays: set[tuple[str, str]] = set()
        self._closed = False
        try:
            self.recovered: tuple[Recovered, ...] = tuple(
                recover(self.path, leftovers(self.path, None if lock else writer), writer)
            )
            if manifests.newest(self.path) is None:
                manifests.publish(self.path, lambda base: base, writer)
            if lock and not (self.path / INFO).exists():
                self.update_info({})
            self._sequence = last_sequence(self.path, writer)
            self._blobs = _known_blobs(self.path)
        except BaseException:
            self._release()
            raise

    @property
    def is_owner(self) -> bool:
        """Whether it holds the folder: a worker of the owner does not, and leaves `run.json` alone."""
        return self._lock is not None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- queueing ----------------------------------------------------------------------------------------------------

    def append(self, rows: Iterable[Any]) -> None:
        """Queue rows of any tables. A row that could not be read back exactly is refused here, with its name."""
        self._enqueue(rows, owned=False)

    def put_blob(self, data: bytes) -> str:
        """Queue `data` unless the run holds it already, and return its blob id (sha256 in hex)."""
        digest = hashlib.sha256(data)
        with self._queue_lock:
            if digest.digest() in self._blobs:
                return digest.hexdigest()
            self._blobs.add(digest.digest())
        codec, packed = "none", data
        if len(data) >= _COMPRESS_FROM:
            squeezed = pa.Codec("zstd").compress(data, asbytes=True)
            if len(squeezed) < len(data):
                codec, packed = "zstd", squeezed
        blob = Blob(blob_id=digest.hexdigest(), num_bytes=len(data), codec=codec, data=packed)
        # No batch yet: those of one commit become one, and nothing in a blob could be refused.
        self._put(_Entry(rows={"blobs": [blob]}, batches={}, owned=False))
        return digest.hexdigest()

    def _enqueue(self, rows: Iterable[Any], *, owned: bool) -> _Entry:
        by_table: dict[str, list[Any]] = {}
        for row in rows:
            by_table.setdefault(table_of(row), []).append(row)
        batches = {name: to_batches(name, many) for name, many in by_table.items()}
        return self._put(_Entry(rows=by_table, batches=batches, owned=owned))

    def _put(self, entry: _Entry) -> _Entry:
        with self._queue_lock:
            if self._closed:
                raise CaptureError(f"{self.path}: wanted to record, but this writer is closed; open a new one")
            self._queue.append(entry)
        return entry

    # --- committing --------------------------------------------------------------------------------------------------

    def write(self, rows: Iterable[Any]) -> None:
        """Queue `rows` and return once they, and all that was queued before, are durable.

        On CaptureError these rows count as never written; the same keys may be written again.
        """
        entry = self._enqueue(rows, owned=True)
        with self._commit_lock:
            if not entry.done:
                self._flush()
        if entry.error is not None:
            raise CaptureError(*entry.error.args) from entry.error.__cause__

    def commit(self) -> None:
        """Return once everything queued so far is durable; CaptureError if not (it stays queued)."""
        with self._commit_lock:
            self._flush()

    def _flush(self) -> None:
        with self._queue_lock:
            entries, self._queue = self._queue, []
        if not entries and not self._untaken:
            return
        durable: set[str] = set()
        try:
            while self._untaken:  # else rows of a failed commit would be there twice
                self._untaken[-1].take_back()
                self._untaken.pop().close()
            grouped = self._group(entries)
            self._roll()
            self._ensure_open(grouped)
            for name in COMMIT_ORDER:
                if name in grouped:
                    self._append(name, grouped[name])
                    durable.add(name)
        except (OSError, GyreError) as cause:
            error = CaptureError(
                f"{self.path}: wanted to commit {sum(len(r) for e in entries for r in e.rows.values())} rows, "
                f"got {cause}; free space or mend the disk, then go on"
            )
            error.__cause__ = cause
            self._settle(entries, durable, error)
            raise error from cause
        except BaseException:
            self._settle(entries, durable, CaptureError(f"{self.path}: the commit was interrupted; try again"))
            raise
        self._settle(entries, durable, None)

    def _group(self, entries: list[_Entry]) -> dict[str, list[pa.RecordBatch]]:
        """Batches by table: those built when the rows were queued, or one batch for the rows of several entries."""
        grouped: dict[str, list[pa.RecordBatch]] = {}
        queued = {name for entry in entries for name in entry.rows}
        for name in (name for name in COMMIT_ORDER if name in queued):
            holders = [entry for entry in entries if name in entry.rows]
            rows = [row for entry in holders for row in entry.rows[name]]
            key = TABLES[name].key
            fresh = [row for row in rows if (name, getattr(row, key)) not in self._strays] if key else rows
            if len(holders) == 1 and len(fresh) == len(rows) and name in holders[0].batches:
                grouped[name] = holders[0].batches[name]
            elif fresh:
                grouped[name] = to_batches(name, fresh)
        return grouped

    def _settle(self, entries: list[_Entry], durable: set[str], error: Exception | None) -> None:
        """Tell the waiting callers; on a failure keep what nobody waits for, less what did become durable.

        Rows that became durable although their caller is told of a failure are remembered, so that a second attempt
        does not write them twice.
        """
        kept = []
        for entry in entries:
            entry.done, entry.error = True, error
            if error is None:
                continue
            if entry.owned:
                for name in durable & set(entry.rows):
                    if key := TABLES[name].key:
                        self._strays |= {(name, getattr(row, key)) for row in entry.rows[name]}
                continue
            rest = {name: rows for name, rows in entry.rows.items() if name not in durable}
            if rest:
                batches = {name: made for name, made in entry.batches.items() if name in rest}
                kept.append(_Entry(rows=rest, batches=batches, owned=False))
        if kept:
            with self._queue_lock:
                self._queue[:0] = kept

    def _append(self, name: str, batches: list[pa.RecordBatch]) -> None:
        segment = self._live[name].segment
        try:
            segment.append(batches)
        finally:
            if segment.broken is not None:
                del self._live[name]
                self._broken.append((name, segment.stem))
                if segment.taken_back:
                    segment.close()
                else:
                    self._untaken.append(segment)

    def _roll(self) -> None:
        """Seal segments that are full or old, before the commit that would go into them."""
        now = time.monotonic()
        due = [
            name
            for name, live in self._live.items()
            if live.segment.end >= SEAL_BYTES or (live.segment.num_rows and now - live.opened_at >= SEAL_AGE_S)
        ]
        if due:
            self._seal(due)

    def _ensure_open(self, names: Iterable[str]) -> None:
        """Have an open segment for each table, named in a manifest before a row goes into it."""
        for name in names:
            if name not in self._live:
                folder = self.path / name
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
                    fsync_folder(self.path)
                self._sequence += 1
                self._live[name] = _Live(segment=SegmentWriter(folder, f"{self.writer}-{self._sequence:06d}", name))
        fresh = [(name, live) for name, live in self._live.items() if not live.named]
        if not fresh:
            return

        def change(base: manifests.Manifest) -> manifests.Manifest:
            for name, live in fresh:
                if live.segment.stem not in base.open.get(name, ()):
                    base = base.opened(name, live.segment.stem)
            return base

        manifests.publish(self.path, change, self.writer)
        for _, live in fresh:
            live.named = True

    # --- sealing -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Commit what is queued and seal every open segment of this writer; a later append starts new ones."""
        with self._commit_lock:
            self._flush()
            self._seal(list(self._live))
            recover(self.path, self._broken, self.writer)
            self._broken.clear()

    def _seal(self, names: list[str]) -> None:
        done: dict[tuple[str, str], Sealed | None] = {}
        try:
            for name in names:
                segment = self._live[name].segment
                try:
                    done[name, segment.stem] = segment.seal() if segment.num_rows else None
                finally:
                    segment.close()
                    del self._live[name]
                    if (name, segment.stem) not in done:
                        self._broken.append((name, segment.stem))
        finally:
            if done:
                try:
                    self._publish_sealed(done)
                except BaseException:
                    self._broken += done  # sealed but not named: readers still find them, `recover` publishes them
                    raise

    def _publish_sealed(self, done: Mapping[tuple[str, str], Sealed | None]) -> None:
        def change(base: manifests.Manifest) -> manifests.Manifest:
            for (name, stem), sealed in done.items():
                base = base.closed(name, stem, sealed)
            return base

        manifests.publish(self.path, change, self.writer)
        for (name, stem), sealed in done.items():
            log = self.path / name / f"{stem}.commit"
            if sealed is None:
                (self.path / name / f"{stem}.open").unlink()
                log.unlink()
            else:
                os.rename(log, log.with_suffix(".crc"))

    def close(self) -> None:
        """Commit, seal, and let go of the folder. The lock is released even when that fails."""
        with self._commit_lock:
            if self._closed:
                return
            try:
                self.seal()
            finally:
                with self._queue_lock:
                    self._closed = True
                self._release()

    def discard(self) -> None:
        """Close, and remove a run that this writer made and nothing was recorded to: a failed start leaves nothing."""
        self.close()
        current = manifests.newest(self.path) or manifests.EMPTY
        if not self._made or current.open or current.sealed:
            return
        folder = self.path / manifests.FOLDER
        for path in (*folder.iterdir(), self.path / INFO, self.path / "lock"):
            path.unlink(missing_ok=True)
        folder.rmdir()
        self.path.rmdir()

    def _release(self) -> None:
        for segment in (*self._untaken, *(live.segment for live in self._live.values())):
            segment.close()
        self._live.clear()
        if self._lock is not None:
            self._lock.release()

    # --- run.json ----------------------------------------------------------------------------------------------------

    def update_info(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Set fields of `run.json`, replacing the file at once, and return the whole. Only the owner calls this."""
        return write_info(self.path, fields)


def _known_blobs(run: Path) -> set[bytes]:
    column = Run(run).table("blobs").column("blob_id")
    return {bytes.fromhex(blob_id) for blob_id in column.to_pylist()}
