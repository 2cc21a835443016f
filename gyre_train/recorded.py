"""Executions of recorded runs as training data, without holding their trees: a tree is built when its step is planned.

Admission looks at every tree once, some at a time; what stays in memory of an execution is which nodes it trains. Of a
run that is read again, only groups of which new rows came are looked at: the others are what they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from gyre_data.admission import LEVELS, admit
from gyre_data.errors import DataError
from gyre_data.execution import ExecutionInfo, executions
from gyre_data.reasons import REASONS
from gyre_data.scores import evaluator_weights, scores_by_execution
from gyre_data.tree import Forest, Tree
from gyre_data.types import PolicyVersion

from .config import TrainingConfig
from .lineage import Lineage
from .live import settled_at
from .pack import Array
from .routes import RecordedRoutes, recorded_routes
from .teacher import teacher_logprobs
from .tree_input import TrajectoryInput, TreeInput

if TYPE_CHECKING:
    from gyre_data.admission import Admission, AdmittedExecution, Group
    from gyre_data.store import Run

__all__ = ["Admitted", "AdmittedGroup", "Facts", "GroupKey", "Kept", "RecordedExecution", "admitted"]

_READ = ("nodes", "executions", "calls", "deliveries", "scores")
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


GroupKey = tuple[int, str, str]
"""A run's place among the runs, and a group in it; or "" and an execution that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedGroup:
    """What admission made of one group of a run."""

    seen: tuple[object, ...]
    """What it depends on: members, when they were complete, evaluators, and how many rows each member has. Rows are
    only ever added, so as many rows are the same rows."""
    executions: tuple[RecordedExecution, ...]
    counts: Mapping[str, Counter[str]]
    groups: tuple[Group, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """All that may be trained of some runs, what was left out by reason, and the groups that were compared."""

    executions: tuple[RecordedExecution, ...]
    counts: Mapping[str, Counter[str]]
    """Left out, by reason: of executions, calls and trajectories."""
    groups: tuple[Group, ...]
    by_group: Mapping[GroupKey, AdmittedGroup]
    """The same, for another reading of these runs with these settings to start from."""
    complete: frozenset[str]
    """Groups of live runs that are complete, held-out tasks and those without a valid score included."""
    runs: tuple[Run, ...]


def admitted(
    runs: Sequence[Run],
    config: TrainingConfig,
    own: Lineage | None,
    vocab: int,
    *,
    held_out: Callable[[str], bool],
    live: Sequence[Run] = (),
    before: Mapping[GroupKey, AdmittedGroup] = MappingProxyType({}),
    trained: Container[str] = (),
) -> Admitted:
    """Admit the executions of runs as the config says, those of tasks that are `held_out` left out and counted.

    Of `live` runs, groups that are not complete yet are left out as well (`pending`). `before` is what an earlier
    reading found under the same config (`Admitted.by_group`); groups that are as they were are taken from it.
    Of `live` runs, groups of which every member is `trained` are not looked at, and of what was admitted of a group
    nothing is kept once all of it is.
    """
    need_score = config.loss.kind != "sft" and config.loss.advantage > 0
    evaluators = config.data.evaluators
    if need_score:  # one choice for all runs, whichever of them holds which evaluator
        rows = (row for run in runs for found in scores_by_execution(run).values() for row in found)
        evaluators = evaluator_weights(rows, evaluators) or None
    counts = _no_counts()
    by_group: dict[GroupKey, AdmittedGroup] = {}
    complete: set[str] = set()
    for place, run in enumerate(runs):
        judges = (evaluators or {}) if need_score else None
        settled = settled_at(run, judges, config.data.live_patience_s) if run in live else None
        infos = executions(run)
        complete |= {str(infos[name].group_id) for name in settled or () if infos[name].group_id is not None}
        wanted = _groups(place, infos, held_out, counts["executions"], settled, trained)
        facts = _facts(run, config, own, vocab, [name for names in wanted.values() for name in names])
        num_rows = _num_rows(run, infos)
        seen = {
            key: (names, evaluators, [settled and settled[name] for name in names], [num_rows[name] for name in names])
            for key, names in wanted.items()
        }
        kept = {key: one for key, names in wanted.items() if (one := before.get(key)) and one.seen == seen[key]}
        fresh = {key: names for key, names in wanted.items() if key not in kept}
        for part in _parts(fresh, num_rows):
            found = admit(
                run, j_max=config.data.j_max, count=config.data.count, evaluators=evaluators, scale=config.data.scale,
                need_score=need_score, drop_zero_variance=config.data.drop_zero_variance,
                only=[name for key in part for name in fresh[key]],
            )  # fmt: skip
            kept |= _split(found, part, fresh, seen, facts, settled)
        by_group |= {key: _on(facts, kept[key], trained if run in live else ()) for key in wanted}
    for one in by_group.values():
        for level, total in counts.items():
            total.update(one.counts[level])
    return Admitted(
        executions=tuple(e for one in by_group.values() for e in one.executions), counts=counts,
        groups=tuple(group for one in by_group.values() for group in one.groups), by_group=by_group,
        complete=frozenset(complete), runs=tuple(runs),
    )  # fmt: skip


def _facts(run: Run, config: TrainingConfig, own: Lineage | None, vocab: int, names: Collection[str]) -> Facts:
    teacher = teacher_logprobs(run, config.loss.teacher_name) if config.loss.teacher else None
    routes = recorded_routes(run, config.model.path) if config.model.router_replay == "R3" else None
    policy = config.loss.kind != "sft"
    forest = Forest(run, only=names)
    return Facts(run=run, forest=forest, policy=policy, vocab=vocab, own=own, teacher=teacher, routes=routes)


def _on(facts: Facts, group: AdmittedGroup, trained: Container[str]) -> AdmittedGroup:
    """The group in this snapshot of the run; nothing of an earlier one stays in memory, nor once all is trained."""
    is_left = not all(one.execution_id in trained for one in group.executions)
    return replace(
        group,
        executions=tuple(replace(one, facts=facts) for one in group.executions if is_left),
        groups=tuple(replace(one, run=facts.run) for one in group.groups),
    )


def _no_counts() -> dict[str, Counter[str]]:
    return {level: Counter() for level in ("executions", "calls", "trajectories")}


def _groups(
    place: int,
    infos: Mapping[str, ExecutionInfo],
    held_out: Callable[[str], bool],
    counts: Counter[str],
    settled: Mapping[str, datetime] | None,
    trained: Container[str],
) -> dict[GroupKey, tuple[str, ...]]:
    """Executions to train on by group; one without a group is one."""
    groups: dict[GroupKey, list[str]] = {}
    tasks: dict[GroupKey, str] = {}
    for info in infos.values():
        key = (place, info.group_id, "") if info.group_id is not None else (place, "", info.execution_id)
        groups.setdefault(key, []).append(info.execution_id)
        if info.task_id is not None:
            tasks.setdefault(key, info.task_id)
    found: dict[GroupKey, tuple[str, ...]] = {}
    for key, members in groups.items():
        if held_out(tasks.get(key) or key[1] or key[2]):
            counts["eval_split"] += len(members)
        elif settled is not None and not settled.keys() >= set(members):
            counts["pending"] += len(members)
        elif settled is not None and all(name in trained for name in members):
            counts["trained"] += len(members)
        else:
            found[key] = tuple(members)
    return found


def _num_rows(run: Run, infos: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Rows of each execution in the tables that admission reads, nodes first."""
    found: dict[str, list[int]] = {name: [0] * len(_READ) for name in infos}
    for place, table in enumerate(_READ):
        counted = pc.value_counts(run.table(table).column("execution_id"))
        for name, num in zip(*(counted.field(i).to_pylist() for i in (0, 1)), strict=True):
            if name in found:
                found[name][place] = num
    return {name: tuple(nums) for name, nums in found.items()}


def _parts(
    groups: Mapping[GroupKey, tuple[str, ...]], num_rows: Mapping[str, tuple[int, ...]]
) -> Iterator[list[GroupKey]]:
    """Whole groups, about `_PART_NODES` nodes at a time."""
    part: list[GroupKey] = []
    size = 0
    for key, names in groups.items():
        part.append(key)
        size += sum(num_rows[name][0] for name in names)
        if size >= _PART_NODES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _split(
    found: Admission,
    part: Sequence[GroupKey],
    names: Mapping[GroupKey, tuple[str, ...]],
    seen: Mapping[GroupKey, tuple[object, ...]],
    facts: Facts,
    settled: Mapping[str, datetime] | None,
) -> dict[GroupKey, AdmittedGroup]:
    """An admission of several groups, group by group."""
    of = {name: key for key in part for name in names[key]}
    executions: dict[GroupKey, list[RecordedExecution]] = {key: [] for key in part}
    counts = {key: _no_counts() for key in part}
    groups: dict[GroupKey, list[Group]] = {key: [] for key in part}
    for execution in found.executions:
        executions[of[execution.execution_id]].append(_recorded(execution, facts, settled))
    for exclusion in found.excluded:
        level = LEVELS[REASONS[exclusion.reason].level]
        counts[of[exclusion.execution_id]][level][exclusion.reason.value] += 1
    for group in found.groups:
        groups[part[0][0], group.group_id, ""].append(group)
    return {
        key: AdmittedGroup(
            seen=seen[key], executions=tuple(executions[key]), counts=counts[key], groups=tuple(groups[key])
        )
        for key in part
    }


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
