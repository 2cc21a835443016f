"""Who a request comes from: one table, a row per client.

Explicit `X-Gyre-Role` and `X-Gyre-Agent` headers (or the `/a/<agent>` path) come first, then the client's own labels,
then system prompts that a client uses for nothing else. An unlabelled request gets no role here; the history gives it
one from what it extends. docs/proxy.md has the table in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import orjson

from gyre_data.errors import ConfigError
from gyre_data.schema import AgentRole

from .message import Message, Request

__all__ = ["SUMMARIES", "AgentLabel", "base_role", "label", "summary_role"]

_SUMMARY_MARK = "CRITICAL: Respond with TEXT ONLY"
_TITLE_MARK = "Generate a concise, sentence-case title"
_SUMMARY_OF = {AgentRole.MAIN: AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT: AgentRole.SUB_AGENT_SUMMARY}
SUMMARIES = tuple(_SUMMARY_OF.values())
"""The roles of compaction requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLabel:
    """What a request says about its sender. `role` None: it says nothing, the history decides.

    `summary` marks the shape of a compaction request; it counts only if the history finds the conversation it sums up:
    by tokens that they share or, if `evident`, by its name. `evident`: the system prompt says it, where no user and no
    tool can write. `spawner`: the tool whose `prompt` argument starts an agent that this client labels in no other way.
    """

    client: str | None = None
    role: AgentRole | None = None
    source: str = "none"
    agent_id: str | None = None
    parent_agent_id: str | None = None
    summary: bool = False
    evident: bool = False
    spawner: str | None = None


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
    found = next(row(headers, request) for matches, row in _CLIENTS if matches(headers))
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
        summary=given in SUMMARIES,
    )


_GIVABLE = tuple(str(role) for role in AgentRole if role is not AgentRole.UNKNOWN_VALUE)


def _is_claude_code(headers: Mapping[str, str]) -> bool:
    return "x-claude-code-session-id" in headers or headers.get("user-agent", "").startswith("claude-cli/")


def _claude_code(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """The agent is in the headers; only side calls and the summary request are known by their shape."""
    agent_id = headers.get("x-claude-code-agent-id")
    role = AgentRole.SUB_AGENT if agent_id else AgentRole.MAIN
    # A reminder of its own, such as which agents there are, may stand behind what it asks for.
    last = next((message for message in reversed(request.messages) if message.role != "system"), Message(role="user"))
    summary = _begins_block(last, _SUMMARY_MARK)
    source = "client"
    if summary:
        role, source = summary_role(role), "shape"
    elif any(_begins_block(last, mark) for mark in _BESIDE) or (not request.tools and _is_beside(request)):
        role, source = AgentRole.SIDE, "shape"
    return AgentLabel(
        client="claude-code",
        role=role,
        source=source,
        agent_id=agent_id,
        parent_agent_id=headers.get("x-claude-code-parent-agent-id"),
        summary=summary,
    )


_BESIDE = (
    "[SUGGESTION MODE: ",
    "You are now acting as the memory extraction subagent.",
    "# Dream: Memory Consolidation",
    "Describe your most recent action in 3-5 words",
    "The user stepped away and is coming back.",
    "<system-reminder>This is a side question from the user.",
)
"""Beginnings of the last block of requests that repeat the agent's whole conversation for another end."""


def _begins_block(message: Message, mark: str) -> bool:
    """The words begin a text block of a user message: they open it, or follow another block."""
    if message.role != "user":
        return False
    at = message.content.find(mark)
    return at == 0 or (at > 0 and message.content[at - 1].isspace())


def _is_beside(request: Request) -> bool:
    """Without tools: a title, a permission classifier, the digest of a fetched page."""
    texts = {role: [m.content for m in request.messages if m.role == role] for role in ("system", "user")}
    return (
        any(_TITLE_MARK in text for text in texts["system"])
        or "</block>" in request.sampling.stop
        or any(text.lstrip().startswith("Web page content:\n---") for text in texts["user"][:1])
    )


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


def _is_opencode(headers: Mapping[str, str]) -> bool:
    return headers.get("user-agent", "").startswith("opencode/")


def _opencode(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """A session is an agent, with a parent a sub-agent. Titles and compactions go by their system prompts."""
    session, parent = headers.get("x-session-id"), headers.get("x-parent-session-id")
    role = (AgentRole.SUB_AGENT if parent else AgentRole.MAIN) if session else None
    found = AgentLabel(client="opencode", role=role, source="client" if role else "none", agent_id=session)
    return _by_prompt(replace(found, parent_agent_id=parent), request)


def _is_qwen_code(headers: Mapping[str, str]) -> bool:
    return headers.get("user-agent", "").startswith("QwenCode/")


def _qwen_code(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """It labels nothing: agents go by the call that started them, other requests by their system prompts."""
    return _by_prompt(AgentLabel(client="qwen-code", spawner="agent"), request)


def _is_openhands(headers: Mapping[str, str]) -> bool:
    return "x-litellm-session-id" in headers


def _openhands(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """The session is one conversation; the first is the main one."""
    return AgentLabel(client="openhands", agent_id=headers["x-litellm-session-id"])


def _unlabelled(headers: Mapping[str, str], request: Request) -> AgentLabel:
    """pi, aider, mini-swe-agent and whatever else: only a system prompt can say something."""
    return _by_prompt(AgentLabel(), request)


def _by_prompt(found: AgentLabel, request: Request) -> AgentLabel:
    """`found`, and what the request's system prompt says if it is one of the table."""
    first = request.messages[0] if request.messages else Message(role="user")
    text = first.content.lstrip() if first.role == "system" else ""
    row = next((row for row in _PROMPTS if text.startswith(row[2])), None)
    if row is None:
        return found
    client, kind, _ = row
    if kind == "side":
        return replace(found, client=client, role=AgentRole.SIDE, source="shape", spawner=None)
    role = summary_role(found.role) if found.role else None
    return replace(found, client=client, role=role, source="shape", summary=True, evident=True, spawner=None)


_PROMPTS = (
    ("opencode", "side", "You are a title generator."),
    ("opencode", "summary", "You are a context summarization agent."),
    ("pi", "summary", "You are a context summarization assistant."),
    ("qwen-code", "summary", "You are the component that summarizes internal chat history"),
    ("qwen-code", "side", "You are now acting as the managed memory extraction subagent"),
    ("qwen-code", "side", "You are performing a managed memory dream"),
    ("qwen-code", "side", "You are selecting memories that will be useful"),
    ("qwen-code", "side", "Generate a concise, sentence-case title"),
    ("qwen-code", "side", "You generate session recaps"),
    ("qwen-code", "side", "Write a short summary label"),
    ("aider", "side", "You are an expert software engineer that generates concise, one-line Git commit messages"),
    ("aider", "summary", "*Briefly* summarize this partial conversation about programming."),
)
"""Client, kind of request, and how a system prompt begins that it uses for nothing else."""
_Row = tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str], Request], AgentLabel]]
_CLIENTS: tuple[_Row, ...] = (
    (_is_claude_code, _claude_code),
    (_is_codex, _codex),
    (_is_opencode, _opencode),
    (_is_qwen_code, _qwen_code),
    (_is_openhands, _openhands),
    (lambda headers: True, _unlabelled),
)
