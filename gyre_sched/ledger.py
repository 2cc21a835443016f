"""The scheduler's memory on disk: one JSON line a record, checksummed in a chain; a crash leaves a readable prefix.

Each line holds its number, the time, the record, and a CRC-32 that goes on from that of the line before, so a line that
is missing, doubled or changed shows. A torn last line was never acknowledged and is cut off when the file is opened.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from .actions import Action, Event, from_json, to_json
from .errors import LedgerError
from .state import State

__all__ = ["Ledger", "read", "replay"]

Entry = tuple[float, Action | Event]


class Ledger:
    """An open ledger; `append` returns when the line is on the disk. One writer at a time is the caller's part."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard = 0
        """The highest number of a source's event that is in it; a controller that comes back hears on from there."""
        self._number, self._crc, good = 0, 0, 0
        if path.exists():
            for number, crc, end, _, heard in _lines(path):
                self._number, self._crc, good = number + 1, crc, end
                self.heard = max(self.heard, heard or 0)
        self._file = path.open("ab")
        self._file.truncate(good)

    def append(self, now_s: float, record: Action | Event, *, heard: int | None = None) -> None:
        """Add one record, with the number that its source gave it."""
        line, self._crc = _line(self._number, now_s, record, self._crc, heard)
        self._number += 1
        self.heard = max(self.heard, heard or 0)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> list[Entry]:
    """Every record that was acknowledged, oldest first; LedgerError for damage before the last line."""
    return [entry for _, _, _, entry, _ in _lines(path)]


def replay(path: Path, state: State, also: Callable[[float, Action | Event], None] | None = None) -> float:
    """Bring a fresh state to where the ledger ends; returns the time of the last record, 0 for none or no file.

    `also` is told each record after the state has taken it.
    """
    now_s = 0.0
    for number, (now_s, record) in enumerate(read(path) if path.exists() else []):
        if state.apply(record, now_s) is not None:
            raise LedgerError(
                f"wanted line {number} of {path} to follow from those before, got {record}, which does not; "
                "was it written for other cells or settings?"
            )
        if also is not None:
            also(now_s, record)
    return now_s


def _line(number: int, now_s: float, record: Action | Event, crc: int, heard: int | None) -> tuple[bytes, int]:
    told = [number, now_s, to_json(record), *([] if heard is None else [heard])]
    body = json.dumps(told, separators=(",", ":"))
    crc = zlib.crc32(body.encode(), crc)
    return f'{{"crc":{crc},"entry":{body}}}\n'.encode(), crc


def _lines(path: Path) -> Iterator[tuple[int, int, int, Entry, int | None]]:
    """Number, checksum, end and entry of every whole line, and the number that the entry's source gave it."""
    data = path.read_bytes()
    crc, end = 0, 0
    pieces = data.split(b"\n")
    for number, piece in enumerate(pieces[:-1]):
        try:
            told = json.loads(piece)["entry"]
            heard = told[3] if len(told) > 3 else None
            line, crc = _line(told[0], told[1], from_json(told[2]), crc, heard)
        except (ValueError, TypeError, KeyError, IndexError):
            line = b""
        if line != piece + b"\n" or told[0] != number:
            if number == len(pieces) - 2 and not pieces[-1]:
                return  # torn: its newline reached the disk before its middle did
            raise LedgerError(f"wanted line {number} of {path} as it was written, got other bytes; restore a copy")
        end += len(line)
        yield number, crc, end, (told[1], from_json(told[2])), heard
