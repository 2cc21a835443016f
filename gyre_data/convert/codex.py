"""Codex's session files (`rollout-*.jsonl`): the items of a thread in order, with events of the client between them.

A reply is a run of items that the model made. A compaction's reply is in the file, the words that asked for it are not;
what follows begins with the history that the client put in its place. A sub-agent is a thread with a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gyre_data.schema import AgentRole, BranchReason

from .calls import Line, Opening, Session, SourceCall, grown
from .lines import Files, load_json, parse_time
from .messages import Message, message, text_of
from .wire_responses import conversation, is_model, item_message, turn

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "codex", 1
_WIRE = "openai_responses"
_BESIDE = frozenset({"event_msg", "turn_context", "world_state", "token_usage_record", "ghost_snapshot"})


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a line is of this format: its first one is."""
    return record.get("type") == "session_meta" and isinstance(record.get("payload"), Mapping)


def belongs(path: Path) -> bool:
    """Whether a file is a sub-agent's whose parent lies where the client puts it."""
    parent = _parent(_meta(path)) if path.name.startswith("rollout-") else None
    return parent is not None and _file_of(path, parent) is not None


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one session of a file, with the threads that it started."""
    meta = _meta(path)
    session = Session(key=text_of(meta.get("id")) or path.stem, name=path.name, calls=iter(()), harness="codex")
    session.harness_version = text_of(meta.get("cli_version")) or None
    session.calls = _calls(session, path, files, owners)
    yield session


def _calls(session: Session, path: Path, files: Files, owners: dict[str, str]) -> Iterator[SourceCall]:
    """The calls of all threads by their time."""
    found: list[tuple[float, SourceCall]] = []
    todo: list[tuple[Path, _Thread]] = [(path, _Thread(session=session, owners=owners))]
    seen = {path}
    while todo:
        file, thread = todo.pop(0)
        moment = 0.0  # of a thread never goes back, so that its calls stay in order
        for call in thread.calls(files.records(file, session.report, session.files)):
            moment = max(moment, call.started_at.timestamp() if call.started_at else 0.0)
            found.append((moment, call))
        for child, tool in thread.started.items():
            at = _file_of(path, child)
            if at is not None and at not in seen:
                seen.add(at)
                more = _Thread(session=session, owners=owners, agent=child, parent=thread.agent, tool=tool)
                todo.append((at, more))
    yield from (call for _, call in sorted(found, key=lambda one: one[0]))


def _meta(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            told = load_json(file.readline())
    except (OSError, ValueError):
        return {}
    payload = told.get("payload") if isinstance(told, dict) and told.get("type") == "session_meta" else None
    return payload if isinstance(payload, dict) else {}


def _parent(meta: Mapping[str, Any]) -> str | None:
    return text_of(meta.get("parent_thread_id")) or None


def _file_of(near: Path, thread: str) -> Path | None:
    """The file of a thread: beside `near`, or in the client's folders by day."""
    if not thread or not set(thread) <= set("0123456789abcdef-"):
        return None
    days = [folder for folder in near.parents if folder.name == "sessions"][:1]
    places = [
        *near.parent.glob(f"rollout-*{thread}.jsonl"),
        *(f for d in days for f in d.rglob(f"rollout-*{thread}.jsonl")),
    ]
    return next(iter(places), None)


@dataclass(kw_only=True, slots=True, eq=False)
class _Turn:
    """A reply that may get more items, or its usage."""

    items: list[Mapping[str, Any]]
    context: Line | Opening
    asked_at: datetime | None
    first_at: datetime | None
    last_at: datetime | None
    through: Any
    """`sampled_through_sequence`: equal for items of one reply."""
    summary: bool = False
    usage: Mapping[str, Any] | None = None
    response_id: str | None = None
    model: str | None = None
    compacted: bool = False
    error: str | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Thread:
    """Goes through the lines of one thread."""

    session: Session
    owners: dict[str, str]
    agent: str | None = None
    parent: str | None = None
    tool: str | None = None
    started: dict[str, str] = field(default_factory=dict)
    """Thread that this one started: the tool call that did."""
    _line: Line | Opening = field(default_factory=Opening)
    _system: list[Message] | None = field(default_factory=list)
    """Leading system messages, until something else comes."""
    _turn: _Turn | None = None
    _closed: bool = True
    """Whether the next item of the model begins a new reply."""
    _at: datetime | None = None
    _model: str | None = None
    _start: Opening = field(default_factory=Opening)
    _base: tuple[Message, ...] = ()
    """The base instructions, which stand before every history."""
    _turns: list[Line | Opening | None] = field(default_factory=list)
    """The conversation at the beginning of each turn of the user; None for the very beginning."""
    _last: str | None = None
    _summary: str | None = None
    _fresh: bool = False
    _waiting: int = 0
    _number: int = 0

    def calls(self, records: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[SourceCall]:
        """The calls, in the order of the file."""
        report = self.session.report
        for number, record in records:
            self._number = number
            kind, payload = text_of(record.get("type")), record.get("payload")
            report.records[kind or "without a kind"] += 1
            told = payload if isinstance(payload, Mapping) else {}
            at = parse_time(record.get("timestamp"))
            match kind:
                case "response_item" if told:
                    yield from self._item({"metadata": record.get("metadata"), **told}, at)
                case "compacted":
                    yield from self._compacted(told)
                case "session_meta":
                    base = told.get("base_instructions") or told.get("instructions")
                    text = text_of(base.get("text") if isinstance(base, Mapping) else base)
                    self._base = self._base or ((message("system", text),) if text else ())
                case _ if kind in _BESIDE:
                    report.beside[kind] += 1
                    yield from self._beside(kind, told)
                case _:
                    report.unknown(kind, record)
        yield from self._flush()
        report.unanswered += self._waiting

    def _item(self, item: Mapping[str, Any], at: datetime | None) -> Iterator[SourceCall]:
        if not is_model(item):
            if (one := item_message(item))["role"] == "system" and self._system is not None:
                self._system.append(one)
                return
            self._begin()
            self._note_started(item)
            self._settle()
            self._line = Line(before=self._line, message=one)
            self._waiting += 1
            self._at, self._closed = at or self._at, True
            return
        self._begin()
        marks = item.get("metadata")
        marks = marks if isinstance(marks, Mapping) else {}
        through = marks.get("sampled_through_sequence")
        if self._turn is not None and not (self._closed or through != self._turn.through):
            self._turn.items.append(item)
            self._turn.last_at = at
            return
        yield from self._flush()
        self._turn = _Turn(
            items=[item],
            context=self._line,
            asked_at=self._at,
            first_at=at,
            last_at=at,
            through=through,
            summary=bool(marks.get("compaction_output")),
            model=self._model,
            compacted=self._fresh,
        )
        self._fresh = self._closed = False
        self._waiting = 0

    def _begin(self) -> None:
        """The leading system messages are complete."""
        if self._system is not None:
            self._line = self._start = Opening(system=(*self._base, *self._system))
            self._system = None

    def _settle(self) -> None:
        """The reply is in the history, unless it is a summary."""
        if self._turn is not None and self._line is self._turn.context and not self._turn.summary:
            self._line = Line(before=self._line, message=turn(self._turn.items), said_by=self._key(self._turn))

    def _note_started(self, item: Mapping[str, Any]) -> None:
        """The output of the call that starts an agent names its thread."""
        try:
            told = load_json(text_of(item.get("output")).encode())
        except ValueError:
            return
        if isinstance(told, dict) and isinstance(told.get("agent_id"), str):
            self.started[told["agent_id"]] = text_of(item.get("call_id"))

    def _beside(self, kind: str, told: Mapping[str, Any]) -> Iterator[SourceCall]:
        if kind == "turn_context":
            self._model = text_of(told.get("model")) or self._model
        elif kind == "token_usage_record":
            self._used(told.get("usage"), text_of(told.get("response_id")))
            self._closed = True
        elif kind == "event_msg":
            info = told.get("info")
            match text_of(told.get("type")):
                case "token_count" if isinstance(info, Mapping):
                    self._used(info.get("last_token_usage"), "")
                case "task_started" | "turn_started":
                    yield from self._flush()
                    self._turns.append(None if self._system is not None else self._line)
                case "turn_aborted" if self._turn is not None and not self._closed:
                    self._turn.error = text_of(told.get("reason")) or "the turn was aborted"
                case "thread_rolled_back":
                    yield from self._flush()
                    back = told.get("num_turns")
                    if isinstance(back, int) and 0 < back <= len(self._turns):
                        self._line = self._turns[-back] or self._start
                        del self._turns[-back:]
                case _:
                    pass

    def _used(self, usage: Any, response_id: str) -> None:
        """The usage of the newest reply; events repeat it, which counts nothing."""
        if self._turn is not None and self._turn.usage is None and isinstance(usage, Mapping):
            self._turn.usage = usage
            self._turn.response_id = response_id or None

    def _compacted(self, told: Mapping[str, Any]) -> Iterator[SourceCall]:
        """What follows begins with the client's new history."""
        words = text_of(told.get("message"))
        if self._turn is not None:  # older clients do not mark the reply
            said = turn(self._turn.items)
            alone = not said.get("tool_calls") and self._line is self._turn.context
            self._turn.summary |= bool(alone and said["content"] and said["content"] in words)
        yield from self._flush()
        history = told.get("replacement_history")
        messages = conversation(history) if isinstance(history, list) else [message("user", words)]
        leading = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
        self._start = Opening(system=(*self._base, *messages[:leading]))
        self._line = grown(self._start, messages[leading:])
        self._fresh, self._closed, self._system = True, True, None
        self._turns.clear()
        self._waiting = len(messages) - leading

    def _key(self, one: _Turn) -> str:
        first = one.items[0]
        return text_of(first.get("id")) or text_of(first.get("call_id")) or f"{self.agent or ''}:{one.through}"

    def _flush(self) -> Iterator[SourceCall]:
        """The reply is complete."""
        self._settle()
        one, self._turn = self._turn, None
        if one is None:
            return
        key = self._key(one)
        if self.owners.setdefault(key, self.session.key) != self.session.key:
            note = "replies are copies from other sessions: context here, counted there"
            if note not in self.session.report.notes:
                self.session.report.notes.append(note)
            return
        sub_agent = self.agent is not None
        role = AgentRole.SUB_AGENT if sub_agent else AgentRole.MAIN
        if one.summary:
            role = AgentRole.SUB_AGENT_SUMMARY if sub_agent else AgentRole.MAIN_SUMMARY
            self._summary = key
        started = min((at for at in (one.asked_at, one.first_at) if at), default=None)
        yield SourceCall(
            key=key,
            context=one.context,
            output=turn(one.items),
            wire=_WIRE,
            role=role,
            agent_id=self.agent,
            parent_agent_id=self.parent,
            spawned_by_tool_call=self.tool,
            reason=BranchReason.COMPACTION if one.compacted or one.summary else None,
            continues=(self._summary or self._last) if one.compacted else self._last if one.summary else None,
            started_at=started,
            ended_at=one.last_at,
            usage=one.usage and _usage(one.usage),
            model=one.model,
            client=f"codex/{self.session.harness_version}" if self.session.harness_version else "codex",
            request_id=one.response_id,
            note="the words that asked for the summary are not in the source" if one.summary else None,
        )
        self._last = key


def _usage(told: Mapping[str, Any]) -> dict[str, Any]:
    """The provider's usage in its own words; Codex names the cached part in its own way."""
    cached = told.get("cached_input_tokens")
    return {**told, "input_tokens_details": {"cached_tokens": cached if isinstance(cached, int) else 0}}
