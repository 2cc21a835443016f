"""Links that run across paths: which call started a sub-agent, and what a compaction made of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import AgentRole, BranchReason
from .tree import Tree
from .types import Call

__all__ = ["SUMMARIES", "Compaction", "SubAgent", "agent_of", "compactions", "sub_agents"]

SUMMARIES = (AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT_SUMMARY)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubAgent:
    """One sub-agent; what started it is null where the record does not say."""

    agent_id: str
    """The client's own name, or the id of the first node of its conversation when it has none."""
    parent_agent_id: str | None
    spawned_by_call: str | None
    spawned_by_node: str | None
    spawned_by_tool_call: str | None
    calls: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """A conversation that goes on from a summary of itself. Token counts are null where they were not recorded."""

    call_id: str
    """The call that goes on."""
    continues_from: str | None
    summary_call: str | None
    tokens_before: int | None
    """Context of the agent's last call before, its output included; else the prompt of the summary call."""
    tokens_after: int | None
    summary_tokens: int | None
    copied_tokens: int
    """Tokens of turns that were kept word for word: context only, trained where they were sampled."""


def agent_of(tree: Tree, call: Call) -> tuple[str, str | None]:
    """The agent a call belongs to: (main | sub_agent | side | unknown, name of the sub-agent)."""
    if call.agent_role in (AgentRole.MAIN, AgentRole.MAIN_SUMMARY):
        return "main", None
    if call.agent_role in (AgentRole.SUB_AGENT, AgentRole.SUB_AGENT_SUMMARY):
        leaf = tree.leaf(call)
        return "sub_agent", call.agent_id or (None if leaf is None else tree.node_id[int(tree.path(leaf)[0])])
    return ("side" if call.agent_role == AgentRole.SIDE else "unknown"), None


def sub_agents(tree: Tree) -> list[SubAgent]:
    """Every sub-agent, by the time of its first call."""
    calls: dict[str, list[Call]] = {}
    for call in tree.calls:
        kind, name = agent_of(tree, call)
        if kind == "sub_agent" and name is not None:
            calls.setdefault(name, []).append(call)
    return [_sub_agent(tree, name, found) for name, found in calls.items()]


def _sub_agent(tree: Tree, name: str, calls: list[Call]) -> SubAgent:
    told = next((call for call in calls if call.spawned_by_node is not None), calls[0])
    at = tree.index.get(told.spawned_by_node or "")
    owners = () if at is None else tree.outputs.get(at, ())
    return SubAgent(
        agent_id=name,
        parent_agent_id=told.parent_agent_id,
        spawned_by_call=owners[0].call_id if owners else None,
        spawned_by_node=told.spawned_by_node,
        spawned_by_tool_call=told.spawned_by_tool_call,
        calls=tuple(call.call_id for call in calls),
    )


def compactions(tree: Tree) -> list[Compaction]:
    """Every compaction, by the time of the call that goes on. A summary call is part of one, not one by itself."""
    known = {call.call_id: call for call in tree.calls}
    summaries: dict[tuple[str, str | None], Call] = {}
    newest: dict[tuple[str, str | None], Call] = {}
    found: list[Compaction] = []
    for call in tree.calls:
        agent = agent_of(tree, call)
        if call.agent_role in SUMMARIES:
            summaries[agent] = call
            continue
        if call.branch_reason == BranchReason.COMPACTION:
            source = known.get(call.continues_from or "")
            named = source if source is not None and source.agent_role in SUMMARIES else None
            found.append(_compaction(tree, call, newest.get(agent), named or summaries.get(agent)))
        if call.prompt_tokens is not None:
            newest[agent] = call
    return found


def _compaction(tree: Tree, call: Call, last: Call | None, summary: Call | None) -> Compaction:
    before = summary.prompt_tokens if summary else None
    if last is not None and last.prompt_tokens is not None:
        before = last.prompt_tokens + (last.output_tokens or 0)
    path = tree.path(tree.index[call.prompt_node]).tolist() if call.prompt_node else []
    return Compaction(
        call_id=call.call_id,
        continues_from=call.continues_from,
        summary_call=summary.call_id if summary else None,
        tokens_before=before,
        tokens_after=call.prompt_tokens,
        summary_tokens=summary.output_tokens if summary else None,
        copied_tokens=sum(int(tree.num_tokens_N[i]) for i in path if tree.copy_of_N[i] is not None),
    )
