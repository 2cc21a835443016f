"""Why something is trained or not: the rules of admission applied to one run or one execution, told as records.

What is not known is None and never guessed: without the trainer's folder nobody knows in which optimiser step an
execution was consumed, how many executions that step had (E), or what the trainer's own log-probs were.
`provenance` tells the same of one call or token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc

from .admission import Admission, Group, admit
from .eligible import Candidate, Eligibility, candidates, eligibility
from .errors import ConfigError
from .execution import Execution, ExecutionInfo, executions
from .lean import lean
from .ledger import ledger, steps
from .ownership import AdmittedTrajectory, keep
from .reasons import REASONS, Reason
from .schema import arrow_schema
from .scores import Reward, evaluator_weights, reward, scores_by_execution
from .tree import Tree
from .types import LedgerRow, Score, Step

__all__ = [
    "RULES",
    "Consumed",
    "ExecutionExplained",
    "GroupExplained",
    "LeftOut",
    "Loss",
    "RunExplained",
    "Trajectory",
    "Verdict",
    "explain_execution",
    "explain_run",
    "explain_trajectories",
]

RULES: dict[Reason, str] = {reason: told.rule for reason, told in REASONS.items()}
"""The rule behind each reason, in a sentence."""


Loss = Literal["rl", "sft"]
"""What an admission is for: RL needs scores, groups and log-probs; SFT none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether one execution would be trained; `reason` and `detail` say why not."""

    execution_id: str
    task_id: str | None
    sample_index: int | None
    group_id: str | None
    trained: bool
    reason: Reason | None
    detail: str
    reward: float | None
    partial: bool
    score_ids: tuple[str, ...]
    advantage: float | None
    num_trajectories: int
    num_owned: int
    """N_e: tokens that carry loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupExplained:
    """A group's statistics: `num_valid` of `num_executions` have a valid score and something to train."""

    group_id: str
    task_id: str | None
    num_executions: int
    num_valid: int
    mean: float | None
    std: float | None
    reason: Reason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunExplained:
    """What of a run would be trained."""

    verdicts: tuple[Verdict, ...]
    groups: tuple[GroupExplained, ...]
    counts: dict[str, dict[str, int]]
    """Admitted, and left out by reason: executions, calls, trajectories."""
    loss: Loss
    j_max: int | None
    note: str | None
    """Why no reward could be used, when several evaluators scored and none was named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A candidate path by its leaf call: kept, with what it owns, or left out, with the reason."""

    index: int | None
    """Its number among the kept ones; None when it was left out."""
    role: str
    leaf_node: str
    leaf_call: int
    calls: tuple[int, ...]
    """Numbers of the calls whose outputs lie on it."""
    owned_calls: tuple[int, ...]
    """Of these, the calls that are trained through it."""
    num_tokens: int
    num_owned: int
    reason: Reason | None
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A call that is not trained."""

    number: int
    call_id: str
    reason: Reason
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """An optimiser step that trained a trajectory of the execution, by the trainer's ledger."""

    step: int
    version: str
    num_executions: int
    """E of that step."""
    trajectory: int
    leaf_node: str
    owned_tokens: int
    reward: float | None
    advantage: float | None
    manifest: int
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionExplained:
    """One execution: verdict, group, trajectories kept and left out, calls not trained, steps that consumed it."""

    info: ExecutionInfo
    verdict: Verdict
    group: GroupExplained | None
    scores: tuple[Score, ...]
    trajectories: tuple[Trajectory, ...]
    left_out: tuple[LeftOut, ...]
    consumed: tuple[Consumed, ...] | None
    """By which steps of the trainer that was named; None when none was."""
    loss: Loss
    j_max: int | None
    note: str | None


def explain_run(
    run: Any,
    *,
    loss: Loss = "rl",
    j_max: int | None = 5,
    evaluators: Mapping[str, float] | None = None,
    only: Sequence[str] | None = None,
) -> RunExplained:
    """Which executions of `run` would be trained on, with which reward and advantage, and why not the others.

    `loss="sft"` asks for no score, group or log-probs. With several evaluators and none named no reward can be chosen:
    then everything but reward and advantage is told.
    """
    (run,) = lean(run, *arrow_schema("calls").names)  # of calls that are left out, whole records are told
    found, note = _admit(run, loss, evaluators=evaluators, j_max=j_max, only=only)
    admitted = {e.execution_id: e for e in found.executions}
    why = {x.execution_id: x for x in found.excluded if x.call_id is None and x.node_id is None}
    known = executions(run)
    scores = scores_by_execution(run)
    rows = [row for found_rows in scores.values() for row in found_rows]
    weights = evaluator_weights(rows, evaluators) if note is None and loss == "rl" else {}
    verdicts = [
        _verdict(info, admitted.get(execution_id), why.get(execution_id), reward(scores.get(execution_id, ()), weights))
        for execution_id, info in known.items()
        if only is None or execution_id in only
    ]
    groups = tuple(_group(group) for group in found.groups)
    counts = found.counts()
    return RunExplained(verdicts=tuple(verdicts), groups=groups, counts=counts, loss=loss, j_max=j_max, note=note)


def _admit(
    run: Any, loss: Loss, *, evaluators: Mapping[str, float] | None, **settings: Any
) -> tuple[Admission, str | None]:
    if loss == "sft":
        return admit(run, need_score=False, **settings), None
    try:
        return admit(run, evaluators=evaluators, **settings), None
    except ConfigError as error:
        names = {row.evaluator for rows in scores_by_execution(run).values() for row in rows}
        if evaluators is not None or len(names) < 2:
            raise
        return admit(run, need_score=False, need_logprobs=True, **settings), str(error)


def _verdict(info: ExecutionInfo, admitted: Any, why: Any, judged: Reward) -> Verdict:
    return Verdict(
        execution_id=info.execution_id,
        task_id=info.task_id,
        sample_index=info.sample_index,
        group_id=info.group_id,
        trained=admitted is not None,
        reason=None if why is None else why.reason,
        detail="" if why is None else why.detail,
        reward=judged.value,
        partial=judged.partial,
        score_ids=judged.score_ids,
        advantage=None if admitted is None else admitted.advantage,
        num_trajectories=0 if admitted is None else len(admitted.trajectories),
        num_owned=0 if admitted is None else admitted.num_owned,
    )


def _group(group: Group) -> GroupExplained:
    return GroupExplained(
        group_id=group.group_id,
        task_id=group.task_id,
        num_executions=group.num_executions,
        num_valid=group.num_valid,
        mean=group.mean,
        std=group.std,
        reason=group.reason,
    )


def explain_execution(
    execution: Execution,
    *,
    loss: Loss = "rl",
    j_max: int | None = 5,
    evaluators: Mapping[str, float] | None = None,
    trainer: str | Path | None = None,
) -> ExecutionExplained:
    """Everything that decides over one execution; its group is judged with it, `trainer` is the trainer's folder."""
    run, info = execution.run, execution.info
    members = [
        name for name, other in executions(run).items()
        if name == info.execution_id or (info.group_id is not None and other.group_id == info.group_id)
    ]  # fmt: skip
    of_group = explain_run(run, loss=loss, j_max=j_max, evaluators=evaluators, only=members)
    verdict = next(v for v in of_group.verdicts if v.execution_id == info.execution_id)
    trajectories: tuple[Trajectory, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    if pc.index(run.table("calls").column("execution_id"), info.execution_id).as_py() >= 0:
        tree = execution.tree
        judged = eligibility(tree, need_logprobs=loss == "rl")
        trajectories = explain_trajectories(tree, judged, j_max=j_max)
        left_out = tuple(
            LeftOut(number=n, call_id=call.call_id, reason=found[0], detail=found[1])
            for n, call in enumerate(tree.calls, 1)
            if (found := judged.reasons.get(call.call_id)) is not None
        )
    return ExecutionExplained(
        info=info,
        verdict=verdict,
        group=next((g for g in of_group.groups if g.group_id == info.group_id), None),
        scores=execution.scores,
        trajectories=trajectories,
        left_out=left_out,
        consumed=None if trainer is None else tuple(_consumed(trainer, info.execution_id)),
        loss=loss,
        j_max=j_max,
        note=of_group.note,
    )


def explain_trajectories(tree: Tree, judged: Eligibility, *, j_max: int | None) -> tuple[Trajectory, ...]:
    """Every candidate trajectory of a tree, the kept ones first in the order in which they were chosen."""
    kept, out = keep(tree, judged, j_max=j_max)
    why = {x.node_id: x for x in out if x.node_id is not None}
    of = {c.leaf: c for c in candidates(tree, judged)}
    chosen = [_trajectory(tree, of[t.leaf], t) for t in kept]
    left = [c for c in of.values() if tree.node_id[c.leaf] in why]
    rest = [_trajectory(tree, c, None) for c in left]
    rest = [replace(t, reason=why[t.leaf_node].reason, detail=why[t.leaf_node].detail) for t in rest]
    return (*chosen, *rest)


def _trajectory(tree: Tree, found: Candidate, kept: AdmittedTrajectory | None) -> Trajectory:
    number = {call.call_id: n for n, call in enumerate(tree.calls, 1)}
    outputs = [i for i in found.path.tolist() if i in tree.outputs]
    owned = set(kept.owned) if kept else set()
    return Trajectory(
        index=None if kept is None else kept.index,
        role=str(found.role),
        leaf_node=tree.node_id[found.leaf],
        leaf_call=number[found.call.call_id],
        calls=tuple(number[tree.outputs[i][0].call_id] for i in outputs),
        owned_calls=tuple(number[tree.outputs[i][0].call_id] for i in outputs if i in owned),
        num_tokens=int(tree.num_tokens_N[found.path].sum()),
        num_owned=0 if kept is None else kept.num_owned,
        reason=None,
        detail="",
    )


def _consumed(trainer: str | Path, execution_id: str) -> list[Consumed]:
    folder = Path(trainer)
    of_step: dict[int, Step] = {step.step: step for step in steps(folder)}
    if not of_step:
        raise ConfigError(
            f"wanted the folder of a trainer (its output.dir), {folder} holds no step; see docs/training.md"
        )
    rows: list[LedgerRow] = [row for row in ledger(folder) if row.execution_id == execution_id]
    return [
        Consumed(
            step=row.step,
            version=f"{of_step[row.step].policy_id}:{of_step[row.step].n}",
            num_executions=of_step[row.step].num_executions,
            trajectory=row.trajectory,
            leaf_node=row.leaf_node,
            owned_tokens=row.owned_tokens,
            reward=row.reward,
            advantage=row.advantage,
            manifest=row.manifest,
            at=row.at,
        )
        for row in rows
    ]
