"""The commit log of a segment: one 20-byte record for each durable append.

End offset of the data (u64), rows (u32), CRC-32 of the data bytes since the last record (u32), CRC-32 of the sixteen
bytes before (u32), little-endian.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

__all__ = ["RECORD_BYTES", "Record", "encode_record", "later_records", "read_log", "read_record"]

RECORD = struct.Struct("<QIII")
RECORD_BYTES = RECORD.size


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One commit record, its own CRC already checked."""

    end: int
    num_rows: int
    crc32: int


def encode_record(end: int, num_rows: int, crc32: int) -> bytes:
    """The 20 bytes of one commit record."""
    head = RECORD.pack(end, num_rows, crc32, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def read_record(piece: bytes) -> Record | None:
    """One commit record; None when it is cut off or fails its own check."""
    if len(piece) < RECORD_BYTES or zlib.crc32(piece[:-4]) != RECORD.unpack(piece)[3]:
        return None
    end, num_rows, crc32, _ = RECORD.unpack(piece)
    return Record(end=end, num_rows=num_rows, crc32=crc32)


def read_log(log: bytes) -> tuple[list[Record], str | None]:
    """Records of a commit log up to the first that is torn or damaged, and why it stopped there (None at the end)."""
    records: list[Record] = []
    last = 0
    for at in range(0, len(log), RECORD_BYTES):
        piece = log[at : at + RECORD_BYTES]
        if len(piece) < RECORD_BYTES:
            return records, f"commit record {len(records)} is cut off after {len(piece)} bytes"
        record = read_record(piece)
        if record is None or record.end <= last:
            return records, f"commit record {len(records)} fails its own check"
        records.append(record)
        last = record.end
    return records, None


def later_records(log: bytes) -> int:
    """How many records behind the first one in `log` pass their own check: commits made after a damaged one."""
    pieces = (log[at : at + RECORD_BYTES] for at in range(RECORD_BYTES, len(log), RECORD_BYTES))
    return sum(read_record(piece) is not None for piece in pieces)
