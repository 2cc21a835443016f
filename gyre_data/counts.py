"""Counts over trees: how much is recorded, shared, lost and trainable.

Definitions, so that two people count the same:
- a *message node* renders a message or is a sampled output; generation prompts and template nodes are left out;
- *occurrences* are the message nodes summed over the candidate trajectories, as if each were expanded by itself;
  sharing = occurrences / distinct message nodes on those trajectories, and the same in tokens of all nodes;
- a *false fork* is a call whose request goes on from a recorded turn by every rule, and whose prompt was rendered anew
  all the same, because a technical check failed (`fork_check` is set; its code says which). Its rate is per turn, a
  call with a rendered prompt. Rewinds, rewrites, compactions and sub-agents are real forks: the history did change;
- a *changed echo* is a real fork at a turn that the client names as ours and sends with another value
  (`echo_difference`): the harness edited it, or it is a rewrite of form that nobody has told us of yet;
- *trainable* tokens are those an RL loss may take before J_max; *kept* tokens are those it takes with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import Codes, Rows, code_of, members
from .depth_first import subtree_sums
from .eligible import candidate_leaves, eligibility
from .errors import DataError
from .links import SUMMARIES
from .ownership import kept_trajectories
from .schema import AgentRole, Author, BranchReason, CallStatus, DeliveryState, NodeKind
from .tree import Forest, Tables, Tree

__all__ = ["Fault", "TreeCounts", "added_up", "count_in", "count_run", "count_tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """An execution whose rows contradict one another, and how; `gyre verify` names the rows."""

    execution_id: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeCounts:
    """Counts of one tree; those of several trees add up."""

    faults: tuple[Fault, ...] = ()
    """Executions whose rows contradict one another: they are in no other count."""
    calls: int = 0
    calls_failed: int = 0
    calls_aborted: int = 0
    calls_undelivered: int = 0
    calls_delivery_unknown: int = 0
    turns: int = 0
    """Calls whose prompt was rendered."""
    nodes: int = 0
    message_nodes: int = 0
    trajectories: int = 0
    """Candidates: paths to an eligible output without an eligible output below."""
    trajectories_kept: int = 0
    trajectory_message_nodes: int = 0
    """Distinct message nodes on the candidates."""
    occurrences: int = 0
    trajectory_nodes: int = 0
    """Distinct nodes of every kind on the candidates."""
    node_occurrences: int = 0
    """The same, each candidate expanded."""
    distinct_tokens: int = 0
    counted_tokens: int = 0
    """Of these, counted locally because their ids are not known (observe mode)."""
    prompt_tokens: int = 0
    """Tokens sent to engines, summed over calls."""
    trajectory_tokens: int = 0
    """Distinct tokens on the candidates."""
    expanded_tokens: int = 0
    sampled_tokens: int = 0
    """Of the policy, or of a hosted model (counted locally then)."""
    trainable_tokens: int = 0
    kept_tokens: int = 0
    false_forks: int = 0
    false_fork_tokens: int = 0
    """Recorded tokens that false forks did not reuse."""
    false_fork_checks: Counter[str] = field(default_factory=Counter)
    """False forks by the code of the check that failed."""
    changed_echoes: Counter[str] = field(default_factory=Counter)
    """Forks at a turn of ours that came back with another value, by what of it differs."""
    forks: Counter[str] = field(default_factory=Counter)
    """Calls by branch reason, false forks left out; a summary call in a prompt of its own counts as `summary`."""
    role_tokens: Counter[str] = field(default_factory=Counter)
    """Distinct tokens by the role of the call that added them."""
    author_tokens: Counter[str] = field(default_factory=Counter)
    """Distinct tokens by who wrote them."""
    role_calls: Counter[str] = field(default_factory=Counter)
    version_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens by policy version; `unknown` where none was recorded."""
    not_trained: Counter[str] = field(default_factory=Counter)
    """Calls whose output is not trained, by reason."""
    trajectory_lengths: tuple[int, ...] = ()
    """Tokens of each candidate, root to leaf."""

    @property
    def repeats(self) -> int:
        """Message nodes that expansion would hold more than once, in excess."""
        return self.occurrences - self.trajectory_message_nodes

    @property
    def inconsistent(self) -> int:
        """Executions whose rows contradict one another."""
        return len(self.faults)

    @property
    def false_fork_rate(self) -> float | None:
        """False forks per turn; None without turns."""
        return self.false_forks / self.turns if self.turns else None

    @property
    def sharing_messages(self) -> float | None:
        """Occurrences per distinct message node; None without candidates."""
        return self.occurrences / self.trajectory_message_nodes if self.trajectory_message_nodes else None

    @property
    def sharing_nodes(self) -> float | None:
        """The same over nodes of every kind."""
        return self.node_occurrences / self.trajectory_nodes if self.trajectory_nodes else None

    @property
    def sharing(self) -> float | None:
        """Expanded tokens per distinct token; None without candidates."""
        return self.expanded_tokens / self.trajectory_tokens if self.trajectory_tokens else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived ones too."""
        names = (
            "inconsistent",
            *(f.name for f in fields(self)),
            "repeats",
            "false_fork_rate",
            "sharing_messages",
            "sharing_nodes",
            "sharing",
        )
        names = tuple(name for name in names if name != "trajectory_lengths")  # its distribution is told instead
        values = {name: getattr(self, name) for name in names}
        values["faults"] = [asdict(fault) for fault in self.faults]
        return {name: dict(sorted(v.items())) if isinstance(v, Counter) else v for name, v in values.items()}

    def __add__(self, other: TreeCounts) -> TreeCounts:
        return TreeCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def count_tree(tree: Tree, *, j_max: int | None = 5) -> TreeCounts:
    """Count one execution's tree."""
    judged, facts = eligibility(tree), tree.facts
    leaves = candidate_leaves(judged)
    kept = kept_trajectories(tree, judged, j_max=j_max)
    prompt_N, output_N = (tree.kind_code_N == code_of(kind) for kind in (NodeKind.PROMPT, NodeKind.OUTPUT))
    policy_N, provider_N, template_N = (
        tree.author_code_N == code_of(author) for author in (Author.POLICY, Author.PROVIDER, Author.TEMPLATE)
    )
    message_N = (prompt_N & ~template_N) | output_N
    times_N = subtree_sums(np.bincount(leaves, minlength=len(tree)), tree.end_N)
    tokens_N, length_N = tree.num_tokens_N, tree.start_pos_N + tree.num_tokens_N
    status_C = facts.codes("status", CallStatus)
    lost_C = np.isin(tree.delivery_C, [code_of(DeliveryState.UNDELIVERED), code_of(DeliveryState.ABANDONED)])
    false_C = facts.given("fork_check")
    return TreeCounts(
        calls=len(facts),
        calls_failed=int((status_C == code_of(CallStatus.FAILED)).sum()),
        calls_aborted=int((status_C == code_of(CallStatus.ABORTED)).sum()),
        calls_undelivered=int(lost_C.sum()),
        calls_delivery_unknown=int(((tree.delivery_C < 0) & (status_C == code_of(CallStatus.OK))).sum()),
        turns=int((tree.prompt_C >= 0).sum()),
        nodes=len(tree),
        message_nodes=int(message_N.sum()),
        trajectories=len(leaves),
        trajectories_kept=len(kept),
        trajectory_message_nodes=int((message_N & (times_N > 0)).sum()),
        occurrences=int(times_N[message_N].sum()),
        trajectory_nodes=int((times_N > 0).sum()),
        node_occurrences=int(times_N.sum()),
        distinct_tokens=tree.num_tokens,
        counted_tokens=int(tokens_N[tree.counted_N].sum()),
        prompt_tokens=int(facts.ints("prompt_tokens").sum()),
        trajectory_tokens=int(tokens_N[times_N > 0].sum()),
        expanded_tokens=int((tokens_N * times_N).sum()),
        sampled_tokens=int(tokens_N[policy_N | provider_N].sum()),
        trainable_tokens=int(tokens_N[judged.trainable_N].sum()),
        kept_tokens=sum(t.num_owned for t in kept),
        false_forks=int(false_C.sum()),
        false_fork_tokens=int(facts.ints("tokens_lost")[false_C].sum()),
        false_fork_checks=Counter(check.partition(":")[0] for check in facts.told("fork_check")),
        changed_echoes=Counter(facts.told("echo_difference")),
        forks=_forks(tree),
        role_tokens=_role_tokens(tree),
        author_tokens=_tally(members(Author), tree.author_code_N, tokens_N),
        role_calls=_tally(members(AgentRole), facts.codes("agent_role", AgentRole)),
        version_tokens=_version_tokens(tree, np.flatnonzero(policy_N)),
        not_trained=Counter(judged.count_reasons()),
        trajectory_lengths=tuple(length_N[leaves].tolist()),
    )


def _tally(names: Iterable[str], codes: Codes, weights: Rows | None = None) -> Counter[str]:
    """How often each code's name occurs, or the sum of its weights; in the order of their first place."""
    sums = np.bincount(codes, weights=weights).astype(np.int64)
    first, found = np.sort(np.unique(codes, return_index=True)[1]), tuple(names)
    return Counter({str(found[code]): int(sums[code]) for code in codes[first].tolist()})


def _forks(tree: Tree) -> Counter[str]:
    reason_C, role_C = tree.facts.codes("branch_reason", BranchReason), tree.facts.codes("agent_role", AgentRole)
    summed_C = (reason_C == code_of(BranchReason.COMPACTION)) & np.isin(role_C, [code_of(role) for role in SUMMARIES])
    real_C = (reason_C >= 0) & ~tree.facts.given("fork_check")
    names = (*members(BranchReason), "summary")
    return _tally(names, np.where(summed_C, len(names) - 1, reason_C)[real_C])


def _role_tokens(tree: Tree) -> Counter[str]:
    """By the role of the call that added them; a node of a call that was never committed is of an unknown one."""
    role_C1 = np.append(tree.facts.codes("agent_role", AgentRole), np.int8(code_of(AgentRole.UNKNOWN)))
    return _tally(members(AgentRole), role_C1[tree.call_N], tree.num_tokens_N)


def _version_tokens(tree: Tree, sampled: Rows) -> Counter[str]:
    spans = tree.version_spans(sampled)
    found: Counter[str] = Counter()
    unknown = np.asarray(pc.is_null(spans).to_numpy(), np.bool_)
    if unknown.any():
        found["unknown"] = int(tree.num_tokens_N[sampled[unknown]].sum())
    flat = pc.list_flatten(spans)
    if not len(flat):
        return found
    policy, number, start, end = (pc.struct_field(flat, name) for name in ("policy_id", "n", "start", "end"))
    rows = pa.table({"policy": policy, "n": number, "tokens": pc.subtract(end, start)})
    for row in rows.group_by(["policy", "n"], use_threads=False).aggregate([("tokens", "sum")]).to_pylist():
        found[f"{row['policy']}:{row['n']}"] += row["tokens_sum"]
    return found


def count_run(run: Tables, *, j_max: int | None = 5) -> TreeCounts:
    """Count every tree of a run, added up."""
    forest = Forest(run)
    return added_up(count_in(forest, execution_id, j_max=j_max) for execution_id in forest.execution_ids)


def count_in(forest: Forest, execution_id: str, *, j_max: int | None = 5) -> TreeCounts:
    """Count one execution of a run; one that contradicts itself says nothing about the others."""
    try:
        tree = forest.tree(execution_id)
    except DataError as error:
        return TreeCounts(faults=(Fault(execution_id=execution_id, detail=str(error)),))
    return count_tree(tree, j_max=j_max)


def added_up(parts: Iterable[TreeCounts]) -> TreeCounts:
    """The sum of many counts, in time linear in their number."""
    parts, sums = list(parts), dict[str, Any]()
    for name in (f.name for f in fields(TreeCounts)):
        values = [getattr(part, name) for part in parts]
        match getattr(TreeCounts(), name):
            case int():
                sums[name] = sum(values)
            case tuple():
                sums[name] = tuple(chain.from_iterable(values))
            case Counter():
                sums[name] = Counter[str]()
                for value in values:
                    sums[name].update(value)
    return TreeCounts(**sums)
