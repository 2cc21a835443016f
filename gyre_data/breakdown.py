"""`gyre stats --by`: the same counts cut by agent role, client or task, or verdicts cut by evaluator and group."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .columns import code_of, members
from .counts import TreeCounts, added_up, count_in
from .eligible import Reason, eligibility
from .execution import ExecutionInfo, executions
from .lean import lean
from .ownership import kept_trajectories
from .run_stats import execution_state
from .schema import AgentRole, Author
from .scores import latest_scored, scores_by_execution
from .tree import Forest, Tables, Tree
from .types import Score

__all__ = ["CallCounts", "EvaluatorGroup", "TaskCounts", "by_client", "by_evaluator", "by_role", "by_task"]

UNNAMED = "(unnamed)"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallCounts:
    """Calls of one agent role or client, and the tokens that they added."""

    name: str
    executions: int
    calls: int
    distinct_tokens: int
    sampled_tokens: int
    trainable_tokens: int
    kept_tokens: int
    false_forks: int
    not_trained: dict[str, int]
    """Calls by the reason why their output is not trained."""

    def to_json(self, cut: str) -> dict[str, Any]:
        """Plain values; the name under the word it was cut by."""
        return {cut: self.name, **{name: value for name, value in asdict(self).items() if name != "name"}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskCounts:
    """Executions of one task over all runs."""

    task: str
    groups: int
    executions: int
    by_state: dict[str, int]
    calls: int
    distinct_tokens: int
    sharing: float | None
    sampled_tokens: int
    trainable_tokens: int
    kept_tokens: int
    duration_p50_s: float | None
    scores: dict[str, float]
    """Mean of the latest scored verdicts, by evaluator; an execution without one is in no mean."""


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


def by_role(runs: Tables | Sequence[Tables], *, j_max: int | None = 5) -> list[CallCounts]:
    """Counts per role, in the order of roles; a role without calls is left out."""
    found = {row.name: row for row in _by_call(lean(runs), _roles, j_max)}
    return [found[name] for name in map(str, AgentRole) if name in found and found[name].calls]


def by_client(runs: Tables | Sequence[Tables], *, j_max: int | None = 5) -> list[CallCounts]:
    """Counts per client, as it named itself with its version; most calls first."""
    found = _by_call(lean(runs, "client"), _clients, j_max)
    return sorted((row for row in found if row.calls), key=lambda row: (-row.calls, row.name))


def _roles(_: Tables) -> Callable[[Tree], list[str]]:
    roles = [str(role) for role in members(AgentRole)]
    return lambda tree: [roles[code] for code in tree.facts.codes("agent_role", AgentRole).tolist()]


def _clients(run: Tables) -> Callable[[Tree], list[str]]:
    calls = run.table("calls")
    told = dict(zip(calls.column("call_id").to_pylist(), calls.column("client").to_pylist(), strict=True))
    return lambda tree: [told[call_id] or UNNAMED for call_id in tree.facts.ids.to_pylist()]


_FIGURES = (
    "executions",
    "calls",
    "distinct_tokens",
    "sampled_tokens",
    "trainable_tokens",
    "kept_tokens",
    "false_forks",
)


def _by_call(
    runs: Sequence[Tables], names_of: Callable[[Tables], Callable[[Tree], list[str]]], j_max: int | None
) -> list[CallCounts]:
    """`names_of` gives, for a run, what gives the name of each call of a tree, in the order of its calls."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    faulty: list[str] = []
    for run in runs:
        forest, name_of = Forest(run), names_of(run)
        for execution_id in forest.execution_ids:
            if (tree := forest.consistent(execution_id)) is None:
                faulty.append(execution_id)
                continue
            judged = eligibility(tree)
            owned = [i for t in kept_trajectories(tree, judged, j_max=j_max) for i in t.owned]
            names, code_C = np.unique([*name_of(tree), str(AgentRole.UNKNOWN)], return_inverse=True)
            code_N = code_C[tree.call_N]  # a node of a call that was never committed is of an unknown one, the last
            sampled = [code_of(author) for author in (Author.POLICY, Author.PROVIDER)]
            parts: dict[str, npt.NDArray[Any]] = {
                "distinct_tokens": np.bincount(code_N, tree.num_tokens_N, len(names)),
                "sampled_tokens": np.bincount(
                    code_N, tree.num_tokens_N * np.isin(tree.author_code_N, sampled), len(names)
                ),
                "trainable_tokens": np.bincount(code_N, tree.num_tokens_N * judged.trainable_N, len(names)),
                "kept_tokens": np.bincount(code_N[owned], tree.num_tokens_N[owned], len(names)),
                "calls": np.bincount(code_C[:-1], minlength=len(names)),
                "false_forks": np.bincount(code_C[:-1], tree.facts.given("fork_check"), len(names)),
            }
            for place, name in enumerate(names.tolist()):
                figures = {figure: int(values[place]) for figure, values in parts.items()}
                sums[name].update({**figures, "executions": int(figures["calls"] > 0)})
                at = judged.reason_C[code_C[:-1] == place]
                reasons[name].update(str(members(Reason)[code]) for code in at[at >= 0].tolist())
    _warn(faulty)
    return [
        CallCounts(
            name=name,
            not_trained=dict(sorted(reasons[name].items())),
            **{figure: figures[figure] for figure in _FIGURES},
        )
        for name, figures in sums.items()
    ]


def by_task(runs: Tables | Sequence[Tables], *, j_max: int | None = 5) -> list[TaskCounts]:
    """Executions, tokens and mean scores per task, by name; executions without a task stand together at the end."""
    infos: dict[str | None, list[ExecutionInfo]] = defaultdict(list)
    groups: dict[str | None, set[tuple[int, str]]] = defaultdict(set)
    states: dict[str | None, Counter[str]] = defaultdict(Counter)
    trees: dict[str | None, list[TreeCounts]] = defaultdict(list)
    values: dict[str | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, run in enumerate(lean(runs)):
        forest, scores = Forest(run), scores_by_execution(run)
        for info in executions(run).values():
            task, rows = info.task_id, scores.get(info.execution_id, [])
            infos[task].append(info)
            groups[task] |= {(number, info.group_id)} if info.group_id is not None else set()
            states[task][execution_state(info, rows)] += 1
            for evaluator, value in _latest(rows).items():
                values[task][evaluator].append(value)
            if info.execution_id in forest:
                trees[task].append(count_in(forest, info.execution_id, j_max=j_max))
    _warn([fault.execution_id for found in trees.values() for one in found for fault in one.faults])
    order = sorted(infos, key=lambda task: (task is None, task or ""))
    return [
        _task(task, infos[task], len(groups[task]), states[task], added_up(trees[task]), values[task]) for task in order
    ]


def _task(
    task: str | None,
    infos: Sequence[ExecutionInfo],
    groups: int,
    states: Counter[str],
    trees: TreeCounts,
    values: dict[str, list[float]],
) -> TaskCounts:
    took = [(e.ended_at - e.started_at).total_seconds() for e in infos if e.ended_at and e.started_at]
    return TaskCounts(
        task=UNNAMED if task is None else task,
        groups=groups,
        executions=len(infos),
        by_state=dict(states),
        calls=trees.calls,
        distinct_tokens=trees.distinct_tokens,
        sharing=trees.sharing,
        sampled_tokens=trees.sampled_tokens,
        trainable_tokens=trees.trainable_tokens,
        kept_tokens=trees.kept_tokens,
        duration_p50_s=float(np.median(took)) if took else None,
        scores={name: math.fsum(found) / len(found) for name, found in sorted(values.items())},
    )


def _latest(rows: Sequence[Score]) -> dict[str, float]:
    """The value that counts, by evaluator."""
    latest = {name: latest_scored(rows, name) for name in {row.evaluator for row in rows}}
    return {
        name: row.value
        for name, row in latest.items()
        if row is not None and row.value is not None and math.isfinite(row.value)
    }


def by_evaluator(runs: Tables | Sequence[Tables]) -> list[EvaluatorGroup]:
    """Verdicts per evaluator and group, so that a group without signal or with failures stands out."""
    found: list[EvaluatorGroup] = []
    for run in [cast(Tables, runs)] if hasattr(runs, "table") else runs:
        scores = scores_by_execution(run)
        groups: dict[str | None, list[str]] = {}
        tasks: dict[str | None, str | None] = {}
        for info in executions(run).values():
            groups.setdefault(info.group_id, []).append(info.execution_id)
            tasks.setdefault(info.group_id, info.task_id if info.group_id is not None else None)
        for evaluator in sorted({row.evaluator for rows in scores.values() for row in rows}):
            for group_id, inside in sorted(groups.items(), key=lambda item: item[0] or ""):
                tried = [
                    rows for name in inside if (rows := [s for s in scores.get(name, ()) if s.evaluator == evaluator])
                ]
                latest = [row for rows in tried if (row := latest_scored(rows, evaluator)) is not None]
                values = [row.value for row in latest if row.value is not None and math.isfinite(row.value)]
                found.append(
                    EvaluatorGroup(
                        evaluator=evaluator,
                        run=str(getattr(run, "path", "")),
                        group_id=group_id,
                        task_id=tasks[group_id],
                        executions=len(inside),
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


def _warn(faulty: Sequence[str]) -> None:
    """Tell of executions that no row counts, since their own rows contradict one another."""
    if faulty:
        named = ", ".join(faulty[:5]) + (", ..." if len(faulty) > 5 else "")
        _log.warning(
            "%d inconsistent executions are left out of the counts: %s; `gyre verify` says why", len(faulty), named
        )
