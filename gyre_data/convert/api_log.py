"""Requests to a model's API with their responses: captures of claude-tap, cctrace and claude-trace, and bare pairs.

A line is a pair. The wires are Anthropic Messages, OpenAI Chat Completions and OpenAI Responses, streamed or not.
A file is one execution. Roles come from the client's own headers where they were kept; else the first conversation and
what goes on from it is the main one, and others are of unknown role.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_data.schema import AgentRole, CallStatus

from . import wire_anthropic, wire_responses
from .calls import Line, Opening, Session, SourceCall, grown
from .lines import Files, load_json, parse_time
from .messages import Message, list_of, objects_of, said_anything, text_of
from .streams import events_of, folded
from .wire_chat import chat_message, chat_messages, split_opening

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "api_log", 1
_PATHS = (("/messages", "anthropic"), ("/chat/completions", "openai_chat"), ("/responses", "openai_responses"))
_SUMMARY = "CRITICAL: Respond with TEXT ONLY"
_TITLE = "Generate a concise, sentence-case title"
_LIMITS = ("max_tokens", "length", "max_output_tokens", "model_context_window_exceeded")
_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "seed",
    "stop",
)
_SUMMARY_OF = {AgentRole.MAIN: AgentRole.MAIN_SUMMARY, AgentRole.SUB_AGENT: AgentRole.SUB_AGENT_SUMMARY}


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a line is of this format."""
    request = record.get("request")
    if not isinstance(request, Mapping) or "response" not in record:
        return False
    return any(name in request for name in ("body", "messages", "input", "url"))


def belongs(path: Path) -> bool:
    """Every file stands for itself."""
    return False


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one execution of a file."""
    key = _first_key(path)
    session = Session(key=key or path.stem, name=path.name, calls=iter(()))
    session.calls = _Log(session=session).calls(path, files)
    yield session


def _first_key(path: Path) -> str | None:
    """Its first request's id and time, so that the same log is the same execution, under any name."""
    with path.open("rb") as file:
        for line in file:
            try:
                record = load_json(line)
            except ValueError:
                continue
            if isinstance(record, dict) and knows(record):
                told = [record.get(name) for name in ("id", "request_id", "timestamp", "loggedAt", "logged_at")]
                request = {name: value for name, value in record["request"].items() if name != "headers"}
                return json.dumps([told, request], sort_keys=True)
    return None


@dataclass(kw_only=True, slots=True, eq=False)
class _Reply:
    """A response as far as it can be read."""

    message: Message | None = None
    status: CallStatus = CallStatus.OK
    error: str | None = None
    http_status: int | None = None
    id: str | None = None
    model: str | None = None
    stop: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Log:
    session: Session
    _responses: dict[str, Line | Opening] = field(default_factory=dict)
    """Conversation after each response: a request may name the one that it goes on from."""
    _ids: set[str | None] = field(default_factory=set)

    def calls(self, path: Path, files: Files) -> Iterator[SourceCall]:
        """The calls, in the order of the file."""
        report = self.session.report
        for number, record in files.records(path, report, self.session.files):
            report.records["pair" if knows(record) else "other"] += 1
            if not knows(record):
                report.unknown(record.get("type") or "no pair of request and response", record)
                continue
            for part, pair in enumerate(_pairs(record)):
                request = pair["request"]
                body = request.get("body", request)
                body = _parsed(body) if isinstance(body, str) else body
                wire = _wire(request, body, pair.get("response"))
                if not isinstance(body, Mapping) or wire is None:
                    report.beside["request for something else"] += 1
                elif body.get("generate") is False:  # warms a connection up, samples nothing
                    report.beside["warm-up"] += 1
                elif "_cctrace_stub" in body:
                    report.unknown("request that was folded away", pair)
                else:
                    yield from self._call(f"{number}.{part}" if part else str(number), pair, body, wire)

    def _call(self, number: str, record: Mapping[str, Any], body: Mapping[str, Any], wire: str) -> Iterator[SourceCall]:
        context, tools = self._context(body, wire)
        reply = _read(record.get("response"), wire)
        headers = _headers(record["request"].get("headers"))
        key = next((k for n in ("request_id", "id") if (k := text_of(record.get(n)))), "line")
        key = f"{key} {number}"
        if reply.id is not None and reply.id in self._ids:  # the same pair once more
            self.session.report.twice += 1
            return
        self._ids.add(reply.id)
        if reply.message is not None and reply.id:
            self._responses[reply.id] = Line(before=context, message=reply.message, said_by=key)
        begun, ended = _times(record)
        session_id = headers.get("x-claude-code-session-id") or headers.get("session-id")
        if session_id:
            self.session.attributes.setdefault("session_id", session_id)
        agent = headers.get("user-agent")
        self.session.harness = self.session.harness or (agent.partition("/")[0] if agent else None)
        upstream = text_of(record.get("upstream_base_url")) or _origin(text_of(record["request"].get("url")))
        settings = {name: body[name] for name in _SETTINGS if body.get(name) is not None}
        yield SourceCall(
            **_label(headers, body, wire, context),
            key=key,
            context=context,
            output=reply.message,
            wire=wire,
            started_at=begun,
            ended_at=ended,
            usage=reply.usage,
            model=reply.model or text_of(body.get("model")) or None,
            client=agent,
            stop_reason=reply.stop,
            at_limit=reply.stop in _LIMITS,
            status=reply.status,
            error=reply.error,
            http_status=reply.http_status,
            upstream=upstream or None,
            request_id=reply.id,
            sampling=settings or None,
            tools=tools,
        )

    def _context(self, body: Mapping[str, Any], wire: str) -> tuple[Line | Opening, tuple[Any, ...]]:
        """The conversation that was sent, whole or as an addition to an earlier response."""
        if wire == "anthropic":
            begin = wire_anthropic.opening(body)
            return grown(begin, wire_anthropic.conversation(body)), begin.tools
        if wire == "openai_chat":
            begin, rest = split_opening(chat_messages(body.get("messages")), body.get("tools"))
            return grown(begin, rest), begin.tools
        messages = wire_responses.conversation(body.get("input"))
        before = text_of(body.get("previous_response_id"))
        if before in self._responses:
            return grown(self._responses[before], messages), tuple(list_of(body.get("tools")))
        told = wire_responses.opening(body)
        leading = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
        begin = Opening(system=(*told.system, *messages[:leading]), tools=told.tools)
        return grown(begin, messages[leading:]), begin.tools


def _pairs(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pairs of a line: several for a socket that stayed open, where requests and responses follow one another."""
    request, response = record["request"], record.get("response")
    sent, came = (objects_of(one.get("ws_events") if isinstance(one, Mapping) else None) for one in (request, response))
    bodies = [event for event in sent if event.get("type") == "response.create"]
    groups: list[list[Any]] = []
    for event in came:
        if event.get("type") == "response.created":
            groups.append([])
        if groups:
            groups[-1].append(event)
    if len(groups) < 2:
        return [record]
    if len(bodies) != len(groups):
        bodies, groups = [request.get("body")], groups[-1:]
    head = {name: value for name, value in request.items() if name != "ws_events"}
    told = {name: value for name, value in response.items() if name != "body"} if isinstance(response, Mapping) else {}
    return [
        {**record, "request": {**head, "body": body}, "response": {**told, "ws_events": events}}
        for body, events in zip(bodies, groups, strict=True)
    ]


def _wire(request: Mapping[str, Any], body: Any, response: Any) -> str | None:
    """The wire of a request for a reply: by its path, or by its shape where there is none. None for other requests."""
    path = urlsplit(text_of(request.get("path")) or text_of(request.get("url"))).path.rstrip("/")
    if path:
        return next((wire for end, wire in _PATHS if path.endswith(end)), None)
    if not isinstance(body, Mapping):
        return None
    if "input" in body:
        return "openai_responses"
    whole = response.get("body", response) if isinstance(response, Mapping) else {}
    if isinstance(whole, Mapping) and whole.get("type") == "message":
        return "anthropic"
    return "openai_chat" if "messages" in body else None


def _read(response: Any, wire: str) -> _Reply:
    if not isinstance(response, Mapping):
        return _Reply(status=CallStatus.FAILED, error="the log holds no response")
    status = response.get("status", response.get("status_code"))
    code = status if isinstance(status, int) else None
    body, whole = _body(response)
    if not isinstance(body, Mapping):
        what = f"status {code}" if code and code >= 400 else "the response cannot be read as a message"
        return _Reply(status=CallStatus.FAILED, error=f"{what}: {text_of(body)[:500]}".rstrip(": "), http_status=code)
    told = _told(body, wire)
    told.http_status = code
    if (code is not None and code >= 400) or (body.get("error") and told.message is None):
        told.status, told.error = CallStatus.FAILED, json.dumps(body.get("error") or body)[:2000]
        told.message = None
    elif not whole:
        told.status, told.error = CallStatus.ABORTED, "the stream ended before the reply was complete"
    elif told.message is None:
        told.status, told.error = CallStatus.FAILED, "the response holds no message"
    return told


def _told(body: Mapping[str, Any], wire: str) -> _Reply:
    """What a whole body says."""
    usage = body.get("usage")
    reply = _Reply(
        id=text_of(body.get("id")) or None,
        model=text_of(body.get("model")) or None,
        usage=usage if isinstance(usage, Mapping) else None,
    )
    if wire == "anthropic":
        reply.message = wire_anthropic.assistant(wire_anthropic.blocks_of(body.get("content")))
        reply.stop = text_of(body.get("stop_reason")) or None
    elif wire == "openai_chat":
        choices = objects_of(body.get("choices"))
        first = choices[0] if choices else {}
        if isinstance(said := first.get("message"), Mapping):
            reply.message = chat_message({**said, "role": "assistant"}, ("function_call", "annotations", "audio"))
        reply.stop = text_of(first.get("finish_reason")) or None
    else:
        items = objects_of(body.get("output"))
        reply.message = wire_responses.turn(items) if items else None
        details = body.get("incomplete_details")
        reply.stop = text_of(details.get("reason")) if isinstance(details, Mapping) else text_of(body.get("status"))
        reply.stop = reply.stop or None
    if reply.message is not None and not said_anything(reply.message):
        reply.message = None
    return reply


def _body(response: Mapping[str, Any]) -> tuple[Any, bool]:
    """The body of a response, put together when it was streamed; and whether all of it came."""
    whole = not response.get("truncated")
    found = response.get("body")
    events = response.get("ws_events") or response.get("sse_events")
    if not isinstance(found, Mapping) and isinstance(events, list) and events:
        return folded([event.get("data", event) if isinstance(event, Mapping) else event for event in events])
    raw = next(
        (r for r in (found, response.get("bodyRaw"), response.get("body_raw")) if isinstance(r, str) and r), None
    )
    if isinstance(found, Mapping) or raw is None:
        bare = any(name in response for name in ("output", "choices", "content"))  # a body without an envelope
        return (response if found is None and bare else found), whole
    if raw.lstrip().startswith(("event:", "data:", ":")):
        body, ended = folded(events_of(raw))
        return body, ended and whole
    return _parsed(raw), whole


def _parsed(text: str) -> Any:
    try:
        return load_json(text.encode())
    except ValueError:
        return text


def _headers(told: Any) -> dict[str, str]:
    if not isinstance(told, Mapping):
        return {}
    return {str(name).lower(): value for name, value in told.items() if isinstance(value, str)}


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}" if parts.netloc else ""


def _times(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """When a request went out and when its reply was whole."""
    request, response = record["request"], record.get("response")
    begun = parse_time(request.get("timestamp"))
    ended = parse_time(response.get("timestamp")) if isinstance(response, Mapping) else None
    if begun is None:
        ended = ended or parse_time(record.get("timestamp"))  # written when the reply was there
        lasted = record.get("duration_ms")
        lasted = lasted if isinstance(lasted, int | float) and not isinstance(lasted, bool) else 0
        begun = ended - timedelta(milliseconds=lasted) if ended else parse_time(record.get("created_at"))
    return begun, ended


def _label(headers: Mapping[str, str], body: Mapping[str, Any], wire: str, context: Line | Opening) -> dict[str, Any]:
    """Role and agent by what Claude Code and Codex say of themselves; nothing for others."""
    if "x-claude-code-session-id" in headers or headers.get("user-agent", "").startswith("claude-cli/"):
        agent = headers.get("x-claude-code-agent-id")
        role = AgentRole.SUB_AGENT if agent else AgentRole.MAIN
        last = context.message if isinstance(context, Line) and context.message is not None else {}
        if last.get("role") == "user" and _begins(text_of(last.get("content")), _SUMMARY):
            role = _SUMMARY_OF[role]
        elif not body.get("tools") and _TITLE in json.dumps(body.get("system", "")):
            role = AgentRole.SIDE
        return {"role": role, "agent_id": agent, "parent_agent_id": headers.get("x-claude-code-parent-agent-id")}
    thread = headers.get("thread-id")
    if wire == "openai_responses" and thread:
        session, parent = headers.get("session-id"), headers.get("x-codex-parent-thread-id")
        told = _parsed(headers.get("x-codex-turn-metadata", "{}"))
        role = AgentRole.SUB_AGENT if parent or thread != session else AgentRole.MAIN
        role = _SUMMARY_OF[role] if isinstance(told, dict) and told.get("request_kind") == "compaction" else role
        own = thread if thread != session else None
        return {"role": role, "agent_id": own, "parent_agent_id": parent if parent != session else None}
    return {"role": None}


def _begins(text: str, mark: str) -> bool:
    """The words begin a block of a message: they open it, or follow another block."""
    at = text.find(mark)
    return at == 0 or (at > 0 and text[at - 1].isspace())
