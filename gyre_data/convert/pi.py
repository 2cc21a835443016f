"""pi's session files: entries that form a tree by `id` and `parentId`; before version 2 a plain sequence.

A reply is one entry with its usage. A compaction names the first entry that is kept; a branch that was left may leave a
summary of itself. The system prompt, the tools and the requests for summaries are not in these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gyre_data.schema import BranchReason, CallStatus

from .calls import Line, Opening, Report, Session, SourceCall
from .lines import Files, parse_time
from .messages import Message, join_lines, list_of, message, text_of, tool_call

__all__ = ["FORMAT", "VERSION", "belongs", "knows", "sessions"]

FORMAT, VERSION = "pi", 1
_BESIDE = frozenset({"model_change", "thinking_level_change", "custom", "label", "session_info"})
_WIRES = {
    "anthropic-messages": "anthropic",
    "openai-completions": "openai_chat",
    "openai-responses": "openai_responses",
    "openai-codex-responses": "openai_responses",
    "azure-openai-responses": "openai_responses",
}
_NOT_REPLAYED = ("error", "aborted")


def knows(record: Mapping[str, Any]) -> bool:
    """Whether a line is of this format: its first one is."""
    return record.get("type") == "session" and "id" in record and ("cwd" in record or "version" in record)


def belongs(path: Path) -> bool:
    """Every session is one file."""
    return False


def sessions(path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
    """The one session of a file."""
    session = Session(key=path.stem, name=path.name, calls=iter(()), harness="pi")
    reader = _Reader(session=session)
    header = next((r for _, r in files.records(path, Report(), []) if r.get("type") == "session"), {})
    session.key = text_of(header.get("id")) or path.stem
    session.calls = reader.calls(files.records(path, session.report, session.files))
    yield session


@dataclass(kw_only=True, slots=True, eq=False)
class _Entry:
    """An entry with its conversation: the line that ends with it."""

    id: str
    parent: _Entry | None
    messages: tuple[Message, ...] = ()
    """What it adds to the context."""
    line: Line | Opening
    compaction: bool = False
    fresh: str | None = None
    """The compaction that the conversation begins with, while no reply came since."""
    said_by: str | None = None


@dataclass(kw_only=True, slots=True, eq=False)
class _Reader:
    """Goes through the entries once: each names one before it as its parent."""

    session: Session
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _in_order: list[_Entry | None] = field(default_factory=list)
    _last: _Entry | None = None
    _last_call: str | None = None
    _opening: Opening = field(default_factory=Opening)
    _at: dict[str, datetime | None] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)
    _gone_on: set[str | None] = field(default_factory=set)
    """Compactions that a call went on from."""

    def calls(self, records: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[SourceCall]:
        """The calls, in the order of the file."""
        report = self.session.report
        for number, record in records:
            kind = text_of(record.get("type"))
            report.records[kind or "without a kind"] += 1
            if kind == "session":
                self._in_order.append(None)
                continue
            id_ = text_of(record.get("id")) or f"line {number}"
            if id_ in self._entries:
                report.twice += 1
                continue
            parent = self._entries.get(text_of(record.get("parentId"))) if "parentId" in record else self._last
            yield from self._entry(id_, parent, kind, record)
        report.unanswered = len(self._waiting)

    def _entry(self, id_: str, parent: _Entry | None, kind: str, record: Mapping[str, Any]) -> Iterator[SourceCall]:
        entry = _Entry(id=id_, parent=parent, line=parent.line if parent else self._opening)
        entry.fresh = parent.fresh if parent else None
        self._at[id_] = parse_time(record.get("timestamp"))
        body = record.get("message")
        match kind:
            case "message" if isinstance(body, Mapping) and body.get("role") == "assistant":
                yield self._reply(entry, body)
            case "message" if isinstance(body, Mapping):
                self._add(entry, _spoken(body))
            case "custom_message":
                self._add(entry, _spoken({**record, "role": "custom"}))
            case "branch_summary":
                if record.get("summary"):
                    self._add(entry, _spoken({**record, "role": "branchSummary"}))
            case "compaction":
                self._compact(entry, record)
            case _ if kind in _BESIDE:
                self.session.report.beside[kind] += 1
            case _:
                self.session.report.unknown(kind, dict(record))
        self._entries[id_] = self._last = entry
        self._in_order.append(entry)

    def _add(self, entry: _Entry, one: Message | None) -> None:
        if one is None:
            self.session.report.beside["message: kept out of the context"] += 1
            return
        entry.messages = (one,)
        entry.line = Line(before=entry.line, message=one)
        self._waiting.add(entry.id)

    def _compact(self, entry: _Entry, record: Mapping[str, Any]) -> None:
        """The conversation begins anew: with the summary, then the kept entries."""
        summary = message("user", text_of(record.get("summary")), fields={"kind": "compaction"})
        index = record.get("firstKeptEntryIndex")
        first = self._entries.get(text_of(record.get("firstKeptEntryId")))
        if isinstance(index, int) and 0 <= index < len(self._in_order):
            first = self._in_order[index]
        kept: list[_Entry] = []
        at = entry.parent
        while at is not None and first is not None:
            kept.append(at)
            at = None if at is first else at.parent
        if first is None or kept[-1:] != [first]:
            kept = []  # a first entry that is not on the path keeps nothing
        line: Line | Opening = Line(before=self._opening, message=summary)
        for one in reversed(kept):
            self._waiting.discard(one.id)
            for said in one.messages:
                line = Line(before=line, message=said)
        entry.line, entry.compaction, entry.fresh = line, True, entry.id

    def _reply(self, entry: _Entry, body: Mapping[str, Any]) -> SourceCall:
        said = _assistant(body)
        context = entry.line
        fresh = entry.fresh is not None and entry.fresh not in self._gone_on
        self._gone_on.add(entry.fresh)
        stop = text_of(body.get("stopReason"))
        status = {"error": CallStatus.FAILED, "aborted": CallStatus.ABORTED}.get(stop, CallStatus.OK)
        if stop not in _NOT_REPLAYED:
            entry.messages, entry.fresh = (said,), None
            entry.line = Line(before=context, message=said, said_by=entry.id)
        wire = _WIRES.get(text_of(body.get("api")), text_of(body.get("api")) or "unknown")
        ended = self._at[entry.id]
        asked = self._at.get(entry.parent.id) if entry.parent else None
        begun = parse_time(body.get("timestamp"))  # when the request went out
        self._answer(entry)
        call = SourceCall(
            key=entry.id,
            context=context,
            output=said,
            wire=wire,
            reason=BranchReason.COMPACTION if fresh else None,
            continues=self._last_call if fresh else None,
            started_at=min((at for at in (begun, ended) if at), default=asked),
            ended_at=ended,
            usage=_usage(wire, body.get("usage")),
            model=text_of(body.get("model")) or None,
            client="pi",
            stop_reason=stop or None,
            at_limit=stop == "length",
            status=status,
            error=None if status is CallStatus.OK else text_of(body.get("errorMessage")) or stop,
        )
        if status is CallStatus.OK:
            self._last_call = entry.id
        return call

    def _answer(self, entry: _Entry) -> None:
        """What lies above a reply is held by its call."""
        at = entry.parent
        while at is not None and (at.id in self._waiting or not at.messages):
            self._waiting.discard(at.id)
            at = None if at.compaction else at.parent


def _spoken(body: Mapping[str, Any]) -> Message | None:
    """A message of the client; None for one that the model is not given."""
    role, content = text_of(body.get("role")), body.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list_of(content)
    texts = [
        text_of(block.get("text")) for block in blocks if isinstance(block, Mapping) and block.get("type") == "text"
    ]
    left = [block for block in blocks if not (isinstance(block, Mapping) and block.get("type") == "text")]
    match role:
        case "toolResult":
            left += [{"type": "tool_result", "is_error": True}] if body.get("isError") else []
            answers = text_of(body.get("toolCallId"))
            return message(
                "tool", join_lines(texts), tool_call_id=answers, name=text_of(body.get("toolName")), blocks=left
            )
        case "bashExecution":
            if body.get("excludeFromContext"):
                return None
            told = {name: body.get(name) for name in ("command", "exitCode", "cancelled", "truncated") if name in body}
            shown = f"Ran `{text_of(body.get('command'))}`\n{text_of(body.get('output'))}"
            return message("user", shown, fields={"kind": role, **told})
        case "branchSummary" | "compactionSummary":
            return message("user", text_of(body.get("summary")), fields={"kind": role})
        case "custom" | "hookMessage":
            return message(
                "user", join_lines(texts), blocks=left, fields={"kind": text_of(body.get("customType")) or role}
            )
        case _:
            return message(role or "user", join_lines(texts), blocks=left)


def _assistant(body: Mapping[str, Any]) -> Message:
    text = reasoning = ""
    calls: list[dict[str, Any]] = []
    left: list[Any] = []
    content = body.get("content")
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            text += text_of(block.get("text"))
        elif kind == "thinking":
            reasoning += text_of(block.get("thinking"))
            left.append({"type": "thinking", "signature": block.get("thinkingSignature")})
        elif kind == "toolCall":
            calls.append(tool_call(block.get("name"), block.get("arguments"), block.get("id")))
        else:
            left.append(block)
    return message("assistant", text, reasoning=reasoning, tool_calls=calls, blocks=left)


def _usage(wire: str, told: Any) -> dict[str, Any] | None:
    """The provider's usage in its own words; pi keeps it in one form for all. The original is in it, under `pi`."""
    if not isinstance(told, Mapping) or not any(
        told.get(name) for name in ("input", "output", "cacheRead", "cacheWrite")
    ):
        return None
    given, output, read, written = (_count(told.get(name)) for name in ("input", "output", "cacheRead", "cacheWrite"))
    if wire == "anthropic":
        used: dict[str, Any] = {"input_tokens": given, "output_tokens": output}
        used |= {"cache_read_input_tokens": read, "cache_creation_input_tokens": written}
    else:
        name, said = ("prompt", "completion") if wire == "openai_chat" else ("input", "output")
        used = {
            f"{name}_tokens": given + read,
            f"{said}_tokens": output,
            f"{name}_tokens_details": {"cached_tokens": read},
        }
    return {**used, "pi": dict(told)}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
