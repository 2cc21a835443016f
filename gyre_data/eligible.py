"""Which outputs of a tree may be trained, and why the others may not.

Two questions are kept apart. An output is *eligible* when the harness had it and its role is trained: eligible outputs
shape the candidate trajectories. It is *trainable* when, besides, its tokens can enter the loss: their behaviour
log-probs are there and they were sampled from the plain policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .reasons import Reason
from .schema import AgentRole, Author, BranchReason, CallStatus, DeliveryState, NodeKind
from .tree import Tree
from .types import Call, Ints

__all__ = ["ROLE_ORDER", "Candidate", "Eligibility", "Reason", "candidates", "eligibility"]

ROLE_ORDER: tuple[AgentRole, ...] = (
    AgentRole.MAIN,
    AgentRole.MAIN_SUMMARY,
    AgentRole.SUB_AGENT,
    AgentRole.SUB_AGENT_SUMMARY,
)


_SAMPLED = (Author.POLICY, Author.PROVIDER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eligibility:
    """Per call why its output is not eligible or not trainable; per node whether it is."""

    eligible_N: npt.NDArray[np.bool_]
    trainable_N: npt.NDArray[np.bool_]
    reasons: dict[str, tuple[Reason, str]]
    """Call id -> why its output is not trained, with detail; a call that is not here is trainable."""
    call_of: dict[int, Call]
    """Eligible output -> the call that stands for it (the first one when several share it)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The path to an eligible output that has no eligible output below it."""

    leaf: int
    path: Ints
    call: Call

    @property
    def role(self) -> AgentRole:
        """Role of its leaf call."""
        return self.call.agent_role


def eligibility(tree: Tree, *, need_logprobs: bool = True, allow: frozenset[Reason] = frozenset()) -> Eligibility:
    """Judge every call of the tree.

    `need_logprobs=False` is for objectives that use no behaviour policy (SFT): log-probs and sampling settings are not
    asked for. `allow` names sampling reasons (greedy, top_p, top_k, constrained) that the user takes in knowingly.
    """
    taken, incomplete_N = _continued(tree), _incomplete(tree)
    eligible_N, trainable_N = np.zeros(len(tree), np.bool_), np.zeros(len(tree), np.bool_)
    reasons: dict[str, tuple[Reason, str]] = {}
    call_of: dict[int, Call] = {}
    for call in tree.calls:
        leaf = tree.output(call)
        why = _not_eligible(tree, call, leaf, taken)
        if why is None and leaf is not None:
            eligible_N[leaf] = True
            call_of.setdefault(leaf, call)
            why = _hosted(tree, call, leaf) or _redacted(incomplete_N, leaf)
            if why is None and need_logprobs:
                why = _not_trainable(tree, call, leaf, allow)
            trainable_N[leaf] |= why is None
        if why is not None:
            reasons[call.call_id] = why
    return Eligibility(eligible_N=eligible_N, trainable_N=trainable_N, reasons=reasons, call_of=call_of)


def candidates(tree: Tree, judged: Eligibility) -> list[Candidate]:
    """Paths to the eligible outputs that have no eligible output below them, in depth-first order."""
    before_N1 = np.concatenate([[0], np.cumsum(judged.eligible_N)])
    leaves = np.flatnonzero(judged.eligible_N)
    below = before_N1[tree.end_N[leaves]] - before_N1[leaves + 1]
    return [Candidate(leaf=i, path=tree.path(i), call=judged.call_of[i]) for i in leaves[below == 0].tolist()]


def _continued(tree: Tree) -> npt.NDArray[np.bool_]:
    """Outputs that the harness is known to have received, since something recorded later rests on them."""
    by_id = {call.call_id: call for call in tree.calls}
    used: set[str | None] = {node_id for node_id in tree.copy_of_N if node_id is not None}
    for call in tree.calls:
        used |= {call.prompt_node, call.spawned_by_node}
        # A summary lives on as the text of a new conversation, so no path leads through its output.
        if call.branch_reason == BranchReason.COMPACTION and call.continues_from in by_id:
            used.add(by_id[call.continues_from].output_node)
    taken_N = np.zeros(len(tree), np.bool_)
    taken_N[[tree.index[node_id] for node_id in used if node_id in tree.index]] = True
    for i in range(len(tree) - 1, -1, -1):
        if taken_N[i] and tree.parent_N[i] >= 0:
            taken_N[tree.parent_N[i]] = True
    return taken_N


def _not_eligible(
    tree: Tree, call: Call, leaf: int | None, taken_N: npt.NDArray[np.bool_]
) -> tuple[Reason, str] | None:
    if call.status == CallStatus.FAILED:
        return Reason.CALL_FAILED, call.error or "the call failed"
    if call.status != CallStatus.OK:
        return Reason.CALL_ABORTED, call.error or f"status {call.status}"
    if leaf is None or tree.kind_N[leaf] != NodeKind.OUTPUT or tree.author_N[leaf] not in _SAMPLED:
        return Reason.NO_OUTPUT, "nothing was sampled"
    if tree.num_tokens_N[leaf] == 0:
        return Reason.NO_OUTPUT, "no token was sampled"
    if call.agent_role == AgentRole.SIDE:
        return Reason.ROLE_SIDE, "a side call of the harness (title, classifier)"
    if call.agent_role not in ROLE_ORDER:
        return Reason.ROLE_UNKNOWN, f"role {call.agent_role}, known by {call.role_source}"
    state = tree.delivery.get(call.call_id)
    if state == DeliveryState.DELIVERED or taken_N[leaf]:
        return None
    if state in (DeliveryState.UNDELIVERED, DeliveryState.ABANDONED):
        return Reason.UNDELIVERED, f"{state}, and no later call goes on from it"
    return Reason.DELIVERY_UNKNOWN, "no delivery row, and no later call goes on from it"


def _hosted(tree: Tree, call: Call, leaf: int) -> tuple[Reason, str] | None:
    """No objective takes what has no token ids; the text of it can be exported and tokenised for another model."""
    if tree.author_N[leaf] != Author.PROVIDER:
        return None
    if call.upstream is None:  # observe mode always knows where it was sent
        return Reason.TEXT_ONLY, "imported as text: its token ids are not known; export it as chat for SFT"
    return (
        Reason.HOSTED,
        "a hosted API sampled it: its token ids are not known; only its text can be used",
    )


def _incomplete(tree: Tree) -> npt.NDArray[np.bool_]:
    """Nodes whose path has a gap: there or above, token ids are not known."""
    out = tree.counted_N.copy()
    if out.any():
        for i, parent in enumerate(tree.parent_N.tolist()):  # parents come first
            out[i] |= parent >= 0 and out[parent]
    return out


def _redacted(incomplete_N: npt.NDArray[np.bool_], leaf: int) -> tuple[Reason, str] | None:
    if not incomplete_N[leaf]:
        return None
    return Reason.REDACTED, "a secret was taken out of its text or of its context, and the token ids with it"


def _not_trainable(tree: Tree, call: Call, leaf: int, allow: frozenset[Reason]) -> tuple[Reason, str] | None:
    if not tree.has_logprobs_N[leaf]:
        return Reason.NO_LOGPROBS, "no behaviour log-probs were recorded; only SFT can use it"
    recorded = tree.logprobs(leaf)
    if recorded is not None and not np.isfinite(recorded).all():
        return Reason.LOGPROB_NOT_FINITE, f"token {int(np.isfinite(recorded).argmin())} has no finite log-prob"
    if call.temperature is None or not 0.0 <= call.temperature < math.inf:
        return Reason.TEMPERATURE_UNKNOWN, f"the temperature used was recorded as {call.temperature}"
    found = [
        (Reason.GREEDY, call.temperature == 0.0, "temperature 0"),
        (Reason.TOP_P, call.top_p is not None and call.top_p < 1.0, f"top_p {call.top_p}"),
        (Reason.TOP_K, call.top_k is not None and call.top_k > 0, f"top_k {call.top_k}"),
        (Reason.CONSTRAINED, bool(call.constrained), "a grammar or schema limited sampling"),
    ]
    return next(((reason, detail) for reason, hit, detail in found if hit and reason not in allow), None)
