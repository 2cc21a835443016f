"""What the history decides about a request, and what it hands out when the reply is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre_data.schema import AgentRole, BranchReason, Extension
from gyre_data.types import Ints, Node

from .forest import Draft

__all__ = ["PromptPlan", "Written"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptPlan:
    """The exact prompt of a call, where it lies in the tree, and why it lies there. Making one changes nothing."""

    prompt_ids: Ints
    """Ids for the engine; equal to the ids along `node_ids`."""
    node_ids: tuple[str, ...]
    """Path of the prompt, root first; the last ones may be new."""
    new_nodes: tuple[Draft, ...]
    opening_ids: Ints
    """The end of the prompt that belongs to the reply already, as a `<think>` that the template opens."""
    extension: Extension
    branch_reason: BranchReason | None
    fork_check: str | None
    """The technical check that failed, in words; null when the fork has another reason, or there is none."""
    first_difference_message: int | None
    first_difference_token: int | None
    tokens_lost: int | None
    echo_difference: str | None
    """What differs of a turn of ours that came back with another value, when the call forks there."""
    continues_from: str | None
    agent_role: AgentRole
    role_source: str
    agent_id: str | None
    parent_agent_id: str | None
    spawned_by_node: str | None
    spawned_by_tool_call: str | None
    identity: str
    """Equal for requests that ask for the same thing, streamed or not: a retry."""
    tools_digest: str | None
    tools_json: bytes | None
    """Canonical JSON of the tool list; None without tools."""
    chain: tuple[str, ...]
    """Hash before each message and after the last."""
    conversation: str
    """Calls of one agent that belong together; only for use by the history."""
    wire: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Written:
    """Rows and texts that a commit must make durable, the texts (by blob id) no later than the rows."""

    nodes: tuple[Node, ...]
    blobs: Mapping[str, bytes]
