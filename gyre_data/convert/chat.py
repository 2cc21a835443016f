"""Chat files: each line a conversation, {"messages": [...]} with or without "tools".

Lines with the same `execution_id` are conversations of one tree: what they have in common is there once. Every
assistant message is a reply after the messages before it, but for one with `"weight": 0`, which is context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gyre_data.schema import AgentRole

from .calls import Line, Opening, Report, Session, SourceCall, SourceFile
from .lines import Files, load_json
from .messages import canonical, identity, text_of
from .wire_chat import chat_messages, split_opening

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "chat", 1
_WIRE = "openai_chat"
_OURS = ("messages", "tools", "execution_id", "task_id", "group_id", "agent_id", "agent_role")


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a line is of this format."""
    found = record.get("messages")
    return isinstance(found, list) and bool(found) and all(isinstance(m, Mapping) and "role" in m for m in found)


def belongs(path: Path) -> bool:
    """Every file stands for itself."""
    return False


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """A session for each conversation, or for all that share an `execution_id`; the file is gone through twice."""
    report, done = Report(), list[SourceFile]()
    groups: dict[str, list[int]] = {}
    first: dict[str, int] = {}
    seen: dict[str, int] = {}
    at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    start = 0
    starts: dict[int, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            starts[number] = start
            start += len(line)
    for number, record in files.records(path, report, done):
        report.records["conversation"] += 1
        if not knows(record):
            report.unknown("without messages", record)
            continue
        name = text_of(record.get("execution_id"))
        if not name:
            digest = hashlib.sha256(canonical(record)).hexdigest()
            seen[digest] = seen.get(digest, 0) + 1  # the same conversation again is another one
            name = digest if seen[digest] == 1 else f"{digest}#{seen[digest]}"
        groups.setdefault(name, []).append(starts[number])
        first.setdefault(name, number)
    for name, offsets in groups.items():
        where = path.name if len(groups) == 1 else f"{path.name}:{first[name]}"
        session = Session(key=name, name=where, calls=iter(()), report=report, files=done, at=at)
        session.calls = _calls(session, path, offsets)
        yield session
        report = Report()  # what is wrong with the file is told once


def _calls(session: Session, path: Path, offsets: list[int]) -> Iterator[SourceCall]:
    known: dict[tuple[int, str], Line] = {}
    openings: dict[str, Opening] = {}
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield from _conversation(session, load_json(file.readline()), known, openings)


def _conversation(
    session: Session, record: Mapping[str, Any], known: dict[tuple[int, str], Line], openings: dict[str, Opening]
) -> Iterator[SourceCall]:
    """The replies of a conversation that no line before had."""
    session.task_id = session.task_id or text_of(record.get("task_id")) or None
    session.group_id = session.group_id or text_of(record.get("group_id")) or None
    if more := {name: value for name, value in record.items() if name not in _OURS}:
        session.attributes.setdefault("fields", more)
    role = AgentRole.read(text_of(record.get("agent_role")) or AgentRole.MAIN)
    agent = text_of(record.get("agent_id")) or None
    opening, messages = split_opening(chat_messages(record["messages"]), record.get("tools"))
    mark = hashlib.sha256(canonical([list(opening.tools), list(opening.system)])).hexdigest()
    line: Line | Opening = openings.setdefault(mark, opening)
    key = mark
    unanswered = 0
    for one in messages:
        content = identity(one)
        key = hashlib.sha256(key.encode() + content).hexdigest()[:32]
        context = line
        if (found := known.get((id(context), key))) is not None:
            line = found
            continue
        replied = one["role"] == "assistant" and (one.get("raw") or {}).get("fields", {}).get("weight") != 0
        line = known[id(context), key] = Line(before=context, message=one, said_by=key if replied else None)
        unanswered = 0 if replied else unanswered + 1
        if replied:
            yield SourceCall(
                key=key,
                context=context,
                output=one,
                wire=_WIRE,
                role=AgentRole(role) if role is not None else AgentRole.MAIN,
                agent_id=agent,
                tools=opening.tools,
            )
    session.report.unanswered += unanswered
