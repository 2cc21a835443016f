"""`gyre tree --json`: the same outline with every call, node and exclusion, for programs. What is not known is null."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from gyre_data.counts import count_tree
from gyre_data.tree import Tree

from .outline import Lane, Outline

__all__ = ["tree_json"]


def tree_json(shown: Outline, recorded: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Plain values; token ids and texts are left out, node and call ids lead to them.

    `recorded` holds what never changes of calls and nodes, by id, for one who asks again while the run grows.
    """
    tree, info = shown.tree, shown.execution.info
    known = {} if recorded is None else recorded
    counts = count_tree(tree, j_max=shown.j_max).to_json()
    return {
        "execution": {name: _plain(getattr(info, name)) for name in info.__slots__},
        "scores": [
            {name: _plain(getattr(row, name)) for name in row.__slots__ if name != "execution_id"}
            for row in shown.execution.scores
        ],
        "counts": counts,
        "j_max": shown.j_max,
        "lanes": [_lane(shown, lane) for lane in shown.lanes],
        "trajectories": [
            {
                "index": t.index,
                "role": str(t.role),
                "leaf": tree.node_id[t.leaf],
                "path": [tree.node_id[i] for i in t.path],
                "owned": [tree.node_id[i] for i in t.owned],
                "owned_tokens": t.num_owned,
            }
            for t in shown.kept
        ],
        "branches": [
            {
                "node": None if b.node < 0 else tree.node_id[b.node],
                "children": [tree.node_id[i] for i in b.children],
                "calls": list(b.calls),
                "reasons": [_plain(reason) for reason in b.reasons],
            }
            for b in tree.branches()
        ],
        "excluded": [
            {"reason": str(x.reason), "detail": x.detail, "call_id": x.call_id, "node_id": x.node_id}
            for x in shown.excluded
        ],
        "calls": [_call(shown, number, known) for number in range(1, len(tree.calls) + 1)],
        "nodes": [{**_node(tree, i, known)} for i in range(len(tree))],
    }


_CALL_COLUMNS = (
    "call_id", "agent_role", "role_source", "agent_id", "parent_agent_id", "spawned_by_node", "spawned_by_tool_call",
    "continues_from", "wire", "client", "prompt_node", "output_node", "extension", "branch_reason", "fork_check",
    "first_difference_message", "first_difference_token", "tokens_lost", "echo_difference", "prompt_tokens",
    "output_tokens", "cached_tokens", "temperature", "top_p", "top_k", "finish_reason", "status", "error", "started_at",
    "ended_at",
)  # fmt: skip


def _call(shown: Outline, number: int, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    call = shown.call(number)
    if call.call_id not in known:
        known[call.call_id] = {name: _plain(getattr(call, name)) for name in _CALL_COLUMNS}
    state = shown.tree.delivery.get(call.call_id)
    reason, detail = shown.judged.reasons.get(call.call_id, (None, None))
    return {
        "number": number,
        **known[call.call_id],
        "delivery": _plain(state),
        "distinct_tokens": shown.tokens[number - 1],
        "trained_tokens": shown.trained[number - 1],
        "not_trained": _plain(reason),
        "not_trained_detail": detail,
    }


def _node(tree: Tree, i: int, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    node_id, parent = tree.node_id[i], int(tree.parent_N[i])
    if node_id in known:
        return known[node_id]
    known[node_id] = {
        "node_id": node_id,
        "parent_id": None if parent < 0 else tree.node_id[parent],
        "call_id": tree.call_of_N[i],
        "kind": str(tree.kind_N[i]),
        "author": str(tree.author_N[i]),
        "message_role": tree.message_role_N[i],
        "copy_of": tree.copy_of_N[i],
        "start_pos": int(tree.start_pos_N[i]),
        "num_tokens": int(tree.num_tokens_N[i]),
        "has_logprobs": bool(tree.has_logprobs_N[i]),
    }
    return known[node_id]


def _lane(shown: Outline, lane: Lane) -> dict[str, Any]:
    tokens, trained = shown.total(lane.calls)
    all_tokens, all_trained = shown.total(lane.subtree)
    return {
        "kind": lane.kind,
        "agent_id": lane.agent_id,
        "spawned_at": lane.spawned_at,
        "title": lane.title,
        "num_calls": len(lane.calls),
        "distinct_tokens": tokens,
        "trained_tokens": trained,
        "subtree": {
            "num_agents": len(lane.nested),
            "num_calls": len(lane.subtree),
            "distinct_tokens": all_tokens,
            "trained_tokens": all_trained,
            "seconds": shown.seconds(lane.subtree),
        },
        "segments": [
            {
                "number": segment.number,
                "calls": segment.calls,
                "opening": segment.opening,
                "events": segment.events,
                "agents": [_lane(shown, agent) for agent in segment.agents],
            }
            for segment in lane.segments
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, str) else value
