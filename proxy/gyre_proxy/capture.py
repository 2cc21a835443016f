"""The rows of a call, made from what was known at acceptance and what its sampling became."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gyre_data.schema import CallStatus, DeliveryState
from gyre_data.types import Call, Delivery

from .message import Reply, Request
from .plan import PromptPlan
from .recorder import blob_id
from .sampler import Sampler

__all__ = ["CallFacts", "call_row", "delivery_row", "kept_headers", "told_reason"]

LOGPROB_CONVENTION = "after_temperature"

# Request headers that say who called and how. Everything else may hold a secret and is not stored.
_KEPT = (
    "anthropic-beta",
    "anthropic-version",
    "content-encoding",
    "content-type",
    "openai-beta",
    "originator",
    "session-id",
    "thread-id",
    "user-agent",
    "x-app",
    "x-litellm-session-id",
    "x-openai-subagent",
    "x-parent-session-id",
    "x-session-id",
)
_KEPT_PREFIXES = ("x-claude-code-", "x-codex-", "x-gyre-", "x-stainless-")
_NEVER = ("key", "token", "auth", "cookie", "secret")


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that are stored: an allow-list, and never one whose name speaks of a secret."""
    return {
        name: value
        for name, value in sorted(headers.items())
        if (name in _KEPT or name.startswith(_KEPT_PREFIXES)) and not any(word in name for word in _NEVER)
    }


# wire: (with a tool call, at a stop sequence, at a stop token, at the limit)
_TOLD = {
    "anthropic": ("tool_use", "stop_sequence", "end_turn", "max_tokens"),
    "openai_chat": ("tool_calls", "stop", "stop", "length"),
    "openai_responses": ("completed", "completed", "completed", "incomplete"),
}


def told_reason(wire: str, reply: Reply, stop_sequence: str | None) -> str:
    """Why the reply ended, in the words that its client is told."""
    with_call, at_sequence, at_stop, at_limit = _TOLD[wire]
    if reply.tool_calls:
        return with_call
    if reply.finish == "length":
        return at_limit
    return at_stop if stop_sequence is None else at_sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFacts:
    """What is known of a call when it is accepted."""

    call_id: str
    output_node_id: str
    execution_id: str
    request: Request
    plan: PromptPlan
    path: str
    headers: Mapping[str, str]
    started_at: datetime
    sampling_used: Mapping[str, Any]
    seed: int
    thinking: str
    environment_state_id: str | None

    @property
    def blobs(self) -> tuple[bytes, ...]:
        """What the row names and the run may lack: the tool list, and the parts of the exact request body."""
        tools = [self.plan.tools_json] if self.plan.tools_json else []
        return (*tools, *(part.data for part in self.request.body if not part.stored))


def call_row(
    facts: CallFacts,
    sampler: Sampler,
    *,
    status: CallStatus,
    finish: str | None,
    stop_reason: str | None,
    error: str | None,
) -> Call:
    """The call's row. Nothing is guessed: what is not known is null."""
    plan, request, used = facts.plan, facts.request, facts.sampling_used
    return Call(
        call_id=facts.call_id,
        execution_id=facts.execution_id,
        agent_role=plan.agent_role,
        role_source=plan.role_source,
        agent_id=plan.agent_id,
        parent_agent_id=plan.parent_agent_id,
        spawned_by_node=plan.spawned_by_node,
        spawned_by_tool_call=plan.spawned_by_tool_call,
        continues_from=plan.continues_from,
        wire=request.wire,
        client=facts.headers.get("user-agent"),
        prompt_node=plan.node_ids[-1],
        output_node=facts.output_node_id if sampler.num_tokens else None,
        extension=plan.extension,
        branch_reason=plan.branch_reason,
        fork_check=plan.fork_check,
        first_difference_message=plan.first_difference_message,
        first_difference_token=plan.first_difference_token,
        tokens_lost=plan.tokens_lost,
        echo_difference=plan.echo_difference,
        thinking_policy=facts.thinking,
        tools_digest=plan.tools_digest,
        tools_blob=blob_id(plan.tools_json) if plan.tools_json else None,
        prompt_tokens=len(plan.prompt_ids),
        output_tokens=sampler.num_tokens,
        cached_tokens=sampler.cached_tokens,
        sampling_asked=json.dumps(request.sampling.to_json(), sort_keys=True),
        sampling_used=json.dumps(dict(used), sort_keys=True),
        temperature=float(used["temperature"]),
        top_p=float(used["top_p"]),
        top_k=int(used["top_k"]),
        constrained=request.sampling.json_schema is not None,
        max_tokens=int(used["max_new_tokens"]),
        logprob_convention=LOGPROB_CONVENTION,
        seed=facts.seed,
        finish_reason=finish,
        stop_reason=stop_reason,
        status=status,
        error=error,
        attempts=tuple(sampler.attempts),
        started_at=facts.started_at,
        first_token_at=sampler.first_token_at,
        ended_at=datetime.now(UTC),
        environment_state_id=facts.environment_state_id,
        request_blobs=tuple(part.blob_id for part in request.body),
        request_path=facts.path,
        request_headers=json.dumps(kept_headers(facts.headers), sort_keys=True),
    )


def delivery_row(facts: CallFacts, state: DeliveryState) -> Delivery:
    """What became of the reply, now."""
    return Delivery(call_id=facts.call_id, execution_id=facts.execution_id, state=state, at=datetime.now(UTC))
