"""Cells by time, read from a scheduler's ledger: which cell served, trained, switched or was down, and when.

The ledger's lines are `gyre_sched`'s (docs/scheduler.md), read here as plain JSON. A cell that no line names is not
known. Lines of kinds that say nothing of roles are passed over, so that newer kinds are no error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import DataError

__all__ = ["CellsByTime", "CellsLedger", "RoleSpan"]

_GAP_S = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSpan:
    """A cell did one thing from `start_s` to `end_s`, on the ledger's clock."""

    cell: str
    what: str
    """rollout, draining, to_train, train, busy (a micro-step of `train`), to_rollout or down."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CellsByTime:
    """What a ledger tells of its cells."""

    start_s: float
    end_s: float
    cells: tuple[str, ...]
    """In the order in which they first changed."""
    spans: tuple[RoleSpan, ...]
    """Of one cell end to end, in no order; `busy` lies within `train`."""
    steps: tuple[tuple[float, int], ...]
    """When the optimiser made which version."""


class CellsLedger:
    """A ledger that is read as it grows."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._end, self._number = Path(path), 0, 0
        self._fold: _Fold | None = None

    def refresh(self) -> bool:
        """Read the lines that came; True when there were any. DataError when it is no ledger of a scheduler."""
        try:
            size = self._path.stat().st_size
            if size < self._end:  # another file in its place
                self._end, self._number, self._fold = 0, 0, None
            if size == self._end:
                return False
            with self._path.open("rb") as file:
                file.seek(self._end)
                lines = file.read().split(b"\n")[:-1]
        except OSError as error:
            raise DataError(
                f"wanted a scheduler's ledger at {self._path}, got: {error}; name its ledger.jsonl"
            ) from error
        for place, line in enumerate(lines):
            try:
                now_s, record = _entry(line)
            except (ValueError, TypeError, KeyError):
                if place == len(lines) - 1 and self._number:
                    return place > 0  # torn: its newline reached the disk before its middle did
                raise DataError(
                    f"wanted line {self._number} of {self._path} as a scheduler writes it, got {line[:60]!r}; is it "
                    "another file?"
                ) from None
            self._end += len(line) + 1
            self._number += 1
            self._fold = self._fold or _Fold(start_s=now_s, now_s=now_s)
            self._fold.now_s = max(self._fold.now_s, now_s)
            _take(self._fold, record)
        return bool(lines)

    def cells(self) -> CellsByTime | None:
        """All that was read; None before the first line."""
        fold = self._fold
        if fold is None:
            return None
        return CellsByTime(
            start_s=fold.start_s, end_s=fold.now_s, cells=tuple(fold.open), spans=tuple(fold.all_spans()),
            steps=tuple(fold.steps),
        )  # fmt: skip


@dataclass(kw_only=True, slots=True)
class _Fold:
    """What the lines said until now. A cell that nothing was told of yet serves."""

    start_s: float
    now_s: float
    open: dict[str, tuple[str, float]] = field(default_factory=dict)
    """What each cell is now, and since when."""
    busy: dict[str, float] = field(default_factory=dict)
    """Since when a cell runs a micro-step."""
    worked: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The last stretch of micro-steps of each cell, which the next one may go on from."""
    spans: list[RoleSpan] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)

    def becomes(self, cell: str, what: str) -> None:
        old, since = self.open.get(cell, ("rollout", self.start_s))
        if old == what:
            return
        if self.now_s > since:
            self.spans.append(RoleSpan(cell=cell, what=old, start_s=since, end_s=self.now_s))
        self.open[cell] = (what, self.now_s)

    def works(self, cell: str) -> None:
        """A micro-step goes to cells that train, whatever was told of it before: a lost core comes back as one."""
        _, since = self.open.get(cell, ("rollout", self.start_s))
        self.open[cell] = ("train", since)
        self.busy.setdefault(cell, self.now_s)

    def rests(self, cell: str) -> None:
        since = self.busy.pop(cell, None)
        if since is None:
            return
        before = self.worked.get(cell)
        if before is not None and since - before[1] < _GAP_S:
            since = before[0]
        elif before is not None:
            self.spans.append(RoleSpan(cell=cell, what="busy", start_s=before[0], end_s=before[1]))
        self.worked[cell] = (since, self.now_s)

    def all_spans(self) -> Iterator[RoleSpan]:
        """Those that ended, and what is under way until now."""
        yield from self.spans
        for cell, (start_s, end_s) in self.worked.items():
            yield RoleSpan(cell=cell, what="busy", start_s=start_s, end_s=end_s)
        for cell, since in self.busy.items():
            yield RoleSpan(cell=cell, what="busy", start_s=since, end_s=self.now_s)
        for cell, (what, since) in self.open.items():
            if self.now_s > since:
                yield RoleSpan(cell=cell, what=what, start_s=since, end_s=self.now_s)


def _take(fold: _Fold, record: dict[str, Any]) -> None:
    cell, kind = str(record.get("cell")), record["kind"]
    match kind:
        case "ToTrain":
            fold.becomes(cell, "draining")
        case "Drained":
            fold.becomes(cell, "to_train")
        case "ToRollout":
            fold.becomes(cell, "to_rollout")
        case "SwitchDone":
            role = fold.open.get(cell, ("to_train", 0.0))[0]
            fold.becomes(cell, "rollout" if role == "to_rollout" else "train")
        case "AssignMicrostep":
            fold.works(cell)
        case "MicrostepDone":
            fold.rests(cell)
        case "CellFailed":
            fold.rests(cell)
            fold.becomes(cell, "down")
        case "CellRecovered":
            fold.becomes(cell, "rollout")
        case "StepApplied":
            fold.steps.append((fold.now_s, int(record["version"])))


def _entry(line: bytes) -> tuple[float, dict[str, Any]]:
    _, now_s, record, *_ = json.loads(line)["entry"]
    return float(now_s), {**record, "kind": str(record["kind"])}
