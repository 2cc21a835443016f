"""What an importer makes of a source: sessions, and in each its calls in order. The builder turns them into a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gyre_data.schema import AgentRole, BranchReason, CallStatus

from .messages import Message, text_of

__all__ = ["Line", "Opening", "Report", "Session", "SourceCall", "SourceFile", "grown"]

_MAX_KEPT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Opening:
    """Where a conversation begins: its leading system messages and its tools, as far as the source tells them."""

    system: tuple[Message, ...] = ()
    tools: tuple[Any, ...] = ()


@dataclass(kw_only=True, slots=True, eq=False)
class Line:
    """A message after another one. A conversation is its last line; two that begin alike share the lines before.

    The builder puts `place` there, and takes the message, once it is stored.
    """

    before: Line | Opening
    message: Message | None
    said_by: str | None = None
    """Key of the call whose reply it is, where the source tells."""
    place: Any = None


def grown(line: Line | Opening, messages: Sequence[Message]) -> Line | Opening:
    """The conversation `line` with more messages."""
    for one in messages:
        line = Line(before=line, message=one)
    return line


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SourceCall:
    """One model call as a source tells it. What a source does not tell is None.

    `key` is unique in its session, and the same whenever the source is read again. `role` None lets the builder infer
    it as the recorder does for a client that labels nothing.
    """

    key: str
    context: Line | Opening
    output: Message | None
    wire: str
    role: AgentRole | None = AgentRole.MAIN
    role_source: str = "client"
    agent_id: str | None = None
    parent_agent_id: str | None = None
    spawned_by_tool_call: str | None = None
    reason: BranchReason | None = None
    """Only where the source says it: a compaction."""
    continues: str | None = None
    """Key of the call whose conversation goes on here, where the path alone does not tell."""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    usage: Mapping[str, Any] | None = None
    model: str | None = None
    client: str | None = None
    stop_reason: str | None = None
    at_limit: bool = False
    status: CallStatus = CallStatus.OK
    error: str | None = None
    http_status: int | None = None
    upstream: str | None = None
    request_id: str | None = None
    sampling: Mapping[str, Any] | None = None
    tools: tuple[Any, ...] = ()
    note: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A file that was read: its name without folders, its size and the sha256 of its bytes."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(kw_only=True, slots=True)
class Report:
    """What was found in the files of a session besides calls. Kinds are the source's own words."""

    records: Counter[str] = field(default_factory=Counter)
    beside: Counter[str] = field(default_factory=Counter)
    """Kinds that are known and are no part of a conversation."""
    not_understood: Counter[str] = field(default_factory=Counter)
    kept: list[Any] = field(default_factory=list)
    """Records of kinds that are not understood, as they came, up to 1 MiB of text."""
    damaged: list[str] = field(default_factory=list)
    """`file:line: why` of lines that are no JSON object."""
    twice: int = 0
    """Records that repeat another one's id."""
    unanswered: int = 0
    """Messages after the last reply of their branch: no call holds them."""
    notes: list[str] = field(default_factory=list)
    _kept_bytes: int = 0

    def unknown(self, kind: Any, record: Any) -> None:
        """A record of a kind that is not known: counted, and kept."""
        self.not_understood[text_of(kind) or "without a kind"] += 1
        self._kept_bytes += len(str(record))
        if self._kept_bytes <= _MAX_KEPT_BYTES:
            self.kept.append(record)


@dataclass(kw_only=True, slots=True, eq=False)
class Session:
    """One execution to be. `key` tells it from every other session of its format; `calls` is read once, in order.

    `report` and `files` are complete when `calls` is at its end.
    """

    key: str
    name: str
    """For people: a file name, with a line where a file holds several."""
    calls: Iterator[SourceCall]
    report: Report = field(default_factory=Report)
    files: list[SourceFile] = field(default_factory=list)
    harness: str | None = None
    harness_version: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    at: datetime | None = None
    """Time of a source that tells none: of its file."""
    attributes: dict[str, Any] = field(default_factory=dict)
