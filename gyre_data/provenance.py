"""Where one call, or one sampled token, comes from, and what becomes of it in training.

Facts are those of the call's row and of the nodes on its path; nothing is computed anew. `request_body` gives the exact
bytes that the client sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from .arrays import from_table
from .eligible import Reason, eligibility
from .errors import DataError
from .execution import Execution
from .explain import Loss, explain_trajectories
from .json_values import object_of
from .schema import DeliveryState
from .texts import node_messages
from .tree import Tree
from .types import Call, EnvironmentState, TopLogprobs

__all__ = ["CallExplained", "Ownership", "TokenExplained", "explain_call", "explain_token", "request_body"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Through which kept trajectory an output is trained. `owner` None: it is not; then `reason` says why."""

    owner: int | None
    also_in: tuple[int, ...]
    """Other kept trajectories that hold it: context there."""
    rule: str
    """`admit.owner`, or `admit.` and the reason."""
    told: str
    reason: Reason | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallExplained:
    """One call. Token counts that the record does not hold are None."""

    number: int
    call: Call
    delivery: DeliveryState | None
    request_bytes: int | None
    overridden: dict[str, tuple[Any, Any]]
    """Sampling settings that the client asked for and the run replaced: name -> (asked, used)."""
    tokens_reused: int
    """Of the prompt: recorded before, sent again as they were."""
    tokens_new: int
    versions: tuple[tuple[str, int, int], ...]
    """(policy:n, start, end) over the output's tokens."""
    state_before: EnvironmentState | None
    state_judged: EnvironmentState | None
    """State that the newest verdict was about."""
    reply: Any
    """Canonical message that was sampled; None when nothing was, or its text is not held."""
    ownership: Ownership


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenExplained:
    """One token of a call's output; `position` counts from the root of its path."""

    index: int
    num_tokens: int
    token_id: int
    position: int
    logprob: float | None
    version: str | None
    engine: str | None
    ids_before: tuple[int, ...]
    ids_after: tuple[int, ...]
    alternatives: tuple[tuple[int, float], ...]
    """Top alternatives with their log-probs, where the engine gave them."""


def explain_call(execution: Execution, number: int, *, loss: Loss = "rl", j_max: int | None = 5) -> CallExplained:
    """The provenance of call c<number>; its owner is the one that a training of this kind would have."""
    tree = execution.tree
    call, output = tree.calls[number - 1], tree.output(tree.calls[number - 1])
    states = _states(execution)
    judged = next((row.state_id for row in reversed(execution.scores) if row.state_id is not None), None)
    said = [] if output is None else node_messages(execution.run, tree, output)
    path = tree.path(tree.index[call.prompt_node]).tolist() if call.prompt_node else []
    new = sum(int(tree.num_tokens_N[i]) for i in path if tree.call_of_N[i] == call.call_id)
    spans = (tree.versions(output) or ()) if output is not None else ()
    return CallExplained(
        number=number,
        call=call,
        delivery=tree.delivery.get(call.call_id),
        request_bytes=_num_bytes(execution, call),
        overridden=_overridden(call),
        tokens_reused=sum(int(tree.num_tokens_N[i]) for i in path) - new,
        tokens_new=new,
        versions=tuple((f"{span.policy_id}:{span.n}", span.start, span.end) for span in spans),
        state_before=states.get(call.environment_state_id or ""),
        state_judged=states.get(judged or ""),
        reply=said[-1] if said else None,
        ownership=_ownership(tree, call, loss, j_max),
    )


def _states(execution: Execution) -> dict[str, EnvironmentState]:
    table = execution.run.table("environments")
    own = table.filter(pc.equal(table.column("execution_id"), execution.execution_id))
    return {row.state_id: row for row in from_table("environments", own)}


def _num_bytes(execution: Execution, call: Call) -> int | None:
    try:
        return len(request_body(execution, call))
    except DataError:
        return None


def request_body(execution: Execution, call: Call) -> bytes:
    """The exact bytes of the request's body; DataError when the run does not hold them."""
    blob = getattr(execution.run, "blob", None)
    if blob is None or not call.request_blobs:
        raise DataError(f"wanted the request of call {call.call_id}, the run holds none; it was imported or not kept")
    try:
        return b"".join(blob(name) for name in call.request_blobs)
    except KeyError as error:
        raise DataError(
            f"wanted the request of call {call.call_id}, blob {error} is not in the run; run `gyre verify` on it"
        ) from None


_SAME_SETTING = {"max_tokens": "max_new_tokens", "stop": "stop", "seed": "sampling_seed"}


def _overridden(call: Call) -> dict[str, tuple[Any, Any]]:
    asked, used = (object_of(text) for text in (call.sampling_asked, call.sampling_used))
    both = {name: (value, used.get(_SAME_SETTING.get(name, name))) for name, value in asked.items()}
    return {name: (one, two) for name, (one, two) in both.items() if two is not None and one != two}


def _ownership(tree: Tree, call: Call, loss: Loss, j_max: int | None) -> Ownership:
    judged = eligibility(tree, need_logprobs=loss == "rl")
    output = tree.output(call)
    found = judged.reasons.get(call.call_id)
    if output is None or found is not None:
        reason, told = found or (Reason.NO_OUTPUT, "nothing was sampled")
        return Ownership(owner=None, also_in=(), rule=f"admit.{reason}", told=told, reason=reason)
    number = {other.call_id: n for n, other in enumerate(tree.calls, 1)}[tree.outputs[output][0].call_id]
    every = [t for t in explain_trajectories(tree, judged, j_max=j_max) if number in t.calls]
    owner = next((t for t in every if number in t.owned_calls), None)
    if owner is None:
        left = next((t for t in every if t.reason is not None), None)
        reason, told = (left.reason, left.detail) if left and left.reason else (Reason.NOTHING_NEW, "")
        return Ownership(owner=None, also_in=(), rule=f"admit.{reason}", told=told, reason=reason)
    others = [t for t in every if t.index is not None and t.index != owner.index]
    told = "the only kept trajectory that holds it"
    if others:
        worse = {t.role for t in others} - {owner.role}
        told = "most tokens without an owner first, then time"
        told = f"role {owner.role} before {', '.join(sorted(worse))}" if worse else told
    also = tuple(t.index for t in others if t.index is not None)
    return Ownership(owner=owner.index, also_in=also, rule="admit.owner", told=told, reason=None)


def explain_token(execution: Execution, number: int, index: int, *, around: int = 8) -> TokenExplained:
    """Token `index` (from 0) of what call c<number> sampled; DataError when there is no such token or no ids."""
    tree = execution.tree
    call = tree.calls[number - 1]
    output = tree.output(call)
    if output is None or tree.counted_N[output]:
        came = "it sampled nothing" if output is None else "its token ids are not known (hosted or redacted)"
        raise DataError(f"wanted token {index} of call c{number}, but {came}; leave the token out")
    ids, logprobs = tree.ids(output), tree.logprobs(output)
    if not 0 <= index < len(ids):
        raise DataError(f"wanted a token of call c{number}, got {index}; its output has tokens 0 to {len(ids) - 1}")
    spans = tree.versions(output) or ()
    return TokenExplained(
        index=index,
        num_tokens=len(ids),
        token_id=int(ids[index]),
        position=int(tree.start_pos_N[output]) + index,
        logprob=None if logprobs is None else float(logprobs[index]),
        version=next((f"{s.policy_id}:{s.n}" for s in spans if s.start <= index < s.end), None),
        engine=next((a.engine for a in call.attempts if a.start <= index < a.end), None),
        ids_before=tuple(ids[max(index - around, 0) : index].tolist()),
        ids_after=tuple(ids[index + 1 : index + 1 + around].tolist()),
        alternatives=_alternatives(execution, tree.node_id[output], index),
    )


def _alternatives(execution: Execution, node_id: str, index: int) -> tuple[tuple[int, float], ...]:
    table = execution.run.table("top_logprobs")
    rows: list[TopLogprobs] = from_table("top_logprobs", table.filter(pc.equal(table.column("node_id"), node_id)))
    for row in rows[:1]:
        part = slice(index * row.k, (index + 1) * row.k)
        return tuple(zip(row.token_ids[part].tolist(), row.logprobs[part].tolist(), strict=True))
    return ()
