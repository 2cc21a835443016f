"""Executions of recorded runs as training data, without holding their trees: a tree is built when its step is planned.

Admission looks at every tree once, some at a time; what stays in memory of an execution is which nodes it trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from gyre_data.admission import admit
from gyre_data.errors import DataError
from gyre_data.execution import executions
from gyre_data.scores import evaluator_weights, scores_by_execution
from gyre_data.tree import Forest, Tree
from gyre_data.types import PolicyVersion

from .config import TrainingConfig
from .lineage import Lineage
from .live import settled_at
from .pack import Array, TrajectoryInput, TreeInput
from .routes import RecordedRoutes, recorded_routes
from .teacher import teacher_logprobs

if TYPE_CHECKING:
    from gyre_data.admission import AdmittedExecution, Group
    from gyre_data.store import Run

__all__ = ["Admitted", "Facts", "Kept", "RecordedExecution", "admitted"]

_PART_NODES = 200_000
"""Trees of about so many nodes are in memory at a time while a run is admitted; at some 200 bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One kept trajectory of an execution: its leaf, the nodes it owns, and what the packer and the ledger read."""

    index: int
    leaf: int
    leaf_node: str
    owned_O: Array
    owned_tokens: int
    needed_tokens: int
    """Tokens from the root down to the last owned one: the least that a pack must hold."""
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the trees of one run are built with."""

    run: Run
    forest: Forest
    policy: bool
    """A policy loss reads them, not SFT."""
    vocab: int
    own: Lineage | None
    teacher: Mapping[str, Array] | None
    """A teacher's log-probs by node id."""
    routes: RecordedRoutes | None
    """Experts to replay."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedExecution:
    """An admitted execution; `tree` and `packed` read it from the run's files each time they are called."""

    execution_id: str
    group_id: str | None
    task_id: str | None
    reward: float | None
    advantage: float | None
    score_ids: tuple[str, ...]
    policy_ids: frozenset[str]
    kept: tuple[Kept, ...]
    facts: Facts
    settled_at: datetime | None = None
    """Of a run that is still being recorded: when its group was complete."""

    def tree(self) -> Tree:
        """Nodes and calls, over the run's own memory."""
        return self.facts.forest.tree(self.execution_id)

    def packed(self, number: int) -> TreeInput:
        """The packer's input: views of the run's own token arrays; `number` becomes `TreeInput.execution`."""
        return _tree_input(self, number)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """All that may be trained of some runs, what was left out by reason, and the groups that were compared."""

    executions: tuple[RecordedExecution, ...]
    counts: Mapping[str, Counter[str]]
    """Left out, by reason: of executions, calls and trajectories."""
    groups: tuple[Group, ...]


def admitted(
    runs: Sequence[Run],
    config: TrainingConfig,
    own: Lineage | None,
    vocab: int,
    *,
    held_out: Callable[[str], bool],
    live: Sequence[Run] = (),
) -> Admitted:
    """Admit the executions of runs as the config says, those of tasks that are `held_out` left out and counted.

    Of `live` runs, groups that are not complete yet are left out as well (`pending`).
    """
    data, rl = config.data, config.loss.kind != "sft"
    need_score = rl and config.loss.advantage > 0
    evaluators = data.evaluators
    if need_score:  # one choice for all runs, whichever of them holds which evaluator
        rows = (row for run in runs for found in scores_by_execution(run).values() for row in found)
        evaluators = evaluator_weights(rows, evaluators) or None
    counts: dict[str, Counter[str]] = {level: Counter() for level in ("executions", "calls", "trajectories")}
    kept: list[RecordedExecution] = []
    groups: list[Group] = []
    for run in runs:
        teacher = teacher_logprobs(run, config.loss.teacher_name) if config.loss.teacher else None
        replayed = config.model.router_replay == "R3"
        routes = recorded_routes(run, config.model.path) if replayed else None
        facts = Facts(run=run, forest=Forest(run), policy=rl, vocab=vocab, own=own, teacher=teacher, routes=routes)
        settled = settled_at(run, (evaluators or {}) if need_score else None) if run in live else None
        for part in _parts(run, held_out, counts["executions"], settled):
            found = admit(
                run, j_max=data.j_max, count=data.count, evaluators=evaluators, scale=data.scale,
                need_score=need_score, drop_zero_variance=data.drop_zero_variance, only=part,
            )  # fmt: skip
            kept += [_recorded(one, facts, settled) for one in found.executions]
            groups += found.groups
            told = found.counts()
            for level, total in counts.items():
                total.update(told[level])
    return Admitted(executions=tuple(kept), counts=counts, groups=tuple(groups))


def _parts(
    run: Run, held_out: Callable[[str], bool], counts: Counter[str], settled: Mapping[str, datetime] | None
) -> Iterator[list[str]]:
    """Ids of executions to train on, whole groups together, about `_PART_NODES` nodes at a time."""
    counted = pc.value_counts(run.table("nodes").column("execution_id"))
    nodes = dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))
    groups: dict[tuple[str, str | None], list[str]] = {}
    tasks: dict[tuple[str, str | None], str] = {}
    for info in executions(run).values():
        key = ("", info.group_id) if info.group_id is not None else (info.execution_id, None)
        groups.setdefault(key, []).append(info.execution_id)
        if info.task_id is not None:
            tasks.setdefault(key, info.task_id)
    part: list[str] = []
    size = 0
    for key, members in groups.items():
        if held_out(tasks.get(key) or key[1] or key[0]):
            counts["eval_split"] += len(members)
            continue
        if settled is not None and not settled.keys() >= set(members):
            counts["pending"] += len(members)
            continue
        part += members
        size += sum(nodes.get(name, 0) for name in members)
        if size >= _PART_NODES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _recorded(execution: AdmittedExecution, facts: Facts, settled: Mapping[str, datetime] | None) -> RecordedExecution:
    tree = execution.tree
    end_N = tree.start_pos_N + tree.num_tokens_N
    owned = [node for trajectory in execution.trajectories for node in trajectory.owned]
    return RecordedExecution(
        execution_id=execution.execution_id,
        group_id=execution.group_id if facts.policy else None,
        task_id=execution.task_id,
        reward=execution.reward,
        advantage=execution.advantage,
        score_ids=tuple(execution.score_ids),
        policy_ids=frozenset(span.policy_id for node in owned for span in tree.versions(node) or ()),
        kept=tuple(
            Kept(
                index=t.index,
                leaf=t.leaf,
                leaf_node=tree.node_id[t.leaf],
                owned_O=np.array(t.owned, np.int32),
                owned_tokens=t.num_owned,
                needed_tokens=max((int(end_N[node]) for node in t.owned if tree.num_tokens_N[node]), default=0),
                role=str(t.role),
            )
            for t in execution.trajectories
        ),
        facts=facts,
        settled_at=None if settled is None else settled[execution.execution_id],
    )


def _check_ids(execution_id: str, ids: Sequence[Array], vocab: int) -> None:
    """Refuse ids that the model has no row for."""
    smallest = min((int(x.min()) for x in ids if len(x)), default=0)
    if smallest < 0:
        raise DataError(
            f"execution {execution_id}: wanted token ids from 0, got {smallest}; run `gyre verify` on its run"
        )
    largest = max((int(x.max()) for x in ids if len(x)), default=0)
    if largest >= vocab:
        raise DataError(
            f"execution {execution_id}: wanted token ids below the model's {vocab}, got {largest}; it was recorded "
            "with another tokenizer, set model.path to the model that was served"
        )


def _tree_input(execution: RecordedExecution, number: int) -> TreeInput:
    """Views of the run's own token arrays; the first copy of a token is the pack's."""
    facts, tree = execution.facts, execution.tree()
    temperature_N = np.full(len(tree), np.nan)
    for node, calls in tree.outputs.items():
        if calls[0].temperature is not None:
            temperature_N[node] = calls[0].temperature
    ids = tuple(tree.ids(node) for node in range(len(tree)))
    _check_ids(execution.execution_id, ids, facts.vocab)
    recorded = [tree.logprobs(node) for node in range(len(ids))]
    if not facts.policy:  # trained at temperature 1, so only log-probs recorded at 1 can be compared
        recorded = [x if temperature_N[node] == 1.0 else None for node, x in enumerate(recorded)]
        temperature_N = np.ones(len(ids))
    return TreeInput(
        execution=number,
        parent_N=tree.parent_N,
        ids=ids,
        temperature_N=temperature_N,
        trajectories=tuple(
            TrajectoryInput(
                path_P=tree.path(t.leaf), owned_O=t.owned_O, advantage=execution.advantage or 0.0, role=t.role
            )
            for t in execution.kept
        ),
        logp_behaviour=tuple(recorded),
        logp_teacher=None if facts.teacher is None else tuple(facts.teacher.get(name) for name in tree.node_id),
        version=_own_steps(execution, tree, facts.own) if facts.own else None,
        routes=None if facts.routes is None else _routes(tree, facts.routes),
    )


def _routes(tree: Tree, routes: RecordedRoutes) -> tuple[Array | None, ...]:
    return tuple(routes.of(name, int(num)) for name, num in zip(tree.node_id, tree.num_tokens_N, strict=True))


def _own_steps(execution: RecordedExecution, tree: Tree, own: Lineage) -> tuple[Array | None, ...]:
    """Per token, how many steps of this training run its weights had seen: 0 for those it started from, -1 unknown.

    Versions of steps that a return to an older checkpoint undid are unknown.
    """
    out: list[Array | None] = [None] * len(tree)
    for node in {int(node) for t in execution.kept for node in t.owned_O}:
        step_T = np.full(int(tree.num_tokens_N[node]), -1, np.int64)
        for span in tree.versions(node) or ():
            if PolicyVersion(policy_id=span.policy_id, n=span.n) == own.start:
                step_T[span.start : span.end] = 0
            elif span.policy_id == own.version.policy_id:
                step_T[span.start : span.end] = own.steps.get(span.n, -1)
        out[node] = step_T
    return tuple(out)
