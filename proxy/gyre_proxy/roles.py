"""Who a request comes from: one table, a row per client.

Explicit `X-Gyre-Role` and `X-Gyre-Agent` headers (or the `/a/<agent>` path) come first, then the client's own labels.
An unlabelled request gets no role here; the history gives it one from what it extends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from gyre_data.errors import ConfigError
from gyre_data.schema import AgentRole

from .message import Message, Request

__all__ = ["AgentLabel", "base_role", "label", "summary_role"]

_SUMMARY_MARK = "CRITICAL: Respond with TEXT ONLY"
_TITLE_MARK = "Generate a concise, sentence-case title"
_SUMMARY_OF = {AgentRole.MAIN: AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT: AgentRole.SUB_AGENT_SUMMARY}


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLabel:
    """What a request says about its sender. `role` None: it says nothing, the history decides.

    `summary` marks the shape of a compaction request; it counts only if the history finds the conversation it sums up.
    """

    client: str | None = None
    role: AgentRole | None = None
    source: str = "none"
    agent_id: str | None = None
    parent_agent_id: str | None = None
    summary: bool = False


def base_role(role: AgentRole) -> AgentRole:
    """The role of the conversation that a call of role `role` belongs to."""
    return next((base for base, summary in _SUMMARY_OF.items() if role is summary), role)


def summary_role(role: AgentRole) -> AgentRole:
    """The role of a compaction request within a conversation of role `role`."""
    return _SUMMARY_OF.get(role, role)


def label(wire: str, headers: Mapping[str, str], request: Request, agent: str | None = None) -> AgentLabel:
    """Label of a request. `headers` have lower-case names; `agent` is the agent named in the path, if any.

    An agent called `main` is the main one. Raises ConfigError for a role that does not exist.
    """
    found = next((row(headers, request) for matches, row in _CLIENTS if matches(headers)), AgentLabel())
    named = headers.get("x-gyre-agent") or agent
    role = headers.get("x-gyre-role")
    if role is None and named is None:
        return found
    if role is None:
        given = AgentRole.MAIN if named == "main" else AgentRole.SUB_AGENT
        if found.summary:
            given = summary_role(given)
    elif role in _GIVABLE:
        given = AgentRole(role)
    else:
        raise ConfigError(f"X-Gyre-Role: wanted one of {', '.join(_GIVABLE)}, got {role!r}; send one of these")
    return AgentLabel(
        client=found.client,
        role=given,
        source="header",
        agent_id=None if named == "main" else named or found.agent_id,
        parent_agent_id=headers.get("x-gyre-parent-agent") or found.parent_agent_id,
        summary=given in _SUMMARY_OF.values(),
    )


_GIVABLE = tuple(str(role) for role in AgentRole if role is not AgentRole.UNKNOWN_VALUE)


def _is_claude_code(headers: Mapping[str, str]) -> bool:
    return "x-claude-code-session-id" in headers or headers.get("user-agent", "").startswith("claude-cli/")


def _claude_code(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """The agent is in the headers; only side calls and the summary request are known by their shape."""
    agent_id = headers.get("x-claude-code-agent-id")
    role = AgentRole.SUB_AGENT if agent_id else AgentRole.MAIN
    summary = _asks_for_summary(request.messages[-1]) if request.messages else False
    source = "client"
    if summary:
        role, source = summary_role(role), "shape"
    elif not agent_id and not request.tools and (_is_title(request) or _is_classifier(request)):
        role, source = AgentRole.SIDE, "shape"
    return AgentLabel(
        client="claude-code",
        role=role,
        source=source,
        agent_id=agent_id,
        parent_agent_id=headers.get("x-claude-code-parent-agent-id"),
        summary=summary,
    )


def _asks_for_summary(last: Message) -> bool:
    """The instruction is a text block of its own, at the begin of the message or after another block."""
    if last.role != "user":
        return False
    at = last.content.find(_SUMMARY_MARK)
    return at == 0 or (at > 0 and last.content[at - 1].isspace())


def _is_title(request: Request) -> bool:
    return any(message.role == "system" and _TITLE_MARK in message.content for message in request.messages)


def _is_classifier(request: Request) -> bool:
    return "</block>" in request.sampling.stop


def _is_codex(headers: Mapping[str, str]) -> bool:
    return "x-codex-turn-metadata" in headers or headers.get("originator", "").startswith("codex")


def _codex(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """Everything is in the headers: a thread is an agent, the session's own thread is the main one."""
    try:
        told = orjson.loads(headers.get("x-codex-turn-metadata", "{}"))
    except orjson.JSONDecodeError:
        told = {}
    told = told if isinstance(told, dict) else {}
    session, thread = headers.get("session-id"), headers.get("thread-id")
    parent = headers.get("x-codex-parent-thread-id")
    started_as, kind = headers.get("x-openai-subagent"), told.get("request_kind", "turn")
    sub_agent = parent is not None or started_as in _CODEX_AGENTS or told.get("thread_source") == "subagent"
    role = AgentRole.SUB_AGENT if sub_agent else AgentRole.MAIN
    summary = kind == "compaction" or started_as == "compact"
    if summary:
        role = summary_role(role)
    elif kind != "turn" or (started_as or "review") not in _CODEX_AGENTS:
        role = AgentRole.SIDE
    return AgentLabel(
        client="codex",
        role=role,
        source="client",
        agent_id=thread if thread != session else None,
        parent_agent_id=parent if parent != session else None,
        summary=summary,
    )


_CODEX_AGENTS = ("collab_spawn", "review")
"""Sub-agents that do part of the task; others (memory, guardian) are traffic beside it."""
_Row = tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str], Request], AgentLabel]]
_CLIENTS: tuple[_Row, ...] = ((_is_claude_code, _claude_code), (_is_codex, _codex))
