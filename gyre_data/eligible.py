"""Which outputs of a tree may be trained, and why the others may not.

Two questions are kept apart. An output is *eligible* when the harness had it and its role is trained: eligible outputs
shape the candidate trajectories. It is *trainable* when, besides, its tokens can enter the loss: their behaviour
log-probs are there and they were sampled from the plain policy.

Every rule is one step over arrays of all calls; words for people are made when they are asked for.
Legend: N nodes of the tree, C calls of the execution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from .columns import Codes, Rows, code_of, members
from .depth_first import path_sums, subtree_sums
from .reasons import Reason
from .schema import AgentRole, Author, BranchReason, CallStatus, DeliveryState, NodeKind
from .tree import Tree
from .types import Call, Ints

__all__ = ["ROLE_ORDER", "Candidate", "Eligibility", "Reason", "candidate_leaves", "candidates", "eligibility"]

ROLE_ORDER: tuple[AgentRole, ...] = (
    AgentRole.MAIN,
    AgentRole.MAIN_SUMMARY,
    AgentRole.SUB_AGENT,
    AgentRole.SUB_AGENT_SUMMARY,
)


Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eligibility:
    """Per call why its output is not eligible or not trainable; per node whether it is."""

    tree: Tree
    eligible_N: Bools
    trainable_N: Bools
    reason_C: Codes
    """Place in `Reason` of why a call's output is not trained; -1 for one that is."""
    call_of_N: Rows
    """Place in `tree.calls` of the call that stands for an eligible output, the first of several; -1 elsewhere."""
    _held: dict[str, Any] = field(init=False, default_factory=dict, repr=False, compare=False)

    @property
    def reasons(self) -> dict[str, tuple[Reason, str]]:
        """Call id -> why its output is not trained, with detail; a call that is not here is trainable."""
        if "reasons" not in self._held:
            numbers = np.flatnonzero(self.reason_C >= 0)
            calls = zip(self.tree.calls.at(numbers), numbers.tolist(), strict=True)
            self._held["reasons"] = {call.call_id: self._told(call, n) for call, n in calls}
        found: dict[str, tuple[Reason, str]] = self._held["reasons"]
        return found

    @property
    def call_of(self) -> dict[int, Call]:
        """Eligible output -> the call that stands for it (the first one when several share it)."""
        if "call_of" not in self._held:
            calls, number_N = self.tree.calls, self.call_of_N.tolist()
            self._held["call_of"] = {i: calls[number_N[i]] for i in np.flatnonzero(self.call_of_N >= 0).tolist()}
        found: dict[int, Call] = self._held["call_of"]
        return found

    def count_reasons(self) -> dict[str, int]:
        """Calls by the reason why their output is not trained, in the order of their first call."""
        codes_C = self.reason_C[self.reason_C >= 0]
        named, first, number = np.unique(codes_C, return_index=True, return_counts=True)
        order = np.argsort(first)
        pairs = zip(named[order].tolist(), number[order].tolist(), strict=True)
        return {str(members(Reason)[code]): count for code, count in pairs}

    def _told(self, call: Call, number: int) -> tuple[Reason, str]:
        reason = Reason(members(Reason)[int(self.reason_C[number])])
        return reason, _detail(self.tree, call, number, reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The path to an eligible output that has no eligible output below it."""

    tree: Tree
    leaf: int
    number: int
    """Place in `tree.calls` of the call that stands for the leaf."""

    @property
    def call(self) -> Call:
        """The call that stands for the leaf."""
        return self.tree.calls[self.number]

    @property
    def path(self) -> Ints:
        """Indices root..leaf."""
        return self.tree.path(self.leaf)

    @property
    def role(self) -> AgentRole:
        """Role of its leaf call."""
        return AgentRole(members(AgentRole)[int(self.tree.facts.codes("agent_role", AgentRole)[self.number])])


def eligibility(
    tree: Tree, *, need_logprobs: bool = True, need_ids: bool = True, allow: frozenset[Reason] = frozenset()
) -> Eligibility:
    """Judge every call of the tree.

    `need_logprobs=False` is for objectives that use no behaviour policy (SFT): log-probs and sampling settings are not
    asked for. `need_ids=False`, which asks for no log-probs either, is for text that another model will tokenise.
    `allow` names sampling reasons (greedy, top_p, top_k, constrained) that the user takes in knowingly.
    """
    reason_C = np.full(len(tree.calls), -1, np.int8)
    leaf_C = tree.output_C
    _settle(reason_C, _not_eligible(tree))
    eligible = np.flatnonzero(reason_C < 0)
    eligible_N, trainable_N = np.zeros(len(tree), np.bool_), np.zeros(len(tree), np.bool_)
    eligible_N[leaf_C[eligible]] = True
    call_of_N = np.full(len(tree), -1, np.int64)
    call_of_N[leaf_C[eligible[::-1]]] = eligible[::-1]  # of equal places the last one stays: the first call
    if need_ids:
        _settle(reason_C, _without_ids(tree))
    if need_ids and need_logprobs:
        _settle(reason_C, _not_trainable(tree, reason_C, allow))
    trainable_N[leaf_C[reason_C < 0]] = True
    return Eligibility(
        tree=tree, eligible_N=eligible_N, trainable_N=trainable_N, reason_C=reason_C, call_of_N=call_of_N
    )


def candidates(tree: Tree, judged: Eligibility) -> list[Candidate]:
    """Paths to the eligible outputs that have no eligible output below them, in depth-first order."""
    number_N = judged.call_of_N
    return [Candidate(tree=tree, leaf=i, number=int(number_N[i])) for i in candidate_leaves(judged).tolist()]


def candidate_leaves(judged: Eligibility) -> Rows:
    """The last nodes of the candidates, in depth-first order."""
    eligible_N = judged.eligible_N
    return np.flatnonzero(eligible_N & (subtree_sums(eligible_N.astype(np.int64), judged.tree.end_N) == 1))


def _settle(reason_C: Codes, found: Sequence[tuple[Reason, Bools]]) -> None:
    """Set the first reason that is found for each call that has none yet."""
    for reason, hit_C in found:
        reason_C[hit_C & (reason_C < 0)] = code_of(reason)


def _is(codes: Codes, *wanted: StrEnum) -> Bools:
    hit = np.zeros(len(codes), np.bool_)
    for one in wanted:  # a tenth of what np.isin takes on the few calls of one execution
        hit |= codes == code_of(one)
    return hit


def _of_leaf(tree: Tree, values_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A value of each call's output; of calls without one it means nothing."""
    return values_N[tree.output_C] if len(tree) else np.zeros(len(tree.calls), values_N.dtype)


def _not_eligible(tree: Tree) -> list[tuple[Reason, Bools]]:
    status_C, role_C = tree.facts.codes("status", CallStatus), tree.facts.codes("agent_role", AgentRole)
    sampled_N = _is(tree.kind_code_N, NodeKind.OUTPUT) & _is(tree.author_code_N, Author.POLICY, Author.PROVIDER)
    sampled_N &= tree.num_tokens_N > 0
    had_C = _is(tree.delivery_C, DeliveryState.DELIVERED) | _of_leaf(tree, _continued(tree))
    lost_C = _is(tree.delivery_C, DeliveryState.UNDELIVERED, DeliveryState.ABANDONED)
    return [
        (Reason.CALL_FAILED, _is(status_C, CallStatus.FAILED)),
        (Reason.CALL_ABORTED, ~_is(status_C, CallStatus.OK)),
        (Reason.NO_OUTPUT, (tree.output_C < 0) | ~_of_leaf(tree, sampled_N)),
        (Reason.ROLE_SIDE, _is(role_C, AgentRole.SIDE)),
        (Reason.ROLE_UNKNOWN, ~_is(role_C, *ROLE_ORDER)),
        (Reason.UNDELIVERED, ~had_C & lost_C),
        (Reason.DELIVERY_UNKNOWN, ~had_C),
    ]


def _continued(tree: Tree) -> Bools:
    """Outputs that the harness is known to have received, since something recorded later rests on them."""
    facts = tree.facts
    used = [tree.copied_N, tree.prompt_C, tree.spawned_by_C]
    # A summary lives on as the text of a new conversation, so no path leads through its output.
    compactions = np.flatnonzero(_is(facts.codes("branch_reason", BranchReason), BranchReason.COMPACTION))
    if len(compactions):
        sources = facts.places("continues_from")[compactions]
        used.append(tree.output_C[sources[sources >= 0]])
    taken_N = np.zeros(len(tree), np.int64)
    for places in used:
        taken_N[places[places >= 0]] = 1
    return subtree_sums(taken_N, tree.end_N) > 0


def _without_ids(tree: Tree) -> list[tuple[Reason, Bools]]:
    """No objective takes what has no token ids; the text of it can be exported and tokenised for another model."""
    provider_C = _of_leaf(tree, _is(tree.author_code_N, Author.PROVIDER))
    gap_N = path_sums(tree.counted_N.astype(np.int64), tree.end_N) > 0  # there or above, token ids are not known
    return [
        # Observe mode always knows where it was sent; an import does not.
        (Reason.TEXT_ONLY, provider_C & ~tree.facts.given("upstream")),
        (Reason.HOSTED, provider_C),
        (Reason.REDACTED, _of_leaf(tree, gap_N)),
    ]


def _not_trainable(tree: Tree, reason_C: Codes, allow: frozenset[Reason]) -> list[tuple[Reason, Bools]]:
    facts, has_C = tree.facts, _of_leaf(tree, tree.has_logprobs_N)
    left = np.flatnonzero((reason_C < 0) & has_C)
    odd_C = np.zeros(len(reason_C), np.bool_)
    odd_C[left] = ~tree.finite_logprobs(tree.output_C[left])
    temperature_C = facts.floats("temperature")
    sampling = [
        (Reason.GREEDY, temperature_C == 0.0),
        (Reason.TOP_P, facts.floats("top_p") < 1.0),
        (Reason.TOP_K, facts.ints("top_k") > 0),
        (Reason.CONSTRAINED, facts.true("constrained")),
    ]
    return [
        (Reason.NO_LOGPROBS, ~has_C),
        (Reason.LOGPROB_NOT_FINITE, odd_C),
        (Reason.TEMPERATURE_UNKNOWN, ~((temperature_C >= 0.0) & np.isfinite(temperature_C))),
        *((reason, hit_C) for reason, hit_C in sampling if reason not in allow),
    ]


def _detail(tree: Tree, call: Call, number: int, reason: Reason) -> str:
    """The reason in words, with what was recorded."""
    match reason:
        case Reason.CALL_FAILED:
            return call.error or "the call failed"
        case Reason.CALL_ABORTED:
            return call.error or f"status {call.status}"
        case Reason.NO_OUTPUT:
            leaf = int(tree.output_C[number])
            empty = leaf >= 0 and tree.kind_N[leaf] == NodeKind.OUTPUT and tree.num_tokens_N[leaf] == 0
            return "no token was sampled" if empty and tree.author_N[leaf] in _SAMPLED else "nothing was sampled"
        case Reason.ROLE_UNKNOWN:
            return f"role {call.agent_role}, known by {call.role_source}"
        case Reason.UNDELIVERED:
            return f"{tree.delivery[call.call_id]}, and no later call goes on from it"
        case Reason.LOGPROB_NOT_FINITE:
            recorded = tree.logprobs(int(tree.output_C[number]))
            assert recorded is not None
            return f"token {int((~np.isfinite(recorded)).argmax())} has no finite log-prob"
        case Reason.TEMPERATURE_UNKNOWN:
            return f"the temperature used was recorded as {call.temperature}"
        case Reason.TOP_P:
            return f"top_p {call.top_p}"
        case Reason.TOP_K:
            return f"top_k {call.top_k}"
    return _SAID[reason]


_SAMPLED = (Author.POLICY, Author.PROVIDER)
_SAID = {
    Reason.ROLE_SIDE: "a side call of the harness (title, classifier)",
    Reason.DELIVERY_UNKNOWN: "no delivery row, and no later call goes on from it",
    Reason.TEXT_ONLY: "imported as text: its token ids are not known; export it as chat for SFT",
    Reason.HOSTED: "a hosted API sampled it: its token ids are not known; only its text can be used",
    Reason.REDACTED: "a secret was taken out of its text or of its context, and the token ids with it",
    Reason.NO_LOGPROBS: "no behaviour log-probs were recorded; only SFT can use it",
    Reason.GREEDY: "temperature 0",
    Reason.CONSTRAINED: "a grammar or schema limited sampling",
}
