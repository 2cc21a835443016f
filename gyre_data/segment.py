"""One segment: an append-only Arrow file and its commit log.

While it grows, `<stem>.open` holds the bytes of an Arrow IPC *file* without its footer, and `<stem>.commit` one
20-byte record for each durable append: end offset (u64), rows (u32), CRC-32 of the bytes since the last record (u32),
CRC-32 of the sixteen bytes before (u32), little-endian. A row exists if and only if its record and all records before
it check out; the check comes before Arrow sees a byte, because Arrow takes flipped bits and zero-filled tails for data.
Sealing adds the footer, checks the whole file, and renames it to `<stem>.arrow`. The log stays beside it as
`<stem>.crc`, so that damage to a sealed file is known commit by commit.

Guarantee: an append is all or nothing. After an OSError the segment takes no further append, and what was committed
stays readable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from .commit_log import RECORD_BYTES, encode_record
from .conform import stamp_of
from .errors import CaptureError, CorruptError
from .growing import first_schema, parse
from .schema import arrow_schema
from .small_batches import batches_of

__all__ = [
    "Sealed",
    "SegmentWriter",
    "adopt_sealed",
    "check_bytes",
    "check_file",
    "fsync_folder",
    "iter_sealed",
    "map_file",
    "open_sealed",
    "parse_pieces",
    "projected",
    "read_sealed",
    "write_sealed",
]


def _sync(fd: int) -> None:
    """Linux can leave out the inode's times; where there is no fdatasync, fsync does the same job."""
    getattr(os, "fdatasync", os.fsync)(fd)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A finished segment as a manifest names it."""

    name: str
    num_bytes: int
    num_rows: int
    crc32: int


def fsync_folder(folder: Path) -> None:
    """Make names created in or removed from `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Tap:
    """The file that Arrow's writer thinks it writes: keeps the bytes until they are taken."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data


class SegmentWriter:
    """Writes one segment. Not thread-safe; the store serialises calls.

    The commit log is locked (flock) while this object lives, so that no second writer or recovery touches the pair.
    """

    def __init__(self, folder: Path, stem: str, table: str) -> None:
        """Create both files, empty; FileExistsError if the name was ever used."""
        self.folder, self.stem, self.table = folder, stem, table
        self.num_rows = 0
        self.end = 0
        self.broken: BaseException | None = None
        self.taken_back = True  # False while the record of a failed append may still be in the log
        self._crc32 = 0
        self._log_end = 0
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        self._data = self._log = -1
        try:
            self._log = os.open(self.log_path, flags, 0o600)
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._data = os.open(self.data_path, flags, 0o600)
            fsync_folder(folder)
        except BaseException:
            self.close()
            raise
        self._tap = _Tap()
        self._writer = pa.ipc.new_file(self._tap, arrow_schema(table))

    @property
    def data_path(self) -> Path:
        """Path of the growing data file."""
        return self.folder / f"{self.stem}.open"

    @property
    def log_path(self) -> Path:
        """Path of the commit log."""
        return self.folder / f"{self.stem}.commit"

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Make `batches` durable as one commit. On OSError the segment is broken and nothing of them counts.

        If even the record cannot be removed (`taken_back` is False), `take_back` comes before they are written again.
        """
        if self.broken is not None:
            raise CaptureError(
                f"{self.data_path}: wanted to append, but it broke before ({self.broken}); start a new one"
            )
        num_rows = sum(batch.num_rows for batch in batches)
        try:
            for batch in batches:
                self._writer.write_batch(batch)
            data = self._tap.take()
            end = self.end + len(data)
            _write_all(self._data, data, self.end)
            _write_all(self._log, encode_record(end, num_rows, zlib.crc32(data)), self._log_end)
            _sync(self._data)
            _sync(self._log)
        except BaseException as error:
            self.broken, self.taken_back = error, False
            with contextlib.suppress(OSError):
                self.take_back()
            raise
        self._crc32 = zlib.crc32(data, self._crc32)
        self.end, self._log_end = end, self._log_end + RECORD_BYTES
        self.num_rows += num_rows

    def take_back(self) -> None:
        """Remove the record of an append that failed. The data stays: a live reader may have mapped it already."""
        os.ftruncate(self._log, self._log_end)
        _sync(self._log)
        self.taken_back = True

    def seal(self) -> Sealed:
        """Add the footer, check every byte and value, and rename to `.arrow`. The commit log stays until published."""
        self._writer.close()
        footer = self._tap.take()
        crc32, num_bytes = zlib.crc32(footer, self._crc32), self.end + len(footer)
        try:
            _write_all(self._data, footer, self.end)
            os.fsync(self._data)
            sealed = Sealed(name=f"{self.stem}.arrow", num_bytes=num_bytes, num_rows=self.num_rows, crc32=crc32)
            open_sealed(self.data_path, sealed, full=True)
            os.rename(self.data_path, self.folder / sealed.name)
            fsync_folder(self.folder)
        except BaseException as error:
            self.broken = error
            raise
        self.close()
        return sealed

    def close(self) -> None:
        """Let go of both files; what was committed stays as it is."""
        for fd in (self._data, self._log):
            if fd >= 0:
                os.close(fd)
        self._data = self._log = -1


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def parse_pieces(
    data: pa.Buffer, spans: Sequence[tuple[int, int]], schema: pa.Schema
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Batches in byte ranges of a segment that were checked each by itself.

    The first range of the file brings the schema; when it is not among them, `schema` is taken, and a batch that does
    not fit it raises.
    """
    if any(start == 0 for start, _ in spans):
        schema = first_schema(data)
    return schema, [batch for start, end in spans for batch in parse(data, start, end, schema)]


def map_file(path: Path) -> pa.Buffer:
    """The bytes of a file, memory-mapped. They stay readable when the file is removed, and hold no descriptor."""
    if not path.stat().st_size:
        return pa.py_buffer(b"")
    with pa.memory_map(str(path), "r") as mapped:
        return mapped.read_buffer()


def open_sealed(path: Path, sealed: Sealed, *, full: bool = False) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Schema and batches of a sealed segment, viewing the memory-mapped file; errors as `read_sealed`."""
    return read_sealed(map_file(path), sealed, str(path), full=full)


def read_sealed(
    data: pa.Buffer, sealed: Sealed, where: str, *, full: bool = False
) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Schema and batches of a sealed segment, viewing `data` (a compressed one is unpacked).

    The size is always held against the manifest, and every batch's structure is validated, so that damaged offsets
    raise CorruptError instead of reading outside the file. `full` also checks the CRC of every byte.
    """
    schema, batches = iter_sealed(data, sealed, where, full=full)
    return schema, list(batches)


def projected(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """`schema` with those of its fields that are in `columns`, in its own order."""
    return pa.schema([field for field in schema if field.name in columns], metadata=schema.metadata)


def iter_sealed(
    data: pa.Buffer,
    sealed: Sealed,
    where: str,
    *,
    full: bool = False,
    columns: Collection[str] | None = None,
    lengths_of: Collection[str] = (),
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """As `read_sealed`, a batch at a time: what was read is trusted only when the end was reached without an error.

    With `columns` the batches hold those of them that the file has, and nothing else is unpacked or checked; many
    small batches of a plain file come joined into few, and lists in `lengths_of` may then hold zeros.
    """
    check_bytes(data, sealed, where, full=full)
    try:
        reader = pa.ipc.open_file(pa.BufferReader(data))
        schema = reader.schema if columns is None else projected(reader.schema, columns)
        is_cold = bool(stamp_of(schema).get("codec"))
        if columns is not None and is_cold:
            # Arrow then unpacks no other column. Of a plain file it would copy what otherwise stays mapped.
            fields = [reader.schema.get_field_index(name) for name in schema.names]
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            reader = pa.ipc.open_file(pa.BufferReader(data), options=options)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(where, error) from error

    def batches() -> Iterator[pa.RecordBatch]:
        num_rows = 0
        read: Iterator[pa.RecordBatch]
        if columns is None or is_cold:
            read = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            read = batches_of(reader, data, sealed.num_rows, schema.names, lengths_of)
        try:
            for batch in read:
                batch.validate(full=True)
                num_rows += batch.num_rows
                yield batch
        except (pa.ArrowException, OSError, LookupError) as error:
            raise _damaged(where, error) from error
        _check_rows(num_rows, sealed, where)

    return schema, batches()


def check_bytes(data: pa.Buffer, sealed: Sealed, where: str, *, full: bool) -> None:
    """CorruptError unless `data` has the size, and with `full` the CRC-32, that the manifest says."""
    if data.size != sealed.num_bytes:
        raise CorruptError(f"{where}: wanted {sealed.num_bytes} bytes, found {data.size}; restore the file from a copy")
    if full and (crc32 := zlib.crc32(memoryview(data))) != sealed.crc32:
        raise CorruptError(
            f"{where}: wanted CRC-32 {sealed.crc32:08x}, got {crc32:08x}: bytes changed after sealing; restore the "
            "file from a copy, or see what is lost and leave it out: `gyre verify` on the run, then with --salvage"
        )


def check_file(path: Path, sealed: Sealed) -> None:
    """`check_bytes` of a whole file, which is read once: not again while its inode, size and time are the same."""
    found = path.stat()
    _check_file(path, sealed, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=4096)
def _check_file(path: Path, sealed: Sealed, _identity: tuple[int, ...]) -> None:
    check_bytes(map_file(path), sealed, str(path), full=True)


def _check_rows(num_rows: int, sealed: Sealed, where: str) -> None:
    if num_rows != sealed.num_rows:
        raise CorruptError(f"{where}: wanted {sealed.num_rows} rows, found {num_rows}; restore the file from a copy")


def _damaged(where: str, error: Exception) -> CorruptError:
    return CorruptError(
        f"{where}: damaged, its bytes are not the Arrow file that was sealed; restore the file from a copy, "
        f"`gyre verify` on the run tells what is lost (Arrow says: {error})"
    )


def adopt_sealed(path: Path) -> Sealed:
    """A finished segment that no manifest names, as a manifest would; CorruptError when it is not whole."""
    try:
        with pa.memory_map(str(path), "r") as mapped:
            data = mapped.read_buffer()
            reader = pa.ipc.open_file(mapped)
            num_rows = sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
            sealed = Sealed(name=path.name, num_bytes=data.size, num_rows=num_rows, crc32=zlib.crc32(memoryview(data)))
    except pa.ArrowException as error:
        raise CorruptError(f"{path}: wanted an Arrow file, got damage ({error}); restore it from a copy") from error
    open_sealed(path, sealed)
    return sealed


def write_sealed(
    path: Path,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    *,
    codec: str | None = None,
    until_bytes: int | None = None,
) -> Sealed:
    """Write a finished segment of `batches` beside its final name, check it, and rename it into place.

    One record of the log beside it covers one batch. `codec` ("lz4" or "zstd") compresses every buffer; with
    `until_bytes` no further batch is taken once the file is that long.
    """
    temporary, log_path = path.with_name(f".{path.name}.tmp"), path.with_suffix(".crc")
    tap, log = _Tap(), bytearray()
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    crc32 = end = num_rows = 0
    try:
        with pa.ipc.new_file(tap, schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            for batch in batches:
                writer.write_batch(batch)
                data = tap.take()
                _write_all(fd, data, end)
                crc32, end, num_rows = zlib.crc32(data, crc32), end + len(data), num_rows + batch.num_rows
                log += encode_record(end, batch.num_rows, zlib.crc32(data))
                if until_bytes is not None and end >= until_bytes:
                    break
        data = tap.take()
        _write_all(fd, data, end)
        os.fsync(fd)
    finally:
        os.close(fd)
    crc32, end = zlib.crc32(data, crc32), end + len(data)
    sealed = Sealed(name=path.name, num_bytes=end, num_rows=num_rows, crc32=crc32)
    _check_written(temporary, sealed)
    _write_whole(log_path, bytes(log))
    os.rename(temporary, path)
    fsync_folder(path.parent)
    return sealed


def _check_written(path: Path, sealed: Sealed) -> None:
    """`open_sealed` with `full`, but keeping no batch: a compressed file may unpack to many times its size."""
    data = map_file(path)
    check_bytes(data, sealed, str(path), full=True)
    reader, num_rows = pa.ipc.open_file(pa.BufferReader(data)), 0
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate(full=True)
        num_rows += batch.num_rows
    _check_rows(num_rows, sealed, str(path))


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        _write_all(fd, data, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, path)
