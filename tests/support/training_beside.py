"""A trainer's folder beside a run, as `gyre train` leaves it, with figures made up; and a scheduler's ledger.

tests/contract/test_training_folder.py holds what the real trainer writes against what is read of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import gyre_data
from gyre_data.types import LedgerRow, Step
from gyre_sched.actions import (
    Action,
    AssignMicrostep,
    Drained,
    Event,
    MicrostepDone,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
)
from gyre_sched.ledger import Ledger

__all__ = ["CELLS", "TrainedFolder", "write_cells"]

CELLS = 4
_START = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


class TrainedFolder:
    """Open for writing while it exists, as a trainer has it; steps are added one by one."""

    def __init__(self, path: Path, runs: Sequence[Path]) -> None:
        self.path, self.runs, self.steps = path, [str(run.resolve()) for run in runs], 0
        self.writer = gyre_data.RunWriter(path)
        self.writer.update_info({"policy_id": "run", "base": "b4e1:0", "data_runs": self.runs})
        (path / "metrics.jsonl").touch()

    def step(self, consumed: Sequence[tuple[str, str]], run: int = 0) -> None:
        """One more step on these executions, each with the node where its trajectory ends."""
        self.steps += 1
        n, at = self.steps, _START + timedelta(seconds=40 * self.steps)
        row = figures(n)
        rows: list[Any] = [
            LedgerRow(
                step=n, policy_id="run", data_run=self.runs[run], manifest=1, execution_id=name, group_id="mend",
                trajectory=0, leaf_node=leaf, owned_tokens=120 + 10 * i, reward=float(i % 2),
                advantage=2.0 * (i % 2) - 1, score_ids=(), at=at,
            )
            for i, (name, leaf) in enumerate(consumed)
        ]  # fmt: skip
        made = Step(
            step=n, policy_id="run", n=n, parent_policy_id="run", parent_n=n - 1, num_executions=len(consumed),
            trained_tokens=row["trained_tokens"], loss=row["loss"], metrics=json.dumps(row), at=at,
        )  # fmt: skip
        self.writer.append([*rows, made])
        self.writer.commit()
        self._append("metrics.jsonl", row)
        if n % 5 == 0:
            tasks = {f"held-{i}": round(0.2 + 0.02 * n * (i + 1) / 2, 3) for i in range(3)}
            score = sum(tasks.values()) / len(tasks)
            told = {"step": n, "version": f"run:{n}", "at": at.timestamp(), "score": score, "scored": 3, "unscored": 1}
            self._append("evals.jsonl", {**told, "by_task": tasks})

    def says(self, doing: str, *, waiting: bool = True, since: float = 0.0, total: int = 40) -> None:
        """The trainer's word of what it does."""
        told = {"doing": doing, "waiting": waiting, "since": since, "total": total}
        (self.path / "doing.json").write_text(json.dumps(told))

    def close(self) -> None:
        """Let go of the folder."""
        self.writer.close()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self.path / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def figures(n: int) -> dict[str, Any]:
    """A row of metrics.jsonl."""
    wave = math.sin(n * 1.7)
    return {
        "step": n, "version": f"run:{n}", "executions": 2, "trained_tokens": 5200 + 90 * n, "sharing": 1.8,
        "reward_mean": min(1.0, 0.15 + 0.025 * n + 0.06 * wave), "loss": 0.4 / (1 + n / 8) + 0.02 * wave,
        "grad_norm": 0.8 + 0.1 * wave, "mismatch_mean": 0.006 + 0.001 * wave, "mismatch_max": 0.11 + 0.02 * wave,
        "age_mean": 1.2 + 0.4 * wave, "age_max": 2.0 + (n % 4 == 0), "lr": 1e-6, "seconds": 21.0 + 3 * wave,
        "trained_tokens_per_s": 240 + 30 * wave, "rollout_seconds": 9.0 + 6 * (n % 3), "plan_seconds": 0.4,
        "save_seconds": 1.1, "publish_seconds": 2.6,
    }  # fmt: skip


def write_cells(path: Path, steps: int = 6) -> None:
    """A ledger in which cells leave for training one after another, work, and come back; the last step is under way."""
    at = 1_796_000_000.0
    with Ledger(path) as ledger:

        def tell(record: Action | Event, seconds: float) -> None:
            nonlocal at
            at += seconds
            ledger.append(at, record)

        for step in range(steps):
            for i in range(CELLS - 1):
                cell, epoch = f"cell-{i}", 2 * step + 1
                tell(ToTrain(cell=cell, epoch=epoch), 60)
                tell(Drained(cell=cell, epoch=epoch), 30)
                tell(SwitchDone(cell=cell, epoch=epoch, version=step), 15)
                for part in range(3):
                    key = (step, f"q{i}", part)
                    tell(AssignMicrostep(cell=cell, epoch=epoch, key=key), 5)  # type: ignore[arg-type]
                    tell(MicrostepDone(cell=cell, epoch=epoch, key=key), 40)  # type: ignore[arg-type]
            if step == steps - 1:
                return
            tell(StepApplied(version=step + 1, generation=0), 25)
            for i in range(CELLS - 1):
                tell(ToRollout(cell=f"cell-{i}", epoch=2 * step + 2), 5)
                tell(SwitchDone(cell=f"cell-{i}", epoch=2 * step + 2, version=step + 1), 20)
