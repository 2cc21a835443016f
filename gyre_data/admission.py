"""Admission: which tokens of which executions are trained, with which advantage, and why the rest are not.

A pure function of the recorded rows: the same runs and settings give the same admission, whatever the order of rows,
save that of verdicts, of which the last counts.
Every execution, call and trajectory that is left out has a reason. Guarantees, each tested as a property: under
`count="once"` a sampled token is owned by exactly one kept trajectory; `num_owned` is the sum over trajectories;
statistics of a group are over its executions, never over trajectories; equal rewards give an advantage of exactly 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from .eligible import ROLE_ORDER, Eligibility, eligibility
from .errors import ConfigError, DataError
from .execution import ExecutionInfo, executions
from .frame import Records
from .ownership import AdmittedTrajectory, Count, Exclusion, keep
from .reasons import REASONS, Reason
from .schema import AgentRole, EndReason
from .scores import Reward, evaluator_weights, reward, scores_by_execution
from .tree import Forest, Tables, Tree
from .types import Score

__all__ = [
    "LEVELS",
    "Admission",
    "AdmittedExecution",
    "AdmittedTrajectory",
    "Count",
    "Exclusion",
    "Group",
    "Reason",
    "admit",
    "keep",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedExecution:
    """An execution that is trained: its reward, advantage and kept trajectories, best first."""

    run: Tables
    execution_id: str
    group_id: str | None
    task_id: str | None
    reward: float | None
    advantage: float | None
    score_ids: tuple[str, ...]
    partial: bool
    tree: Tree
    trajectories: tuple[AdmittedTrajectory, ...]
    num_owned: int
    """N_e: owned tokens, summed over the trajectories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Statistics over the valid executions of a group; `reason` is set when the group was dropped."""

    run: Tables
    group_id: str
    task_id: str | None
    num_executions: int
    """Executions of the group that the run holds."""
    num_valid: int
    """Of these, with a valid score and trainable tokens."""
    mean: float | None
    std: float | None
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What is trained and what is not; each of the three is a table too (`.pl()`, `.df()`, `.arrow()`)."""

    executions: Records[AdmittedExecution]
    excluded: Records[Exclusion]
    groups: Records[Group]
    count: Count

    @property
    def num_owned(self) -> int:
        """Trained tokens of all executions."""
        return sum(e.num_owned for e in self.executions)

    def counts(self) -> dict[str, dict[str, int]]:
        """What was admitted, and how many executions, calls and trajectories were left out by reason."""
        found: dict[str, Counter[str]] = {name: Counter() for name in LEVELS.values()}
        for exclusion in self.excluded:
            found[LEVELS[REASONS[exclusion.reason].level]][exclusion.reason.value] += 1
        admitted = {
            "executions": len(self.executions),
            "trajectories": sum(len(e.trajectories) for e in self.executions),
            "tokens": self.num_owned,
            "groups": sum(group.reason is None for group in self.groups),
        }
        return {"admitted": admitted, **{name: dict(sorted(c.items())) for name, c in found.items()}}


LEVELS = {"execution": "executions", "call": "calls", "trajectory": "trajectories"}
"""Under which name what is left out is counted, by the level of its reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """Settings of one admission, checked."""

    j_max: int | None
    role_order: tuple[AgentRole, ...]
    count: Count
    need_score: bool
    need_logprobs: bool
    need_ids: bool
    include_running: bool
    allow: frozenset[Reason]
    only: frozenset[str] | None
    weights: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """An execution on its way through admission, with what it was judged by; `number` is the place of its run."""

    info: ExecutionInfo
    run: Tables
    number: int
    tree: Tree
    reward: Reward
    trajectories: tuple[AdmittedTrajectory, ...]


def admit(
    runs: Tables | Sequence[Tables],
    *,
    j_max: int | None = 5,
    role_order: Sequence[AgentRole | str] = ROLE_ORDER,
    count: Count = "once",
    evaluators: Mapping[str, float] | None = None,
    scale: Literal["std", "none"] = "std",
    need_score: bool = True,
    need_logprobs: bool | None = None,
    need_ids: bool = True,
    include_running: bool = False,
    drop_zero_variance: bool = False,
    allow: Iterable[Reason | str] = (),
    only: Iterable[str] | None = None,
) -> Admission:
    """Admit the executions of one or more runs.

    `need_score=False` is SFT: no score, group or (unless `need_logprobs=True`) behaviour log-prob is asked for, and
    advantages are None. `need_ids=False` takes replies of which only the text is known, too: what may be exported as
    text for SFT. `include_running` takes executions that have not ended. `allow` takes in calls sampled with
    settings that are otherwise refused (greedy, top_p, top_k, constrained). `only` looks at these executions alone.
    """
    every: list[Tables] = [cast(Tables, runs)] if hasattr(runs, "table") else list(runs)
    scores = [scores_by_execution(run) for run in every]
    rows = (row for found in scores for rows in found.values() for row in rows)
    settings = _Settings(
        **_checked(j_max, role_order, count, scale),
        need_score=need_score,
        need_logprobs=need_score if need_logprobs is None else need_logprobs,
        need_ids=need_ids,
        include_running=include_running,
        allow=frozenset(Reason(name) for name in allow),
        only=None if only is None else frozenset(only),
        weights=evaluator_weights(rows, evaluators) if need_score or evaluators is not None else {},
    )
    judged: list[_Judged] = []
    excluded: list[Exclusion] = []
    sizes: Counter[tuple[int, str]] = Counter()
    unfinished: set[tuple[int, str]] = set()
    for number, run in enumerate(every):
        _judge_run(number, run, scores[number], settings, judged, excluded, sizes, unfinished)
    groups: list[Group] = []
    advantages: dict[int, float] = {}
    if need_score:
        groups, advantages, dropped = _group(judged, every, sizes, unfinished, scale, drop_zero_variance)
        excluded += dropped
    admitted = [_admitted(one, advantages.get(i)) for i, one in enumerate(judged) if not need_score or i in advantages]
    return Admission(
        executions=Records(AdmittedExecution, admitted),
        excluded=Records(Exclusion, excluded),
        groups=Records(Group, groups),
        count=count,
    )


def _judge_run(
    number: int,
    run: Tables,
    scores: Mapping[str, Sequence[Score]],
    settings: _Settings,
    judged: list[_Judged],
    excluded: list[Exclusion],
    sizes: Counter[tuple[int, str]],
    unfinished: set[tuple[int, str]],
) -> None:
    """Judge every execution of one run: add to `judged` or `excluded`, and to the size of its group.

    A group with a running member is `unfinished`: its statistics would change with every member that ends.
    """
    forest = Forest(run, only=settings.only)
    for info in sorted(executions(run).values(), key=lambda e: e.execution_id):
        if settings.only is not None and info.execution_id not in settings.only:
            continue
        if info.group_id is not None:
            sizes[number, info.group_id] += 1
        if (early := _before_tree(info, forest, settings.include_running)) is not None:
            excluded.append(early)
            if early.reason is Reason.RUNNING and info.group_id is not None:
                unfinished.add((number, info.group_id))
            continue
        try:
            tree = forest.tree(info.execution_id)
            found = eligibility(
                tree, need_logprobs=settings.need_logprobs, need_ids=settings.need_ids, allow=settings.allow
            )
        except DataError as error:  # one damaged execution says nothing about the others
            excluded.append(_whole(info, Reason.INCONSISTENT, str(error)))
            continue
        kept, left_out = keep(tree, found, j_max=settings.j_max, role_order=settings.role_order, count=settings.count)
        excluded += left_out
        value = reward(scores.get(info.execution_id, ()), settings.weights)
        why = _why_not(info, found, kept, value, settings.need_score)
        if why is not None:
            excluded.append(why)
            continue
        judged.append(_Judged(info=info, run=run, number=number, tree=tree, reward=value, trajectories=kept))


def _before_tree(info: ExecutionInfo, forest: Forest, include_running: bool) -> Exclusion | None:
    if info.running and not include_running:
        return _whole(info, Reason.RUNNING, "it has not ended")
    if info.end_reason == EndReason.INFRA_FAULT:
        return _whole(info, Reason.INFRA_FAULT, "it ended by a fault of the infrastructure")
    if info.execution_id not in forest:
        return _whole(info, Reason.NO_CALLS, "no call was recorded")
    return None


def _why_not(
    info: ExecutionInfo, judged: Eligibility, kept: tuple[AdmittedTrajectory, ...], value: Reward, need_score: bool
) -> Exclusion | None:
    """Why this execution is left out, the evaluator's reason first: it is what a person looks for."""
    if need_score and value.reason is not None:
        return _whole(info, value.reason, value.detail)
    if not judged.eligible_N.any():
        return _whole(info, Reason.NO_ELIGIBLE_OUTPUT, "no output was delivered to a trained role")
    if not kept:
        most = Counter(reason for reason, _ in judged.reasons.values()).most_common(1)
        detail = (
            f"no token may be trained; most often {most[0][0]}" if most else "no trajectory of a role that is wanted"
        )
        return _whole(info, Reason.NOTHING_TRAINABLE, detail)
    if need_score and info.group_id is None:
        return _whole(info, Reason.NO_GROUP, "it belongs to no group, so there is nothing to compare it with")
    return None


def _whole(info: ExecutionInfo, reason: Reason, detail: str) -> Exclusion:
    return Exclusion(execution_id=info.execution_id, reason=reason, detail=detail)


def _group(
    judged: Sequence[_Judged],
    runs: Sequence[Tables],
    sizes: Mapping[tuple[int, str], int],
    unfinished: Set[tuple[int, str]],
    scale: str,
    drop_zero_variance: bool,
) -> tuple[list[Group], dict[int, float], list[Exclusion]]:
    """Statistics and advantages per group: (groups, advantage by place in `judged`, executions of dropped groups)."""
    members: dict[tuple[int, str], list[int]] = {key: [] for key in sorted(sizes)}
    for i, one in enumerate(judged):
        members[one.number, one.info.group_id or ""].append(i)
    groups: list[Group] = []
    advantages: dict[int, float] = {}
    dropped: list[Exclusion] = []
    for (number, group_id), group_of in members.items():
        rewards = [value for i in group_of if (value := judged[i].reward.value) is not None]
        group = Group(
            run=runs[number],
            group_id=group_id,
            task_id=judged[group_of[0]].info.task_id if group_of else None,
            num_executions=sizes[number, group_id],
            num_valid=len(rewards),
            mean=math.fsum(rewards) / len(rewards) if rewards else None,
            std=float(np.std(rewards)) if rewards else None,
        )
        if (number, group_id) in unfinished:
            group = replace(group, reason=Reason.GROUP_RUNNING)
        elif len(rewards) < 2:
            group = replace(group, reason=Reason.GROUP_TOO_SMALL)
        elif min(rewards) == max(rewards):
            group = replace(group, mean=rewards[0], std=0.0)
            group = replace(group, reason=Reason.ZERO_VARIANCE) if drop_zero_variance else group
        groups.append(group)
        for i, value in zip(group_of, rewards, strict=True):
            if group.reason is not None:
                detail = f"group {group_id}: {len(rewards)} of {group.num_executions} executions have a valid score"
                dropped.append(_whole(judged[i].info, group.reason, detail))
            else:
                advantages[i] = _advantage(value, group, scale)
    return groups, advantages, dropped


def _advantage(value: float, group: Group, scale: str) -> float:
    assert group.mean is not None
    assert group.std is not None
    return (value - group.mean) / (group.std + 1e-6 if scale == "std" else 1.0)


def _admitted(one: _Judged, advantage: float | None) -> AdmittedExecution:
    return AdmittedExecution(
        run=one.run,
        execution_id=one.info.execution_id,
        group_id=one.info.group_id,
        task_id=one.info.task_id,
        reward=one.reward.value,
        advantage=advantage,
        score_ids=one.reward.score_ids,
        partial=one.reward.partial,
        tree=one.tree,
        trajectories=one.trajectories,
        num_owned=sum(t.num_owned for t in one.trajectories),
    )


def _checked(j_max: int | None, role_order: Sequence[AgentRole | str], count: str, scale: str) -> dict[str, Any]:
    """The settings a user may get wrong, or a ConfigError that names the mend."""
    if j_max is not None and j_max < 1:
        raise ConfigError(f"wanted j_max of at least 1, got {j_max}; None keeps every trajectory")
    if count not in ("once", "per_row"):
        raise ConfigError(f"wanted count once or per_row, got {count!r}")
    if scale not in ("std", "none"):
        raise ConfigError(f"wanted scale std or none, got {scale!r}")
    order = tuple(AgentRole(role) for role in role_order)
    if not order or len(set(order)) != len(order) or not set(order) <= set(ROLE_ORDER):
        raise ConfigError(
            f"wanted role_order from {', '.join(ROLE_ORDER)}, each once, got {', '.join(order) or 'none'}"
        )
    return {"j_max": j_max, "role_order": order, "count": count}
