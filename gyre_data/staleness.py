"""How old the weights were that sampled what is trained on, by design: staleness d, and unknown where it is unknown.

d = s - v. s is the version just before the optimiser step that consumes an execution, v the version served when the
execution was dispatched (weights refreshed in the middle of it do not change v). A version is the number of optimiser
steps applied, counted along the lineage that the trainer's `steps` tell; a version that is not on it has no d.

- *group-weighted*: d of a group is the mean over its executions, E[d] the mean over groups (one that is consumed in
  several steps counts once per step; an execution without a group is one by itself);
- *token-weighted*: over the tokens sampled on the trajectories that were trained, each once per step, with the version
  that sampled each token in place of v;
- *basis* `consumed`: the trainer's folder says which step consumed what. Without it, `newest_in_run`: s is the newest
  version seen in the run of the policy that sampled last, over all its executions and sampled tokens; a lower bound of
  what a later step will see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .execution import ExecutionInfo, executions
from .ledger import ledger, steps
from .node_rows import NodeRows, flat_lists, node_rows
from .schema import Author, NodeKind
from .tree import Tables
from .types import LedgerRow, PolicyVersion, Step

__all__ = ["Staleness", "staleness"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Staleness:
    """Staleness over runs together; None where nothing has a known d."""

    basis: str
    """consumed | newest_in_run."""
    groups: int
    """Groups (per step) with a known d."""
    group_mean: float | None
    """E[d], every group weighing the same."""
    group_max: float | None
    """The largest d of an execution."""
    executions_unknown: int
    """Executions without a known d: no dispatch version was recorded, or it is not on the lineage."""
    tokens: int
    """Sampled tokens with a known d."""
    token_mean: float | None
    token_max: int | None
    tokens_unknown: int
    newest: str | None
    """The version compared with; None when each step has its own, or runs have different ones."""


@dataclass(kw_only=True, slots=True)
class _Found:
    """d as it is found: per execution with its group and step, and per span of sampled tokens."""

    groups: dict[tuple[object, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    unknown: int = 0
    token_d: list[int] = field(default_factory=list)
    token_weight: list[int] = field(default_factory=list)
    tokens_unknown: int = 0
    newest: set[str] = field(default_factory=set)

    def result(self, basis: str) -> Staleness:
        means = [float(np.mean(members)) for members in self.groups.values()]
        weight = sum(self.token_weight)
        weighted = float(np.dot(self.token_d, self.token_weight)) if weight else 0.0
        return Staleness(
            basis=basis,
            groups=len(means),
            group_mean=float(np.mean(means)) if means else None,
            group_max=max((max(members) for members in self.groups.values()), default=None),
            executions_unknown=self.unknown,
            tokens=weight,
            token_mean=weighted / weight if weight else None,
            token_max=max(self.token_d, default=None),
            tokens_unknown=self.tokens_unknown,
            newest=next(iter(self.newest)) if len(self.newest) == 1 else None,
        )


class _Lineage:
    """Optimiser steps applied at each version on the way to the newest one of a trainer's folder."""

    def __init__(self, made: Sequence[Step]) -> None:
        self._base: dict[str, tuple[int, int, int | None]] = {}
        """Policy id -> (its n, its position, the largest n that is on the lineage)."""
        for step in made:
            if step.policy_id in self._base:
                continue
            if step.parent_policy_id not in self._base:
                self._base[step.parent_policy_id] = (step.parent_n, step.parent_n, step.parent_n)
            parent_n, position, _ = self._base[step.parent_policy_id]
            self._base[step.parent_policy_id] = (parent_n, position, step.parent_n)
            self._base[step.policy_id] = (step.n, position + step.parent_n - parent_n + 1, None)

    def position(self, policy_id: str | None, n: int | None) -> int | None:
        """Steps applied; None for a version that is not on the lineage."""
        if policy_id is None or n is None or policy_id not in self._base:
            return None
        at, position, last = self._base[policy_id]
        return None if last is not None and n > last else position + n - at


def staleness(runs: Sequence[Tables], *, trainer: Tables | None = None) -> Staleness:
    """Staleness of what `trainer` consumed of the runs; without one, against the newest version of each run."""
    found = _Found()
    for number, run in enumerate(runs):
        if trainer is None:
            _against_newest(run, number, found)
        else:
            _consumed(run, trainer, number, found)
    return found.result("newest_in_run" if trainer is None else "consumed")


def _group(info: ExecutionInfo) -> tuple[object, ...]:
    return ("group", info.group_id) if info.group_id is not None else ("execution", info.execution_id)


def _against_newest(run: Tables, number: int, found: _Found) -> None:
    infos = list(executions(run).values())
    nodes = node_rows(run)
    spans = _Spans(nodes, np.arange(len(nodes)))
    found.tokens_unknown += spans.unknown
    policy = spans.newest_policy(nodes)
    known = [e for e in infos if e.dispatch_policy_id == policy and e.dispatch_version is not None]
    if policy is None:
        found.unknown += len(infos)
        return
    mine = spans.policy_S == policy
    newest = int(spans.n_S[mine].max())
    newest = max([newest, *(e.dispatch_version for e in known if e.dispatch_version is not None)])
    found.newest.add(str(PolicyVersion(policy_id=policy, n=newest)))
    found.unknown += len(infos) - len(known)
    for info in known:
        if info.dispatch_version is not None:
            found.groups[(number, *_group(info))].append(newest - info.dispatch_version)
    ages, at = np.unique(newest - spans.n_S[mine], return_inverse=True)
    found.token_d += ages.tolist()
    found.token_weight += np.bincount(at, weights=spans.size_S[mine]).astype(np.int64).tolist()
    found.tokens_unknown += int(spans.size_S[~mine].sum())


def _consumed(run: Tables, trainer: Tables, place: int, found: _Found) -> None:
    made = steps(trainer)
    lineage, before = _Lineage(made), {step.step: step for step in made}
    infos, nodes = executions(run), node_rows(run)
    rows: dict[int, dict[str, list[LedgerRow]]] = defaultdict(lambda: defaultdict(list))
    for row in ledger(trainer):
        if row.execution_id in infos:
            rows[row.step][row.execution_id].append(row)
    for number, consumed in rows.items():
        step = before[number]
        now = lineage.position(step.parent_policy_id, step.parent_n)
        leaves: list[str] = []
        for execution_id, trajectories in consumed.items():
            info = infos[execution_id]
            v = lineage.position(info.dispatch_policy_id, info.dispatch_version)
            if v is None or now is None:
                found.unknown += 1
            else:
                found.groups[(place, number, *_group(info))].append(now - v)
            leaves += [row.leaf_node for row in trajectories]
        spans = _Spans(nodes, _above(nodes, leaves))
        found.tokens_unknown += spans.unknown
        for policy_id, n, size in zip(spans.policy_S.tolist(), spans.n_S.tolist(), spans.size_S.tolist(), strict=True):
            position = lineage.position(policy_id, n)
            if position is None or now is None:
                found.tokens_unknown += size
            else:
                found.token_d.append(now - position)
                found.token_weight.append(size)


def _above(nodes: NodeRows, leaves: Iterable[str]) -> npt.NDArray[np.int64]:
    """Every node on the paths to these, once."""
    at = nodes.place(pa.chunked_array([list(leaves)], pa.string()))
    seen: set[int] = set()
    for node in at[at >= 0].tolist():
        while node >= 0 and node not in seen:
            seen.add(node)
            node = int(nodes.parent_N[node])
    return np.array(sorted(seen), np.int64)


class _Spans:
    """Version spans of the sampled outputs among some nodes: policy, number and tokens of each; S spans."""

    def __init__(self, nodes: NodeRows, among: npt.NDArray[np.int64]) -> None:
        kind, author = nodes.column("kind").to_numpy(), nodes.column("author").to_numpy()
        sampled = among[(kind[among] == NodeKind.OUTPUT) & (author[among] == Author.POLICY)]
        told = nodes.column("policy_versions").take(pa.array(sampled))
        known = told.is_valid().to_numpy()
        self.unknown = int(nodes.num_tokens_N[sampled[~known]].sum())
        row_S, spans = flat_lists(told)
        part = {name: pc.struct_field(spans, name).to_numpy() for name in ("policy_id", "n", "start", "end")}
        self.policy_S, self.n_S = part["policy_id"].astype(object), part["n"].astype(np.int64)
        self.size_S = (part["end"] - part["start"]).astype(np.int64)
        self._node_S = sampled[row_S]

    def newest_policy(self, nodes: NodeRows) -> str | None:
        """The policy that sampled in the call which started last."""
        if not len(self.policy_S):
            return None
        started_C = pc.cast(nodes.calls.column("started_at"), pa.int64()).to_numpy()
        return str(self.policy_S[int(np.argmax(started_C[nodes.call_N[self._node_S]]))])
