"""What a pass over held-out tasks gave: `evals.jsonl` in the trainer's folder, one line for each pass."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from gyre_data.execution import executions
from gyre_data.scores import evaluator_weights, reward, scores_by_execution
from gyre_train.metrics import read_metrics

if TYPE_CHECKING:
    from gyre_data.store import Run

__all__ = ["EvalLog", "sampled_by", "score_groups"]


def score_groups(run: Run, groups: Mapping[str, str], evaluators: Mapping[str, float] | None) -> dict[str, Any]:
    """Mean score over tasks, each the mean of its executions; those without a score are counted, never taken as zero.

    `groups` are tasks by the name of their group. The mean is None when nothing was scored.
    """
    infos = [info for info in executions(run).values() if info.group_id in groups]
    scores = scores_by_execution(run)
    rows = [row for info in infos for row in scores.get(info.execution_id, ())]
    weights = evaluator_weights(rows, evaluators)
    values: dict[str, list[float]] = {}
    for info in infos:
        found = reward(scores.get(info.execution_id, ()), weights)
        if found.value is not None:
            values.setdefault(groups[str(info.group_id)], []).append(found.value)
    by_task = {task: sum(found) / len(found) for task, found in sorted(values.items())}
    scored = sum(map(len, values.values()))
    mean = sum(by_task.values()) / len(by_task) if by_task else None
    return {"score": mean, "scored": scored, "unscored": len(infos) - scored, "by_task": by_task}


def sampled_by(run: Run, groups: Collection[str]) -> dict[str, int]:
    """Tokens that the executions of these groups were given, by the version of the weights that sampled them."""
    names = [info.execution_id for info in executions(run).values() if info.group_id in groups]
    nodes = run.table("nodes").select(["execution_id", "policy_versions"])
    theirs = nodes.filter(pc.is_in(nodes["execution_id"], pa.array(names, pa.string())))
    found: Counter[str] = Counter()
    for span in pc.list_flatten(theirs["policy_versions"]).to_pylist():
        found[f"{span['policy_id']}:{span['n']}"] += span["end"] - span["start"]
    return dict(found)


class EvalLog:
    """Passes by their step. A pass that was begun when the trainer was killed is not there, and is looked at again."""

    def __init__(self, folder: Path, step: int) -> None:
        """`step` is where training resumes: passes after it were of weights that are gone."""
        self._path = folder / "evals.jsonl"
        self.rows = [row for row in read_metrics(self._path) if row["step"] <= step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        partial.replace(self._path)

    def __contains__(self, step: int) -> bool:
        return any(row["step"] == step for row in self.rows)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one pass, durably: it is what says that it need not be made again."""
        self.rows.append(dict(row))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dict(row)) + "\n")
            file.flush()
            os.fsync(file.fileno())
