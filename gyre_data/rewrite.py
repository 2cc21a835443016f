"""What compaction, purging, merging and salvage share: new sealed segments beside the old ones, then one manifest.

Every change of a folder goes the same way. New files are written, checked and synced under names never used before;
one manifest that names them instead of the old ones is published; only then are files removed that no manifest in use
names. So a crash at any point leaves the folder as it was or as it should become, and at most files that nobody reads,
which the next change removes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from . import manifest as manifests
from .arrays import BATCH_BYTES
from .conform import stamp_of
from .errors import DataError, SchemaError
from .lock import FolderLock
from .pins import TAGS, pinned_manifests
from .recovery import QUARANTINE, REWRITERS, leftovers, recover
from .schema import MINOR, TABLES, arrow_schema
from .segment import Sealed, check_bytes, fsync_folder, map_file, write_sealed

__all__ = [
    "FILE_BYTES",
    "check_sources",
    "codec_of",
    "drop_unnamed",
    "gathered",
    "last_sequence",
    "owned",
    "publish_tables",
    "rebatched",
    "unnamed",
    "write_segments",
]

FILE_BYTES = 256 << 20
"""A rewritten file is closed at this size; one batch more at most lies in it."""
_MAX_ROWS = 4096
_ROW_BYTES = 512  # what a row takes beside its lists and texts, roughly


@contextmanager
def owned(run: Path, writer: str) -> Iterator[manifests.Manifest]:
    """Hold the lock of a run folder with nothing open in it; ConfigError names who writes it when somebody does.

    What a crash left open is recovered first, as by any writer.
    """
    manifests.check_run(run)
    lock = FolderLock(run)
    try:
        recover(run, leftovers(run), writer)
        current = manifests.newest(run)
        assert current is not None
        yield current
    finally:
        lock.release()


def last_sequence(run: Path, writer: str) -> int:
    """Highest segment number that `writer` ever used here, so that no name is used twice."""
    current = manifests.newest(run) or manifests.EMPTY
    names = [stem for _, stem in current.stems()]
    for folder in (run, run / QUARANTINE):
        for sub in folder.iterdir() if folder.exists() else ():
            if sub.is_dir() and sub.name in TABLES:
                names += os.listdir(sub)
    pattern = re.compile(re.escape(writer) + r"-(\d+)(\..*)?")
    on_disk = max((int(found[1]) for name in names if (found := pattern.fullmatch(name))), default=0)
    return max(on_disk, current.used.get(writer, 0))


def check_sources(run: Path, current: manifests.Manifest, tables: Iterable[str]) -> None:
    """Refuse to rewrite damage, or what a newer release wrote (columns that this one does not know would be lost)."""
    for table in tables:
        for sealed in current.sealed.get(table, ()):
            path = run / table / sealed.name
            check_bytes(map_file(path), sealed, str(path), full=True)
            stamp = _stamp(path)
            if stamp.get("minor", 0) > MINOR:
                raise SchemaError(
                    f"{path}: written by format 1.{stamp['minor']}, this release writes 1.{MINOR} and would lose its "
                    "new columns; upgrade gyre-rl to change this folder"
                )


def codec_of(path: Path) -> str | None:
    """The codec that a segment's buffers are compressed with; None when they are plain."""
    found = _stamp(path).get("codec")
    return None if found is None else str(found)


def _stamp(path: Path) -> dict[str, Any]:
    try:
        return stamp_of(pa.ipc.open_file(pa.BufferReader(map_file(path))).schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: wanted an Arrow file, got {error}; run `gyre verify` before anything else") from error


# --- batches -------------------------------------------------------------------------------------------------------


def rebatched(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows of `table` in their order, in batches of some MiB whatever they were."""
    return gathered(table, np.arange(table.num_rows, dtype=np.int64))


def gathered(table: pa.Table, order: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """The rows `order` of `table`, in batches of some MiB. Only one batch is copied at a time."""
    batches = table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    weight_N = _row_bytes(batches)
    for part in _parts(weight_N[order]):
        rows = order[part]
        by = np.argsort(rows, kind="stable")
        ascending = rows[by]
        owner = np.searchsorted(starts, ascending, side="right") - 1
        pieces = [_picked(batches[int(owner[lo])], ascending[lo:hi] - starts[owner[lo]]) for lo, hi in _spans(owner)]
        joined = pa.concat_batches(pieces) if len(pieces) > 1 else pieces[0]
        if (by != np.arange(len(by))).any():
            back = np.empty_like(by)
            back[by] = np.arange(len(by))
            joined = joined.take(pa.array(back))
        yield joined


def _spans(values: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Bounds of the runs of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return itertools.pairwise(cuts)


def _picked(batch: pa.RecordBatch, rows: npt.NDArray[np.int64]) -> pa.RecordBatch:
    first, last = int(rows[0]), int(rows[-1])
    return batch.slice(first, len(rows)) if last - first + 1 == len(rows) else batch.take(pa.array(rows))


def _row_bytes(batches: Sequence[pa.RecordBatch]) -> npt.NDArray[np.int64]:
    """Rough bytes of each row: lists and binaries by their offsets, the rest flat."""
    weights: list[npt.NDArray[np.int64]] = []
    for batch in batches:
        weight = np.full(batch.num_rows, _ROW_BYTES, np.int64)
        for column in batch.columns:
            if pa.types.is_large_list(column.type):
                weight += np.diff(column.offsets.to_numpy()) * (column.type.value_type.bit_width // 8)
            elif pa.types.is_large_binary(column.type):
                weight += _widths(column, np.int64)
            elif pa.types.is_string(column.type):
                weight += _widths(column, np.int32)
        weights.append(weight)
    return np.concatenate(weights) if weights else np.zeros(0, np.int64)


def _widths(column: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
    """Bytes of each value of a string or binary column."""
    if not len(column):
        return np.zeros(0, np.int64)
    offsets = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column) + 1]
    return np.diff(offsets).astype(np.int64)


def _parts(weight_N: npt.NDArray[np.int64]) -> Iterator[slice]:
    ends_N = np.cumsum(weight_N)
    start = 0
    while start < len(ends_N):
        before = int(ends_N[start - 1]) if start else 0
        stop = int(np.searchsorted(ends_N, before + BATCH_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + _MAX_ROWS)
        yield slice(start, stop)
        start = stop


# --- files ---------------------------------------------------------------------------------------------------------


def write_segments(
    run: Path, table: str, batches: Iterable[pa.RecordBatch], names: Iterator[str], codec: str | None = None
) -> tuple[Sealed, ...]:
    """Write `batches` as sealed segments of `FILE_BYTES` under `names`; nothing for no row. No manifest names them yet.

    All batches have the columns of this release.
    """
    schema = arrow_schema(table)
    if codec is not None:
        stamp = stamp_of(schema) | {"codec": codec}
        schema = schema.with_metadata({"gyre": json.dumps(stamp, sort_keys=True)})
    folder = run / table
    if not folder.exists():
        folder.mkdir(mode=0o700)
        fsync_folder(run)
    done: list[Sealed] = []
    rest = (batch.replace_schema_metadata(schema.metadata) for batch in batches if batch.num_rows)
    for first in rest:
        source = itertools.chain([first], rest)
        path = folder / f"{next(names)}.arrow"
        done.append(write_sealed(path, schema, source, codec=codec, until_bytes=FILE_BYTES))
    return tuple(done)


def publish_tables(
    run: Path, tables: Mapping[str, tuple[Sealed, ...]], writer: str, *, removed: tuple[str, ...]
) -> manifests.Manifest:
    """One manifest that names `tables` in place of what those tables held. The caller holds the lock."""

    def change(base: manifests.Manifest) -> manifests.Manifest:
        return base.replaced(tables, removed)

    return manifests.publish(run, change, writer)


def unnamed(run: Path) -> list[Path]:
    """Files of segments that once were named and now are by no manifest in use: the newest, a tag's, a lease's.

    Also what a change of this folder wrote and never published, and halves of small files that a killed process was
    writing. Only the holder of the lock may ask.
    """
    in_use = [manifests.newest(run) or manifests.EMPTY, *pinned_manifests(run)]
    named = {pair for one in in_use for pair in one.stems()}
    used = in_use[0].used
    found: list[Path] = []
    for table in TABLES:
        folder = run / table
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            stem = path.name.lstrip(".").partition(".")[0]
            writer, _, number = stem.rpartition("-")
            once_named = number.isdigit() and (writer in REWRITERS or int(number) <= used.get(writer, 0))
            is_ours = path.suffix in (".arrow", ".crc", ".tmp")
            if is_ours and once_named and ((table, stem) not in named or path.suffix == ".tmp"):
                found.append(path)
    halves = ((run, ".run-*.tmp"), (run / manifests.FOLDER, ".*.tmp"), (run / TAGS, ".*.tmp"))
    return [*found, *(path for folder, pattern in halves for path in sorted(folder.glob(pattern)))]


def drop_unnamed(run: Path) -> int:
    """Remove the files that `unnamed` finds; returns their bytes."""
    freed = 0
    folders = set()
    for path in unnamed(run):
        freed += path.stat().st_size
        path.unlink()
        folders.add(path.parent)
    for folder in folders:
        fsync_folder(folder)
    return freed
