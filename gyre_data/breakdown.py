"""`gyre stats --by`: the same counts cut by agent role, or verdicts cut by evaluator and group."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from .eligible import eligibility
from .execution import executions
from .ownership import keep
from .schema import AgentRole, Author
from .scores import latest_scored, scores_by_execution
from .tree import Forest, Tables

__all__ = ["EvaluatorGroup", "RoleCounts", "by_evaluator", "by_role"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleCounts:
    """Calls and tokens of one agent role."""

    role: str
    calls: int
    distinct_tokens: int
    sampled_tokens: int
    trainable_tokens: int
    kept_tokens: int
    not_trained: dict[str, int]
    """Calls by the reason why their output is not trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorGroup:
    """Latest scored verdicts of one evaluator in one group; `std` is the population's, 0 means no signal."""

    evaluator: str
    run: str
    group_id: str | None
    task_id: str | None
    executions: int
    scored: int
    failed: int
    """Executions on which it was tried and never scored."""
    mean: float | None
    std: float | None
    minimum: float | None
    maximum: float | None


def by_role(runs: Tables | Sequence[Tables], *, j_max: int | None = 5) -> list[RoleCounts]:
    """Counts per role, in the order of roles; a role without calls is left out."""
    calls, distinct, sampled, trainable, kept = (Counter[str]() for _ in range(5))
    reasons: dict[str, Counter[str]] = {}
    for run in _every(runs):
        forest = Forest(run)
        for execution_id in forest.execution_ids:
            tree = forest.tree(execution_id)
            judged = eligibility(tree)
            trajectories, _ = keep(tree, judged, j_max=j_max)
            owned = {i for t in trajectories for i in t.owned}
            role = {call.call_id: str(call.agent_role) for call in tree.calls}
            calls.update(role.values())
            for call_id, (reason, _) in judged.reasons.items():
                reasons.setdefault(role[call_id], Counter())[str(reason)] += 1
            for i, num_tokens in enumerate(tree.num_tokens_N.tolist()):
                name = role.get(str(tree.call_of_N[i]), str(AgentRole.UNKNOWN))
                distinct[name] += num_tokens
                sampled[name] += num_tokens if tree.author_N[i] in (Author.POLICY, Author.PROVIDER) else 0
                trainable[name] += num_tokens if judged.trainable_N[i] else 0
                kept[name] += num_tokens if i in owned else 0
    return [
        RoleCounts(
            role=name,
            calls=calls[name],
            distinct_tokens=distinct[name],
            sampled_tokens=sampled[name],
            trainable_tokens=trainable[name],
            kept_tokens=kept[name],
            not_trained=dict(sorted(reasons.get(name, Counter()).items())),
        )
        for name in map(str, AgentRole)
        if calls[name]
    ]


def by_evaluator(runs: Tables | Sequence[Tables]) -> list[EvaluatorGroup]:
    """Verdicts per evaluator and group, so that a group without signal or with failures stands out."""
    found: list[EvaluatorGroup] = []
    for run in _every(runs):
        scores = scores_by_execution(run)
        groups: dict[str | None, list[str]] = {}
        tasks: dict[str | None, str | None] = {}
        for info in executions(run).values():
            groups.setdefault(info.group_id, []).append(info.execution_id)
            tasks.setdefault(info.group_id, info.task_id if info.group_id is not None else None)
        for evaluator in sorted({row.evaluator for rows in scores.values() for row in rows}):
            for group_id, members in sorted(groups.items(), key=lambda item: item[0] or ""):
                tried = [
                    rows for name in members if (rows := [s for s in scores.get(name, ()) if s.evaluator == evaluator])
                ]
                latest = [row for rows in tried if (row := latest_scored(rows, evaluator)) is not None]
                values = [row.value for row in latest if row.value is not None and math.isfinite(row.value)]
                found.append(
                    EvaluatorGroup(
                        evaluator=evaluator,
                        run=str(getattr(run, "path", "")),
                        group_id=group_id,
                        task_id=tasks[group_id],
                        executions=len(members),
                        scored=len(values),
                        failed=len(tried) - len(values),
                        mean=math.fsum(values) / len(values) if values else None,
                        std=_std(values),
                        minimum=min(values, default=None),
                        maximum=max(values, default=None),
                    )
                )
    return found


def _std(values: list[float]) -> float | None:
    if not values:
        return None
    return 0.0 if min(values) == max(values) else float(np.std(values))


def _every(runs: Tables | Sequence[Tables]) -> list[Tables]:
    return [cast(Tables, runs)] if hasattr(runs, "table") else list(runs)
