"""A trainer's folder as an onlooker reads it: figures of each step, evaluations, what the trainer does now.

The files are plain lines of JSON that `gyre_train` writes and docs/format.md describes; nothing of it is imported here.
Whatever a crash cut off or another release spells otherwise is left out, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import manifest as manifests
from .errors import ConfigError
from .json_values import object_of
from .ledger import ledger
from .lock import LOCK, is_locked
from .reader import Run
from .types import LedgerRow

__all__ = ["DOING", "EVALS", "METRICS", "Doing", "TrainingFolder", "find_training", "is_training"]

METRICS, EVALS, DOING = "metrics.jsonl", "evals.jsonl", "doing.json"
_MOST_BESIDE = 200
"""Folders looked at for the training of a run; more beside it, and one has to be named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What the trainer said last that it does, in its own words."""

    text: str
    waiting: bool
    since: float
    """Seconds since 1970 when it began."""
    total: int | None
    """Steps there will be; None where nobody can know."""


class TrainingFolder:
    """One trainer's folder, finished or at work; `refresh` takes what came since."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_training(self.path):
            raise ConfigError(
                f"wanted the output.dir of a training run, {path} holds no {METRICS}; name the folder that "
                "`gyre train` writes"
            )
        self._seen: dict[str, tuple[int, int] | None] = {}
        self._files: dict[str, Callable[[Path], None]] = {
            DOING: self._read_doing, EVALS: self._read_evals, METRICS: self._read_steps, "run.json": self._read_info,
        }  # fmt: skip
        self._moved = False
        self._run: Run | None = None
        self._by_step: dict[int, list[LedgerRow]] = {}
        self.consumed_in: dict[tuple[str, str], int] = {}
        """Step that consumed an execution, by the data run's path and the execution's id; the newest of several."""
        self.info: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []
        """Rows of metrics.jsonl in the order of steps; a step that was taken again has its newest row."""
        self.evals: list[dict[str, Any]] = []
        """Rows of evals.jsonl: passes over held-out tasks."""
        self.doing: Doing | None = None
        self.running = False
        """Whether a trainer holds the folder now."""
        self.refresh()

    def refresh(self) -> bool:
        """Read what changed; True when anything did."""
        running = is_locked(self.path / LOCK)
        self._moved |= running != self.running
        self.running = running
        # What the trainer writes last is read first: then no step is told of whose figures or ledger are not there.
        for name, read in self._files.items():
            stamp = _stamp(self.path / name)
            if stamp != self._seen.get(name):
                self._seen[name], self._moved = stamp, True
                read(self.path / name)
        self._moved |= self._read_ledger()
        moved, self._moved = self._moved, False
        return moved

    def _read_ledger(self) -> bool:
        if self._run is None and not manifests.numbers(self.path):
            return False
        if self._run is None:
            self._run = Run(self.path)
        elif not self._run.refresh():
            return False
        by_step: dict[int, list[LedgerRow]] = {}
        for row in ledger(self._run):
            by_step.setdefault(row.step, []).append(row)
        self._by_step = by_step
        self.consumed_in = {(row.data_run, row.execution_id): step for step in sorted(by_step) for row in by_step[step]}
        return True

    def _read_steps(self, path: Path) -> None:
        self.steps = _by_step(_rows(path))

    def _read_evals(self, path: Path) -> None:
        self.evals = _by_step(_rows(path))

    def _read_doing(self, path: Path) -> None:
        self.doing = _doing(path)

    def _read_info(self, path: Path) -> None:
        self.info = object_of(_text(path))

    def consumed(self, step: int) -> list[LedgerRow]:
        """Ledger rows of a step: one for each trajectory that it trained."""
        return self._by_step.get(step, [])

    @property
    def data_runs(self) -> tuple[str, ...]:
        """Run folders that are trained on: those the trainer names, and those that its ledger holds."""
        named = [name for name in self.info.get("data_runs") or () if isinstance(name, str)]
        return tuple(dict.fromkeys([*named, *(row.data_run for rows in self._by_step.values() for row in rows)]))


def is_training(path: Path) -> bool:
    """Whether a trainer has written in this folder."""
    return (path / METRICS).is_file()


def find_training(run: Path) -> Path | None:
    """The newest training folder beside or in a run's folder that trains on it; None when there is none, or too many.

    Beside: in the same folder, or up to two levels below the run itself, as `gyre demo` leaves one.
    """
    if not run.is_dir():
        return None
    wanted = str(run.resolve())
    found = []
    for path in _candidates(run):
        if is_training(path):
            info = object_of(_text(path / "run.json"))
            named = info.get("data_runs") or ()
            if wanted in named or (not named and wanted in TrainingFolder(path).data_runs):
                found.append(((path / METRICS).stat().st_mtime, path))
    return max(found)[1] if found else None


def _candidates(run: Path) -> Iterable[Path]:
    beside = [path.parent for path in run.resolve().parent.glob(f"*/{METRICS}")]
    if len(beside) <= _MOST_BESIDE:
        yield from beside
    yield from (path.parent for path in [*run.glob(f"*/{METRICS}"), *run.glob(f"*/*/{METRICS}")])


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        told = path.stat()
    except OSError:
        return None
    return told.st_mtime_ns, told.st_size


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines that are objects with a step; a line that is cut or is no JSON is left out."""
    lines: Sequence[str] = (_text(path) or "").split("\n")[:-1]
    found = [object_of(line) for line in lines]
    return [row for row in found if isinstance(row.get("step"), int)]


def _by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    newest = {row["step"]: row for row in rows}
    return [newest[step] for step in sorted(newest)]


def _doing(path: Path) -> Doing | None:
    said = object_of(_text(path))
    text, since, total = said.get("doing"), said.get("since"), said.get("total")
    if not isinstance(text, str) or not isinstance(since, int | float) or not math.isfinite(since):
        return None
    return Doing(
        text=text, waiting=said.get("waiting") is True, since=float(since),
        total=total if isinstance(total, int) and total > 0 else None,
    )  # fmt: skip
