"""How good the executions of a run were: pass@k with error bars, and two runs compared task by task.

    pass@k of a task = 1 - C(n - c, k) / C(n, k)        n scored attempts, c of them passed (unbiased, n >= k)

That is the estimator of arXiv:2107.03374, section 2.1. A run's figure is the mean over its tasks. Its 95 % interval is
over tasks, since attempts at one task are alike: Wilson's where each task's value is 0 or 1, else the percentile
bootstrap with a fixed seed. With one task there is none. Attempts that no evaluator scored are counted, never zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .errors import ConfigError, DataError
from .execution import executions
from .reasons import Reason
from .schema import EndReason
from .scores import evaluator_weights, reward, scores_by_execution
from .tree import Tables

__all__ = [
    "Comparison", "Estimate", "Evaluation", "TaskResult", "VersionResult", "compare", "evaluate", "pass_at",
    "pass_at_k",
]  # fmt: skip

_RESAMPLES, _CHUNK, _SEED = 10_000, 500, 20210707
_Z = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """The scored attempts at one task."""

    task: str
    attempts: int
    passes: int
    mean: float
    """Of the scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionResult:
    """The scored attempts that began under one version of the weights, whatever weights their later calls met."""

    version: str | None
    """Served when they began; None: not on record."""
    tasks: tuple[TaskResult, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    value: float | None
    """None over no tasks."""
    low: float | None
    high: float | None
    method: str | None
    """`wilson` or `bootstrap`; None: fewer than two tasks, so no interval."""
    tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a run's scores say."""

    run: str
    evaluators: Mapping[str, float]
    threshold: float
    """A score of at least this much is a pass."""
    executions: int
    unscored: Mapping[str, int]
    """Executions without a score, by reason."""
    tasks: tuple[TaskResult, ...]
    versions: tuple[VersionResult, ...]
    """By policy as they came, then by number."""
    pass_at: Mapping[int, Estimate]
    too_few: Mapping[int, int]
    """By k, tasks with fewer than k scored attempts; they are left out of that figure."""
    mean: Estimate
    """Of the tasks' mean scores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The second run minus the first, over the tasks that both hold."""

    first: Evaluation
    second: Evaluation
    tasks: int
    """In both."""
    only_first: int
    only_second: int
    pass_at: Mapping[int, Estimate]
    """Differences."""
    mean: Estimate
    better: int
    """Tasks whose mean score is higher in the second run."""
    worse: int


def pass_at_k(attempts: int, passes: int, k: int) -> float | None:
    """Chance that at least one of k attempts passes; None when there are fewer than k."""
    if attempts < k:
        return None
    return 1.0 - math.comb(attempts - passes, k) / math.comb(attempts, k)


def evaluate(
    run: Tables,
    *,
    k: Sequence[int] = (1,),
    evaluators: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> Evaluation:
    """Evaluate the executions of a run. A task is a task id, else a group, else an execution alone.

    Raises ConfigError where several evaluators scored and none is named, DataError when nothing is scored.
    """
    if not k or min(k) < 1:
        raise ConfigError(f"wanted k of at least 1, got {', '.join(map(str, k)) or 'none'}; write for example -k 1,4")
    scores = scores_by_execution(run)
    weights = evaluator_weights((row for rows in scores.values() for row in rows), evaluators)
    values: dict[str, list[float]] = {}
    versions: dict[tuple[str, int], dict[str, list[float]]] = {}
    unscored: Counter[str] = Counter()
    infos = executions(run)
    for info in infos.values():
        found = reward(scores.get(info.execution_id, ()), weights)
        if info.end_reason == EndReason.INFRA_FAULT:
            unscored[Reason.INFRA_FAULT] += 1
        elif found.value is None:
            unscored[Reason.RUNNING if info.running else str(found.reason)] += 1
        else:
            task = info.task_id or info.group_id or info.execution_id
            values.setdefault(task, []).append(found.value)
            policy, n = info.dispatch_policy_id, info.dispatch_version
            served = ("", 0) if policy is None or n is None else (policy, n)
            versions.setdefault(served, {}).setdefault(task, []).append(found.value)
    where = str(getattr(run, "path", "the run"))
    if not values:
        why = ", ".join(f"{reason} {n}" for reason, n in unscored.items()) or "it holds no execution"
        raise DataError(f"wanted scored executions in {where}, got none ({why}); see `gyre score --help`")
    tasks, ks = _results(values, threshold), sorted(set(k))
    policies = list(dict.fromkeys(policy for policy, _ in versions))
    return Evaluation(
        run=where, evaluators=weights, threshold=threshold, executions=len(infos), unscored=dict(unscored),
        tasks=tasks,
        versions=tuple(
            VersionResult(version=f"{policy}:{n}" if policy else None, tasks=_results(versions[policy, n], threshold))
            for policy, n in sorted(versions, key=lambda version: (policies.index(version[0]), version[1]))
        ),
        pass_at={n: pass_at(tasks, n) for n in ks},
        too_few={n: sum(t.attempts < n for t in tasks) for n in ks},
        mean=_estimate([t.mean for t in tasks], binary=False),
    )  # fmt: skip


def _results(values: Mapping[str, Sequence[float]], threshold: float) -> tuple[TaskResult, ...]:
    return tuple(
        TaskResult(task=task, attempts=len(of), passes=sum(v >= threshold for v in of), mean=math.fsum(of) / len(of))
        for task, of in sorted(values.items())
    )


def pass_at(tasks: Sequence[TaskResult], k: int) -> Estimate:
    """pass@k over those of the tasks that have as many attempts."""
    return _estimate([v for t in tasks if (v := pass_at_k(t.attempts, t.passes, k)) is not None])


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two evaluations task by task; raises DataError when they have no task in common."""
    ours, theirs = ({t.task: t for t in e.tasks} for e in (first, second))
    both = sorted(ours.keys() & theirs.keys())
    if not both:
        raise DataError(
            f"wanted tasks that {first.run} and {second.run} both hold, got none in common; compare runs of one set"
        )
    gained: dict[int, Estimate] = {}
    for k in first.pass_at.keys() & second.pass_at.keys():
        pairs = [[pass_at_k(e[t].attempts, e[t].passes, k) for e in (ours, theirs)] for t in both]
        gaps = [b - a for a, b in pairs if a is not None and b is not None]
        gained[k] = _estimate(gaps, binary=False)
    gaps = [theirs[task].mean - ours[task].mean for task in both]
    return Comparison(
        first=first, second=second, tasks=len(both), only_first=len(ours) - len(both),
        only_second=len(theirs) - len(both), pass_at=dict(sorted(gained.items())),
        mean=_estimate(gaps, binary=False), better=sum(gap > 0 for gap in gaps), worse=sum(gap < 0 for gap in gaps),
    )  # fmt: skip


def _estimate(values: Sequence[float], *, binary: bool = True) -> Estimate:
    num = len(values)
    mean = math.fsum(values) / num if num else None
    low = high = method = None
    if mean is not None and num > 1:
        if binary and set(values) <= {0.0, 1.0}:
            method, (low, high) = "wilson", _wilson(mean, num)
        else:
            method, (low, high) = "bootstrap", _bootstrap(np.array(values))
    return Estimate(value=mean, low=low, high=high, method=method, tasks=num)


def _wilson(share: float, num: int) -> tuple[float, float]:
    """Wilson's score interval of a share of `num` independent tasks."""
    centre = (share + _Z * _Z / (2 * num)) / (1 + _Z * _Z / num)
    half = _Z / (1 + _Z * _Z / num) * math.sqrt(share * (1 - share) / num + _Z * _Z / (4 * num * num))
    return max(0.0, centre - half), min(1.0, centre + half)


def _bootstrap(values_T: np.ndarray) -> tuple[float, float]:
    """2.5th and 97.5th percentile of the mean over tasks drawn with replacement."""
    rng = np.random.default_rng(_SEED)
    num = len(values_T)
    means = [values_T[rng.integers(0, num, (_CHUNK, num))].mean(1) for _ in range(_RESAMPLES // _CHUNK)]
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)
