"""A segment that is still written, read again and again as it grows.

Whoever follows a run takes a snapshot every half second for days, so nothing is kept of a commit but where it ends: the
file is mapped once, and its batches are parsed when somebody asks for them. A mapping and some forty Arrow arrays for
each commit, which a reader needs no more once it has taken the rows, were 50 kB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from .commit_log import RECORD_BYTES, read_log
from .errors import CorruptError

__all__ = ["OpenSegment", "first_schema", "parse", "read_open"]

_HEAD_BYTES = 8  # "ARROW1" and two zero bytes; what follows reads as an Arrow stream
_LEAST_BYTES = 1 << 20


class _Mapped:
    """The bytes of one growing file. The mapping has room for more than there is, so it is seldom made anew.

    What lies beyond the file's end becomes readable as the file grows (Linux); nobody looks there before.
    """

    def __init__(self) -> None:
        self._file: tuple[int, int] | None = None
        self._room = pa.py_buffer(b"")

    def upto(self, fd: int, num_bytes: int) -> pa.Buffer:
        """The first `num_bytes` of the file, which has as many; views of earlier ones stay valid."""
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._file or num_bytes > self._room.size:
            self._file = (found.st_dev, found.st_ino)
            self._room = _mapping(fd, num_bytes)
        return self._room.slice(0, num_bytes)


def _mapping(fd: int, num_bytes: int) -> pa.Buffer:
    """A read-only mapping of a file of at least `num_bytes`, with room for as many again where the system has that."""
    if not num_bytes:
        return pa.py_buffer(b"")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size = max(_LEAST_BYTES, 2 * num_bytes)
        address = libc.mmap(
            None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0)
        )  # Python's own refuses what is longer than the file
        if address != ctypes.c_void_p(-1).value:
            return pa.foreign_buffer(address, size, _Pages(libc, address, size))
    return pa.py_buffer(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_READ))


class _Pages:
    """Ends a mapping when no buffer views it any more."""

    def __init__(self, libc: ctypes.CDLL, address: int, size: int) -> None:
        end = weakref.finalize(self, libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
        end.atexit = False  # buffers may outlive it there


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSegment:
    """The verified prefix of a growing segment, a view of the file's own bytes, and what lies beyond it."""

    schema: pa.Schema | None  # None while nothing is committed
    num_rows: int
    end: int  # bytes of data verified
    log_end: int  # bytes of log verified
    data_tail: int  # bytes of data after the verified prefix
    log_tail: int  # bytes of log after it
    damage: str | None  # why the prefix ends before the log does; None when every record checks out
    data: pa.Buffer = field(repr=False)
    where: str
    mapped: _Mapped = field(repr=False)
    """The same object as long as the segment only grew."""

    def batches(self, after: OpenSegment | None = None) -> Iterator[pa.RecordBatch]:
        """The batches, parsed and validated; those that came since `after`, an earlier reading of the same segment.

        CorruptError when there are not as many rows as the commit log counts.
        """
        if self.schema is None:
            return
        start, num_rows = (after.end, after.num_rows) if after else (0, 0)
        for batch in parse(self.data, start, self.end, self.schema):
            num_rows += batch.num_rows
            yield batch
        if num_rows != self.num_rows:
            raise CorruptError(
                f"{self.where}: its commit log counts {self.num_rows} rows, its batches {num_rows}; run `gyre verify`"
            )


def first_schema(data: pa.Buffer) -> pa.Schema:
    """The schema message that a segment begins with."""
    return pa.ipc.read_schema(pa.BufferReader(data.slice(_HEAD_BYTES)))


def parse(data: pa.Buffer, start: int, end: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Batches in the verified bytes [start, end), which begin with the schema message when `start` is 0."""
    reader = pa.BufferReader(data.slice(0, end))
    reader.seek(start or _HEAD_BYTES)
    if not start:
        pa.ipc.read_message(reader)
    while reader.tell() < end:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
        batch.validate(full=True)
        yield batch


def read_open(data_path: Path, log: bytes, known: OpenSegment | None = None) -> OpenSegment:
    """Verify a growing segment up to its last good commit record in `log`.

    `known` is an earlier result for the same file: only what came after it is checked. If the files no longer hold that
    much (a commit that failed was taken back), everything is checked again.
    """
    records, damage = read_log(log)
    with data_path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if known and not _goes_on(known, [record.end for record in records], size):
            known = None
        skip = known.log_end // RECORD_BYTES if known else 0
        mapped = known.mapped if known else _Mapped()
        data = mapped.upto(file.fileno(), min(size, records[-1].end) if records else 0)
    end, good = known.end if known else 0, skip
    view = memoryview(data)
    for record in records[skip:]:
        if record.end > size or zlib.crc32(view[end : record.end]) != record.crc32:
            damage = f"the bytes of commit {good} ({end}..{record.end}) are not the ones committed"
            break
        end, good = record.end, good + 1
    schema = known.schema if known else None
    if schema is None and end:
        schema = first_schema(data)
    return OpenSegment(
        schema=schema,
        num_rows=(known.num_rows if known else 0) + sum(record.num_rows for record in records[skip:good]),
        end=end,
        log_end=good * RECORD_BYTES,
        data_tail=size - end,
        log_tail=len(log) - good * RECORD_BYTES,
        damage=damage,
        data=data,
        where=str(data_path),
        mapped=mapped,
    )


def _goes_on(known: OpenSegment, ends: list[int], size: int) -> bool:
    """Whether the files still hold what was known of them."""
    count = known.log_end // RECORD_BYTES
    return size >= known.end and (not count or (len(ends) >= count and ends[count - 1] == known.end))
