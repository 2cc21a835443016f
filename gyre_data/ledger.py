"""What training consumed, in the trainer's folder: a `ledger` row per trained trajectory, a `steps` row per step.

`gyre_train` writes both in one commit, ledger first: a step that is not in `steps` did not happen, whatever the ledger
says. Going back to a checkpoint rewrites history: a step recorded later voids what was recorded before with the same
or a higher number. So `consumed` after a resume is what the current weights have seen, no more and no less.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from . import manifest as manifests
from .arrays import from_table
from .reader import Run
from .tree import Tables
from .types import LedgerRow, Step

__all__ = ["consumed", "ledger", "newest_time", "steps"]


def steps(folder: str | Path | Tables) -> list[Step]:
    """The steps that the current weights went through, in order; empty when the folder holds none yet."""
    return [step for step, _ in _history(folder)]


def ledger(folder: str | Path | Tables) -> list[LedgerRow]:
    """The ledger rows of those steps."""
    return [row for _, rows in _history(folder) for row in rows]


def consumed(folder: str | Path | Tables, *, last_step: int | None = None) -> set[str]:
    """Ids of the executions that were trained on; up to and including `last_step`, to resume from its checkpoint."""
    return {
        row.execution_id
        for step, rows in _history(folder)
        if last_step is None or step.step <= last_step
        for row in rows
    }


def newest_time(folder: str | Path | Tables) -> datetime:
    """The latest time of any step recorded, also of one that was voided; a new step must be later than it."""
    run = _tables(folder)
    times = [] if run is None else run.table("steps").column("at").to_pylist()
    return max(times, default=datetime.min.replace(tzinfo=UTC))


def _tables(folder: str | Path | Tables) -> Tables | None:
    if not isinstance(folder, str | Path):
        return folder
    return Run(Path(folder)) if manifests.numbers(Path(folder)) else None


def _history(folder: str | Path | Tables) -> list[tuple[Step, list[LedgerRow]]]:
    run = _tables(folder)
    if run is None:
        return []
    written: list[Step] = from_table("steps", run.table("steps"))
    rows: list[LedgerRow] = from_table("ledger", run.table("ledger"))
    kept: dict[int, Step] = {}
    for step in sorted(written, key=lambda step: step.at):
        kept = {number: old for number, old in kept.items() if number < step.step} | {step.step: step}
    of: dict[tuple[int, object], list[LedgerRow]] = {}
    for row in rows:
        of.setdefault((row.step, row.at), []).append(row)
    return [(step, of.get((step.step, step.at), [])) for _, step in sorted(kept.items())]
