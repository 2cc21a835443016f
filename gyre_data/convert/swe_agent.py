"""SWE-agent's trajectories (`.traj`) and mini-swe-agent's (`.traj.json`): one JSON object for a run.

SWE-agent: `history` holds the messages, with those of a demonstration marked; newer steps of `trajectory` hold the
messages that were sent (`query`), which may differ from the history. mini-swe-agent: `messages`, each reply with the
response that it came in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .calls import Line, Opening, Session, SourceCall, SourceFile
from .lines import Files, parse_time
from .messages import Message, identity, message, objects_of, text_of
from .wire_chat import chat_message, split_opening

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "swe_agent", 1
_WIRE = "openai_chat"
# What SWE-agent adds to a message for itself.
_NOTES = frozenset(
    {"agent", "action", "thought", "message_type", "is_demo", "tags", "tool_call_ids", "extra", "cache_control"}
    | {"function_call", "provider_specific_fields", "thinking_blocks"}
)


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a file is of this format."""
    mini = text_of(record.get("trajectory_format")).startswith("mini-swe-agent")
    history = record.get("history")
    ours = isinstance(history, list) and any(
        isinstance(m, Mapping) and ("agent" in m or "thought" in m) for m in history
    )
    return mini or ours


def belongs(path: Path) -> bool:
    """Every run is one file."""
    return False


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one run of a file."""
    done: list[SourceFile] = []
    told = files.whole(path, done)
    told = told if isinstance(told, dict) else {}
    name = path.name.removesuffix(".json").removesuffix(".traj")
    info = told.get("info")
    info = info if isinstance(info, dict) else {}
    session = Session(key=done[0].sha256, name=path.name, calls=iter(()), files=done, task_id=name)
    session.at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    session.attributes = {key: info[key] for key in ("exit_status", "submission", "model_stats") if key in info}
    if "messages" in told:
        session.harness, session.task_id = "mini-swe-agent", None
        session.harness_version = text_of(info.get("mini_version")) or None
        session.calls = _mini(session, told)
    else:
        session.harness = "swe-agent"
        session.harness_version = text_of(info.get("swe_agent_version")) or None
        session.calls = _swe(session, told)
    yield session


def _mini(session: Session, told: Mapping[str, Any]) -> Iterator[SourceCall]:
    """Times and usage are in the response that each reply keeps."""
    sent = objects_of(told.get("messages"))
    line, rest = _begin(sent)
    asked_at: datetime | None = None
    for number, one in rest:
        extra = one.get("extra")
        extra = extra if isinstance(extra, Mapping) else {}
        session.report.records[text_of(one.get("role")) or "without a role"] += 1
        if one.get("role") == "exit":
            session.report.beside["exit"] += 1
            continue
        context, said = line, chat_message(one, _NOTES)
        at = parse_time(extra.get("timestamp"))
        if said["role"] != "assistant":
            line = Line(before=line, message=said)
            session.report.unanswered += 1
            asked_at = at or asked_at
            continue
        key = f"message {number}"
        line = Line(before=line, message=said, said_by=key)
        session.report.unanswered = 0
        response = extra.get("response")
        response = response if isinstance(response, Mapping) else {}
        usage, choices = response.get("usage"), response.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
        stop = text_of(first.get("finish_reason"))
        yield SourceCall(
            key=key,
            context=context,
            output=said,
            wire=_WIRE,
            started_at=asked_at or at,
            ended_at=at,
            usage=usage if isinstance(usage, Mapping) else None,
            model=text_of(response.get("model")) or None,
            client="mini-swe-agent",
            stop_reason=stop or None,
            at_limit=stop == "length",
        )
        asked_at = at or asked_at
    _compare(session, told, sum(one.get("role") == "assistant" for one in sent))


def _swe(session: Session, told: Mapping[str, Any]) -> Iterator[SourceCall]:
    """The replies in `history`; what was sent for each, if the step holds it, else what stands before it."""
    sent = objects_of(told.get("history"))
    steps = objects_of(told.get("trajectory"))
    line, rest = _begin(sent)
    queries = [step.get("query") for step in steps]
    replies = sum(_is_reply(one) for _, one in rest)
    if replies != len(steps):
        queries = []  # which step is which reply cannot be told
    opening = line
    shared: dict[tuple[int, bytes], Line] = {}
    count = 0
    for number, one in rest:
        session.report.records[text_of(one.get("message_type")) or text_of(one.get("role"))] += 1
        said, context = _said(one), line
        reply = _is_reply(one)
        key = f"message {number}"
        line = Line(before=line, message=said, said_by=key if reply else None)
        session.report.unanswered = 0 if reply else session.report.unanswered + 1
        if not reply:
            continue
        query = queries[count] if count < len(queries) else None
        count += 1
        if isinstance(query, list) and query:
            context = _asked(query, opening, shared)
            shared.setdefault((id(context), identity(said)), Line(before=context, message=said, said_by=key))
        yield SourceCall(key=key, context=context, output=said, wire=_WIRE, client="swe-agent")
    _compare(session, told, replies)


def _begin(sent: list[Mapping[str, Any]]) -> tuple[Line | Opening, list[tuple[int, Mapping[str, Any]]]]:
    """Leading system messages, and the rest with their places."""
    leading = next((i for i, one in enumerate(sent) if one.get("role") != "system"), len(sent))
    opening, _ = split_opening([_said(one) for one in sent[:leading]])
    return opening, list(enumerate(sent))[leading:]


def _asked(query: list[Any], opening: Line | Opening, shared: dict[tuple[int, bytes], Line]) -> Line | Opening:
    """The conversation that a step holds; steps that begin alike share their lines."""
    messages = [_said(one) for one in query if isinstance(one, Mapping)]
    begun, rest = split_opening(messages)
    same = isinstance(opening, Opening) and list(begun.system) == list(opening.system)
    line: Line | Opening = opening if same else begun
    for one in rest:
        key = (id(line), identity(one))
        found = shared.get(key)
        line = found if found is not None else shared.setdefault(key, Line(before=line, message=one))
    return line


def _said(one: Mapping[str, Any]) -> Message:
    made = chat_message(one, _NOTES)
    ids = one.get("tool_call_ids")
    if made["role"] == "tool" and isinstance(ids, list) and ids and not made.get("tool_call_id"):
        made = {
            **message("tool", made["content"], tool_call_id=text_of(ids[0])),
            **{k: v for k, v in made.items() if k == "raw"},
        }
    return made


def _is_reply(one: Mapping[str, Any]) -> bool:
    return one.get("role") == "assistant" and not one.get("is_demo") and one.get("message_type") != "demonstration"


def _compare(session: Session, told: Mapping[str, Any], replies: int) -> None:
    """The source's own count of calls, when it is another one."""
    info = told.get("info")
    stats = info.get("model_stats") if isinstance(info, Mapping) else None
    counted = stats.get("api_calls") if isinstance(stats, Mapping) else None
    if isinstance(counted, int) and counted > replies:
        session.report.notes.append(f"the source counts {counted} calls; {replies} replies are in it")
