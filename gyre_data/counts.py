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
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .eligible import candidates, eligibility
from .links import SUMMARIES
from .ownership import keep
from .schema import Author, BranchReason, CallStatus, DeliveryState, NodeKind
from .tree import Forest, Tables, Tree

__all__ = ["TreeCounts", "count_run", "count_tree"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeCounts:
    """Counts of one tree; those of several trees add up."""

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
    def false_fork_rate(self) -> float | None:
        """False forks per turn; None without turns."""
        return self.false_forks / self.turns if self.turns else None

    @property
    def sharing_nodes(self) -> float | None:
        """Occurrences per distinct message node; None without candidates."""
        return self.occurrences / self.trajectory_message_nodes if self.trajectory_message_nodes else None

    @property
    def sharing(self) -> float | None:
        """Expanded tokens per distinct token; None without candidates."""
        return self.expanded_tokens / self.trajectory_tokens if self.trajectory_tokens else None

    def to_json(self) -> dict[str, Any]:
        """Plain values, the derived ones too."""
        names = (*(f.name for f in fields(self)), "repeats", "false_fork_rate", "sharing_nodes", "sharing")
        names = tuple(name for name in names if name != "trajectory_lengths")  # its distribution is told instead
        values = {name: getattr(self, name) for name in names}
        return {name: dict(sorted(v.items())) if isinstance(v, Counter) else v for name, v in values.items()}

    def __add__(self, other: TreeCounts) -> TreeCounts:
        return TreeCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def count_tree(tree: Tree, *, j_max: int | None = 5) -> TreeCounts:
    """Count one execution's tree."""
    judged = eligibility(tree)
    paths = [candidate.path for candidate in candidates(tree, judged)]
    kept, _ = keep(tree, judged, j_max=j_max)
    message_N = ((tree.kind_N == NodeKind.PROMPT) & (tree.author_N != Author.TEMPLATE)) | (
        tree.kind_N == NodeKind.OUTPUT
    )
    times_N = np.zeros(len(tree), np.int64)
    for path in paths:
        times_N[path] += 1
    tokens_N = tree.num_tokens_N
    false = [call for call in tree.calls if call.fork_check is not None]
    states = [tree.delivery.get(call.call_id) for call in tree.calls]
    return TreeCounts(
        calls=len(tree.calls),
        calls_failed=sum(call.status == CallStatus.FAILED for call in tree.calls),
        calls_aborted=sum(call.status == CallStatus.ABORTED for call in tree.calls),
        calls_undelivered=sum(s in (DeliveryState.UNDELIVERED, DeliveryState.ABANDONED) for s in states),
        calls_delivery_unknown=sum(
            s is None and c.status == CallStatus.OK for s, c in zip(states, tree.calls, strict=True)
        ),
        turns=sum(call.prompt_node is not None for call in tree.calls),
        nodes=len(tree),
        message_nodes=int(message_N.sum()),
        trajectories=len(paths),
        trajectories_kept=len(kept),
        trajectory_message_nodes=int((message_N & (times_N > 0)).sum()),
        occurrences=int(times_N[message_N].sum()),
        distinct_tokens=tree.num_tokens,
        counted_tokens=int(tokens_N[tree.counted_N].sum()),
        prompt_tokens=sum(call.prompt_tokens or 0 for call in tree.calls),
        trajectory_tokens=int(tokens_N[times_N > 0].sum()),
        expanded_tokens=int((tokens_N * times_N).sum()),
        sampled_tokens=int(tokens_N[(tree.author_N == Author.POLICY) | (tree.author_N == Author.PROVIDER)].sum()),
        trainable_tokens=int(tokens_N[judged.trainable_N].sum()),
        kept_tokens=sum(t.num_owned for t in kept),
        false_forks=len(false),
        false_fork_tokens=sum(call.tokens_lost or 0 for call in false),
        false_fork_checks=Counter((call.fork_check or "").partition(":")[0] for call in false),
        changed_echoes=Counter(call.echo_difference for call in tree.calls if call.echo_difference is not None),
        forks=_forks(tree),
        role_tokens=_role_tokens(tree),
        author_tokens=_author_tokens(tree),
        role_calls=Counter(str(call.agent_role) for call in tree.calls),
        version_tokens=_version_tokens(tree),
        not_trained=Counter(str(reason) for reason, _ in judged.reasons.values()),
        trajectory_lengths=tuple(int(tokens_N[path].sum()) for path in paths),
    )


def _forks(tree: Tree) -> Counter[str]:
    return Counter(
        "summary"
        if call.branch_reason == BranchReason.COMPACTION and call.agent_role in SUMMARIES
        else str(call.branch_reason)
        for call in tree.calls
        if call.branch_reason is not None and call.fork_check is None
    )


def _role_tokens(tree: Tree) -> Counter[str]:
    role = {call.call_id: str(call.agent_role) for call in tree.calls}
    found: Counter[str] = Counter()
    for call_id, num_tokens in zip(tree.call_of_N, tree.num_tokens_N.tolist(), strict=True):
        found[role.get(call_id, "unknown")] += num_tokens
    return found


def _author_tokens(tree: Tree) -> Counter[str]:
    found: Counter[str] = Counter()
    for author, num_tokens in zip(tree.author_N, tree.num_tokens_N.tolist(), strict=True):
        found[str(author)] += num_tokens
    return found


def _version_tokens(tree: Tree) -> Counter[str]:
    found: Counter[str] = Counter()
    for i in np.flatnonzero(tree.author_N == Author.POLICY).tolist():
        spans = tree.versions(i)
        if spans is None:
            found["unknown"] += int(tree.num_tokens_N[i])
        for span in spans or ():
            found[f"{span.policy_id}:{span.n}"] += span.end - span.start
    return found


def count_run(run: Tables, *, j_max: int | None = 5) -> TreeCounts:
    """Count every tree of a run, added up."""
    forest, total = Forest(run), TreeCounts()
    for execution_id in forest.execution_ids:
        total += count_tree(forest.tree(execution_id), j_max=j_max)
    return total
