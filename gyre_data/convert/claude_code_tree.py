"""The records of a Claude Code session as conversations: which messages stand before a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from .calls import Line, Opening
from .messages import Message, text_of
from .wire_anthropic import assistant

__all__ = ["Conversations", "Group", "Record"]


@dataclass(kw_only=True, slots=True, eq=False)
class Record:
    """A line that has a place in the tree. `messages` is empty for one that the model is not given."""

    uuid: str
    parent: str | None
    order: int
    agent: str | None
    at: datetime | None
    messages: list[Message] = field(default_factory=list)
    group: Group | None = None
    boundary: dict[str, Any] | None = None
    summary: bool = False
    failure: Mapping[str, Any] | None = None
    used: bool = False
    """Some call holds it."""


@dataclass(kw_only=True, slots=True, eq=False)
class Group:
    """A reply: the lines that share a `message.id`."""

    key: str
    agent: str | None
    order: int
    parent: str | None
    first_at: datetime | None
    last_at: datetime | None = None
    blocks: list[tuple[str, list[Any]]] = field(default_factory=list)
    """uuid of a line, and its blocks."""
    told: dict[str, Any] = field(default_factory=dict)
    """The fields of the message itself: model, usage, stop_reason."""
    request_id: str | None = None
    version: str | None = None
    sampled_here: bool = True
    """False for what is copied from elsewhere or was never sampled."""
    interrupted: bool = False
    results: list[Record] = field(default_factory=list)
    line: Line | None = None


class Conversations:
    """Finds the conversation before each reply, along the records' parents."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        """By uuid."""
        self._lines: dict[tuple[int, str], Line | Opening] = {}
        self._opening = Opening()

    def context(self, parent: str | None, before: int) -> tuple[Line | Opening, Group | None, Record | None]:
        """The conversation that ends with a record; the last reply in it; the summary that it begins with, if no reply
        lies between. Results of the same reply's other calls are in it when they came `before`."""
        at, above = self._up(parent)
        if at is not None and at.group is not None:
            return self._after(at.group, above, before), at.group, None
        line = self._begun(at) if at is not None else self._opening
        return self._grown(line, above), None, at

    def _after(self, group: Group, above: list[Record], before: int) -> Line | Opening:
        """A reply, the results of its calls in their order, and what else follows."""
        results = {id(one) for one in above if one.messages and one.messages[0]["role"] == "tool"}
        if results:
            answered = {m.get("tool_call_id") for one in above if id(one) in results for m in one.messages}
            for one in group.results:
                ids = {m.get("tool_call_id") for m in one.messages}
                if one.order < before and not ids & answered:
                    above.append(one)
                    answered |= ids
            above.sort(key=lambda one: one.order)
        return self._grown(self.reply(group), above)

    def reply(self, group: Group) -> Line:
        """The conversation up to and with a reply."""
        todo = [group]  # replies above it, which come first; no recursion, a session has thousands
        while group.line is None:
            one = todo[-1]
            at, _ = self._up(one.parent)
            if at is not None and at.group is not None and at.group.line is None and at.group not in todo:
                todo.append(at.group)
                continue
            cyclic = at is not None and at.group is not None and at.group.line is None
            line = self._opening if cyclic else self.context(one.parent, one.order)[0]
            blocks = [block for _, found in one.blocks for block in found]
            one.line = Line(before=line, message=assistant(blocks), said_by=one.key)
            todo.pop()
        return group.line

    def above(self, group: Group) -> Group | None:
        """The reply that a reply comes after, if nothing but messages of the client lie between."""
        at, _ = self._up(group.parent)
        return at.group if at is not None else None

    def _up(self, parent: str | None) -> tuple[Record | None, list[Record]]:
        """The next reply or summary above, and the records between, in order."""
        above: list[Record] = []
        seen: set[str] = set()
        at = self.records.get(parent or "")
        while at is not None and at.group is None and not at.summary and at.uuid not in seen:
            seen.add(at.uuid)
            above.append(at)
            at = self.records.get(at.parent or "")
        return (None if at is not None and at.uuid in seen else at), above[::-1]

    def _grown(self, line: Line | Opening, records: list[Record]) -> Line | Opening:
        for record in records:
            if record.messages:
                record.used = True
                key = (id(line), record.uuid)
                if (known := self._lines.get(key)) is None:
                    known = line
                    for one in record.messages:
                        known = Line(before=known, message=one)
                    self._lines[key] = known
                line = known
        return line

    def _begun(self, summary: Record) -> Line | Opening:
        """A conversation that goes on after a compaction: the summary, and the kept tail."""
        line = self._grown(self._opening, [summary])
        boundary = self.records.get(summary.parent or "")
        told = boundary.boundary if boundary is not None else None
        key = (id(line), "kept tail")
        if key not in self._lines:
            self._lines[key] = self._tail(line, told or {})
        return self._lines[key]

    def _kept(self, boundary: Mapping[str, Any]) -> list[Record]:
        """The records that a compaction kept word for word, in order: by name, or from the last one up to the first."""
        named, segment = boundary.get("preservedMessages"), boundary.get("preservedSegment")
        uuids = named.get("uuids") if isinstance(named, Mapping) else None
        if isinstance(uuids, list):
            return [self.records[uuid] for one in uuids if (uuid := text_of(one)) in self.records]
        kept: list[Record] = []
        head = segment.get("headUuid") if isinstance(segment, Mapping) else None
        at = self.records.get(text_of(segment.get("tailUuid"))) if isinstance(segment, Mapping) else None
        while at is not None and len(kept) < len(self.records):
            kept.append(at)
            if at.uuid == head:
                return kept[::-1]
            at = self.records.get(at.parent or "")
        return []

    def relink_kept(self) -> None:
        """Some clients hang what was kept on the summary: it goes back to where it was said, what follows it stays."""
        for record in [one for one in self.records.values() if one.summary]:
            boundary = self.records.get(record.parent or "")
            kept = self._kept(boundary.boundary) if boundary is not None and boundary.boundary else []
            names = {one.uuid for one in kept}
            for one in self.records.values() if kept else ():
                if one.order > record.order and one.parent == kept[-1].uuid and one.uuid not in names:
                    self._move(one, record.uuid)
            for before, one in pairwise(kept):
                if one.parent == record.uuid:
                    self._move(one, before.uuid)

    def _move(self, record: Record, parent: str) -> None:
        if record.group is not None and record.group.parent == record.parent:
            record.group.parent = parent
        record.parent = parent

    def _tail(self, line: Line | Opening, boundary: Mapping[str, Any]) -> Line | Opening:
        kept = self._kept(boundary)
        names = {record.uuid for record in kept}
        done: set[int] = set()
        for record in kept:
            if record.group is None:
                line = self._grown(line, [record])
            elif id(record.group) not in done:
                done.add(id(record.group))
                blocks = [block for uuid, found in record.group.blocks if uuid in names for block in found]
                line = Line(before=line, message=assistant(blocks))
        return line
