"""ATIF, Harbor's agent trajectory interchange format: one JSON object of steps, sub-agents in it or in files beside it.

A step of the agent is a call; the results that it observed are the messages after it. Steps marked as copied context
are context. Token ids that a step may hold are not taken: nothing says that they are the ids along one prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gyre_data.schema import AgentRole, BranchReason

from .calls import Line, Opening, Session, SourceCall, SourceFile
from .lines import Files, parse_time
from .messages import Message, join_lines, list_of, message, objects_of, text_of, tool_call

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "atif", 1
_CONTINUED = re.compile(r"\.cont-[0-9]+\.json$")
_KNOWN_STEP = frozenset(
    {"step_id", "timestamp", "source", "model_name", "message", "reasoning_content", "tool_calls", "observation"}
    | {"metrics", "is_copied_context", "llm_call_count", "reasoning_effort"}
)


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a file is of this format."""
    return text_of(record.get("schema_version")).startswith("ATIF-") and isinstance(record.get("steps"), list)


def belongs(path: Path) -> bool:
    """What continues a trajectory is read with it; files of sub-agents also stand alone."""
    begun = _CONTINUED.sub(".json", path.name)
    return begun != path.name and (path.parent / begun).is_file()


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one trajectory of a file, with its sub-agents."""
    done: list[SourceFile] = []
    told = files.whole(path, done)
    told = told if isinstance(told, dict) else {}
    agent = told.get("agent")
    agent = agent if isinstance(agent, Mapping) else {}
    key = text_of(told.get("trajectory_id")) or text_of(told.get("session_id")) or done[0].sha256
    session = Session(key=key, name=path.name, calls=iter(()), files=done)
    session.harness = text_of(agent.get("name")) or None
    session.harness_version = text_of(agent.get("version")) or None
    session.at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    kept = ("session_id", "trajectory_id", "notes", "final_metrics", "continued_trajectory_ref", "extra")
    session.attributes = {name: told[name] for name in kept if told.get(name) is not None}
    session.calls = _calls(session, path, told, files)
    yield session


@dataclass(kw_only=True, slots=True, eq=False)
class _Agent:
    """A trajectory to read: the main one, or a sub-agent's with what started it."""

    told: Mapping[str, Any]
    agent_id: str | None = None
    parent: str | None = None
    tool: str | None = None
    continues: str | None = None
    """Key of the last call before the compaction that this one begins with."""
    started: list[tuple[Mapping[str, Any], str | None]] = field(default_factory=list)
    """References to sub-agents, with the tool call each stands at."""


def _calls(session: Session, path: Path, told: Mapping[str, Any], files: Files) -> Iterator[SourceCall]:
    found: list[tuple[float, SourceCall]] = []
    todo = [_Agent(told=told)]
    inside = _embedded(told)
    gone_on: set[str] = set()
    seen = 0
    while todo:
        one = todo.pop(0)
        moment = 0.0
        for call in _steps(session, one, f"{seen}" if seen else ""):
            moment = max(moment, call.started_at.timestamp() if call.started_at else 0.0)
            found.append((moment, call))
        seen += 1
        if (rest := _rest(one, path, inside, files, session, gone_on)) is not None:
            inside |= _embedded(rest.told)
            rest.continues = found[-1][1].key if found else None
            todo.insert(0, rest)
        for ref, tool in one.started:
            child = _child(ref, path, inside, files, session)
            if child is None:
                session.report.notes.append(f"a sub-agent's trajectory is not at hand: {_name(ref)}")
                continue
            inside |= _embedded(child)
            todo.append(_Agent(told=child, agent_id=_name(ref), parent=one.agent_id, tool=tool))
    if any(call.started_at for _, call in found):
        found.sort(key=lambda one: one[0])
    yield from (call for _, call in found)


def _rest(
    one: _Agent, path: Path, inside: Mapping[str, Mapping[str, Any]], files: Files, session: Session, seen: set[str]
) -> _Agent | None:
    """What goes on after a compaction of the same agent: in a file beside this one, or embedded."""
    name = text_of(one.told.get("continued_trajectory_ref"))
    if not name or name in seen:
        return None
    seen.add(name)
    told = _child({"trajectory_id": name, "trajectory_path": name}, path, inside, files, session)
    if told is None:
        session.report.notes.append(f"the trajectory that goes on after this one is not at hand: {name}")
        return None
    return _Agent(told=told, agent_id=one.agent_id, parent=one.parent, tool=one.tool)


def _embedded(told: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Trajectories inside one, by each name that a reference may have."""
    found: dict[str, Mapping[str, Any]] = {}
    for one in objects_of(told.get("subagent_trajectories")):
        for name in ("trajectory_id", "session_id"):
            if text_of(one.get(name)):
                found.setdefault(one[name], one)
    return found


def _name(ref: Mapping[str, Any]) -> str:
    names = (text_of(ref.get(name)) for name in ("trajectory_id", "session_id", "trajectory_path"))
    return next((name for name in names if name), "unnamed")


def _child(
    ref: Mapping[str, Any], path: Path, inside: Mapping[str, Mapping[str, Any]], files: Files, session: Session
) -> Mapping[str, Any] | None:
    """The trajectory that a reference means: in the file, or a file beside it, never one elsewhere."""
    for name in ("trajectory_id", "session_id"):
        if (known := inside.get(text_of(ref.get(name)))) is not None:
            return known
    beside = text_of(ref.get("trajectory_path"))
    at = path.parent / Path(beside).name if beside else None
    if at is None or not at.is_file() or at == path:
        return None
    told = files.whole(at, session.files)
    return told if isinstance(told, dict) else None


def _steps(session: Session, one: _Agent, prefix: str) -> Iterator[SourceCall]:
    """The calls of one trajectory."""
    agent = one.told.get("agent")
    agent = agent if isinstance(agent, Mapping) else {}
    tools = tuple(list_of(agent.get("tool_definitions")))
    steps = objects_of(one.told.get("steps"))
    leading = next(
        (i for i, step in enumerate(steps) if step.get("source") != "system" or step.get("observation")), len(steps)
    )
    line: Line | Opening = Opening(system=tuple(_message("system", step) for step in steps[:leading]), tools=tools)
    asked: datetime | None = None
    waiting = 0
    for step in steps[leading:]:
        source = text_of(step.get("source"))
        session.report.records[source or "without a source"] += 1
        at, context = parse_time(step.get("timestamp")), line
        if source == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            said, key = _message("assistant", step), f"{prefix}step {step.get('step_id')}"
            line = Line(before=line, message=said, said_by=key)
            yield _call(one, agent, step, key, context, said, tools, asked)
            one.continues = None
            waiting = 0
        elif source in ("agent", "user", "system"):
            role = "assistant" if source == "agent" else source
            line = Line(before=line, message=_message(role, step))
            waiting += 1
        else:
            session.report.unknown(f"step of source {source}", dict(step))
            continue
        for result in _results(step):
            one.started += [(ref, text_of(result.get("source_call_id")) or None) for ref in _refs(result)]
            line = Line(before=line, message=_result(result, source))
            waiting += 1
        asked = at or asked
    session.report.unanswered += waiting


def _call(
    one: _Agent,
    agent: Mapping[str, Any],
    step: Mapping[str, Any],
    key: str,
    context: Line | Opening,
    said: Message,
    tools: tuple[Any, ...],
    asked: datetime | None,
) -> SourceCall:
    at = parse_time(step.get("timestamp"))
    metrics = step.get("metrics")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    several = step.get("llm_call_count")
    notes = [f"{several} calls of the model in one step"] if isinstance(several, int) and several > 1 else []
    if metrics.get("completion_token_ids"):
        notes.append("the source's token ids are not taken")
    return SourceCall(
        key=key,
        context=context,
        output=said,
        wire="openai_chat",
        role=AgentRole.MAIN if one.agent_id is None else AgentRole.SUB_AGENT,
        agent_id=one.agent_id,
        parent_agent_id=one.parent,
        spawned_by_tool_call=one.tool,
        reason=BranchReason.COMPACTION if one.continues else None,
        continues=one.continues,
        started_at=min((time for time in (asked, at) if time), default=None),
        ended_at=at,
        usage=_usage(metrics),
        model=text_of(step.get("model_name")) or text_of(agent.get("model_name")) or None,
        client=text_of(agent.get("name")) or None,
        tools=tools,
        note="; ".join(notes) or None,
    )


def _usage(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Usage in the words of the chat wire, whose counts these are; cost and extras stay beside."""
    names = ("prompt_tokens", "completion_tokens")
    found = {name: metrics[name] for name in names if isinstance(metrics.get(name), int)}
    if not found:
        return None
    cached = metrics.get("cached_tokens")
    more = {name: metrics[name] for name in ("cost_usd", "extra") if metrics.get(name) is not None}
    return {
        **found,
        **({"prompt_tokens_details": {"cached_tokens": cached}} if isinstance(cached, int) else {}),
        **more,
    }


def _message(role: str, step: Mapping[str, Any]) -> Message:
    texts, left = _content(step.get("message"))
    calls = objects_of(step.get("tool_calls"))
    fields = {name: value for name, value in step.items() if name not in _KNOWN_STEP and value is not None}
    return message(
        role,
        "".join(texts) if role == "assistant" else join_lines(texts),
        reasoning=text_of(step.get("reasoning_content")) if role == "assistant" else None,
        tool_calls=[tool_call(c.get("function_name"), c.get("arguments"), c.get("tool_call_id")) for c in calls],
        blocks=left,
        fields=fields,
    )


def _results(step: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    observation = step.get("observation")
    found = observation.get("results") if isinstance(observation, Mapping) else None
    return objects_of(found)


def _refs(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = result.get("subagent_trajectory_ref")
    return [found] if isinstance(found, Mapping) else objects_of(found)


def _result(result: Mapping[str, Any], source: str) -> Message:
    """What the agent saw: the result of a call, or what else the environment said, which is the user's part."""
    texts, left = _content(result.get("content"))
    answers = text_of(result.get("source_call_id"))
    fields = {"extra": result["extra"]} if result.get("extra") else None
    role = "tool" if answers else "system" if source == "system" else "user"
    return message(role, join_lines(texts), tool_call_id=answers, blocks=left, fields=fields)


def _content(value: Any) -> tuple[list[str], list[Any]]:
    if not isinstance(value, list):
        return [text_of(value)], []
    texts = [text_of(p.get("text")) for p in value if isinstance(p, Mapping) and p.get("type") == "text"]
    return texts, [p for p in value if not (isinstance(p, Mapping) and p.get("type") == "text")]
