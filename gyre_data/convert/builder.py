"""Makes the tree of one session from its calls, by the recorder's rules of identity.

A node is a message after certain other messages: what calls have in common is there once, and they branch where their
messages differ. An assistant message that is a recorded reply in its place is that reply's node; one that repeats a
reply elsewhere (a kept tail) is a copy of it. All ids follow from the session and the source's own ids, so that the
same source makes the same tree.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from gyre_data.counting import TokenCounter, count_tools, count_turn
from gyre_data.schema import Author, CallStatus, DeliveryState, NodeKind
from gyre_data.types import Call, Delivery, Node

from .calls import Line, Opening, SourceCall
from .kinship import CallState, Kin, Lineage
from .messages import Message, canonical, identity, message_json, said_anything, without_reasoning

__all__ = ["Entry", "TreeBuilder"]

_NO_IDS = np.empty(0, np.int32)
_TICK = timedelta(microseconds=1)
_EPOCH = datetime.fromtimestamp(0, UTC)


@dataclass(kw_only=True, slots=True, eq=False)
class Entry:
    """A node to be. `call_id` is set once a call holds it."""

    node_id: str
    parent: Entry | None
    top: Entry | None = None
    """The root of its path; None for a root."""
    start_pos: int
    num_tokens: int
    kind: NodeKind
    role: str
    chain: str
    blobs: tuple[str, ...]
    copy_of: str | None = None
    call_id: str | None = None
    loose: str = ""
    """Of an assistant message: hash without its reasoning, as clients may echo it."""
    reasoning: str = ""
    by: CallState | None = None
    prompts: dict[str, Entry] = field(default_factory=dict)
    outputs: list[Entry] = field(default_factory=list)

    @property
    def end_pos(self) -> int:
        """Tokens up to and including this node on its path."""
        return self.start_pos + self.num_tokens

    @property
    def root(self) -> Entry:
        """The first node of its path."""
        return self.top or self


class TreeBuilder:
    """Collects the rows of one execution. `store` makes bytes durable and gives their blob id."""

    def __init__(self, execution_id: str, counter: TokenCounter, store: Callable[[bytes], str]) -> None:
        self.execution_id = execution_id
        self._counter, self._store = counter, store
        self._openings: dict[tuple[str, ...], Entry] = {}
        self._top = _top()
        self._known: dict[str, list[Entry]] = {}
        """Replies by loose hash: what a copy repeats."""
        self._by_key: dict[str, CallState] = {}
        self._used: Counter[str] = Counter()
        self._spawners: dict[str, list[Entry]] = {}
        """Replies by the ids of their tool calls."""
        self._lineage = Lineage()
        self._nodes: list[Node] = []
        self._calls: list[Call] = []
        self._deliveries: list[Delivery] = []
        self._times: set[datetime] = set()
        self._free: dict[datetime, datetime] = {}
        self._last = _EPOCH
        self._tools: tuple[tuple[Any, ...], str | None, str | None] = ((), None, None)

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        return len(self._calls)

    @property
    def num_nodes(self) -> int:
        """Message nodes so far."""
        return len(self._nodes)

    def span(self) -> tuple[datetime, datetime] | None:
        """When the first call began and the last one ended."""
        if not self._calls:
            return None
        ends = [call.ended_at or call.started_at for call in self._calls]
        return min(call.started_at for call in self._calls), max(ends)

    def rows(self) -> Iterator[Any]:
        """Everything, once all calls are in."""
        yield from self._nodes
        for call in self._calls:
            yield self._linked(call)
        yield from self._deliveries

    # ------------------------------------------------------------------ calls

    def add(self, call: SourceCall, *, at: datetime | None = None) -> str:
        """Take in a call and return its id. `at`: when, for a source that does not tell."""
        prompt = self._place(call.context)
        output = call.output if call.output is not None and said_anything(call.output) else None
        call_id = self._call_id(call.key)
        state = CallState(call_id=call_id, prompt=prompt, output=None, role=call.role, agent_id=call.agent_id)
        kin = Kin(call=call, state=state, by_key=self._by_key, same=self._same)
        told = self._lineage.describe(kin)
        for entry in _unwritten(prompt):
            self._write(entry, call_id, Author.CLIENT)
        if output is not None:
            state.output = self._output(prompt, output, call_id, state)
        self._lineage.commit(state, told)
        self._by_key[call.key] = state
        started = self._moment(call.started_at, at)
        tools_digest, tools_blob = self._tools_of(call.tools)
        self._calls.append(
            Call(
                call_id=call_id,
                execution_id=self.execution_id,
                agent_role=told.role,
                role_source=told.role_source,
                agent_id=told.agent_id,
                parent_agent_id=told.parent_agent_id,
                spawned_by_tool_call=call.spawned_by_tool_call,
                continues_from=told.continues_from,
                wire=call.wire,
                client=call.client,
                prompt_node=prompt.node_id if prompt else None,
                output_node=state.output.node_id if state.output else None,
                extension=told.extension,
                branch_reason=told.reason,
                first_difference_message=told.first_difference_message,
                first_difference_token=told.first_difference_token,
                tokens_lost=told.tokens_lost,
                tools_digest=tools_digest,
                tools_blob=tools_blob,
                prompt_tokens=prompt.end_pos if prompt else 0,
                output_tokens=state.output.num_tokens if state.output else 0,
                sampling_asked=json.dumps(call.sampling, sort_keys=True) if call.sampling else None,
                finish_reason=None if call.status is not CallStatus.OK else "length" if call.at_limit else "stop",
                stop_reason=call.stop_reason,
                status=call.status,
                error=call.error,
                attempts=(),
                started_at=started,
                ended_at=call.ended_at if call.started_at else None,
                provider_usage=json.dumps(call.usage) if call.usage else None,
                upstream=call.upstream,
                http_status=call.http_status,
                served_model=call.model,
                provider_request_id=call.request_id,
                note=call.note,
            )
        )
        if call.status is CallStatus.OK:
            at = call.ended_at or started
            delivered = Delivery(call_id=call_id, execution_id=self.execution_id, state=DeliveryState.DELIVERED, at=at)
            self._deliveries.append(delivered)
        return call_id

    def _call_id(self, key: str) -> str:
        self._used[key] += 1
        unique = key if self._used[key] == 1 else f"{key}#{self._used[key]}"  # a source that uses an id twice
        return f"c_{_digest(self.execution_id, unique)[:20]}"

    def _moment(self, told: datetime | None, at: datetime | None) -> datetime:
        """A time of its own for each call, so that their order is the source's."""
        asked = told or max(at or _EPOCH, self._last)
        moment = max(asked, self._free.get(asked, asked))
        while moment in self._times:
            moment += _TICK
        self._times.add(moment)
        self._free[asked] = moment + _TICK  # thousands of calls may be of one instant
        self._last = max(self._last, moment)
        return moment

    def _tools_of(self, tools: tuple[Any, ...]) -> tuple[str | None, str | None]:
        """Digest and blob of a tool list, made once for as long as the same list comes."""
        if not tools:
            return None, None
        if self._tools[0] is not tools:
            data = canonical(list(tools))
            self._tools = (tools, hashlib.sha256(data).hexdigest()[:32], self._store(data))
        return self._tools[1], self._tools[2]

    def _linked(self, call: Call) -> Call:
        """The call with the node that started its agent, which may have come later in the source."""
        found = self._spawners.get(call.spawned_by_tool_call or "", ())
        own = [entry for entry in found if entry.by is not None and entry.by.agent_id == call.parent_agent_id]
        entry = next(iter(own or found), None)
        return call if entry is None else replace(call, spawned_by_node=entry.node_id)

    # ------------------------------------------------------------------ nodes

    def _place(self, line: Line | Opening) -> Entry | None:
        """The node of a conversation's last message; None for an empty conversation."""
        todo: list[Line] = []
        while isinstance(line, Line) and line.place is None:
            todo.append(line)
            line = line.before
        at: Entry | None = line.place if isinstance(line, Line) else self._opening(line)
        start = "" if isinstance(line, Line) else self._start(line)
        for one in reversed(todo):
            assert one.message is not None, "a line without a place has its message"
            at = self._entry(at, start, one)
            one.place, one.message = at, None
        return at

    def _start(self, opening: Opening) -> str:
        return _link(self._counter.name, (self._tools_of(opening.tools)[0] or "").encode())

    def _opening(self, opening: Opening) -> Entry | None:
        """The root node of leading system messages and tools."""
        if not (opening.system or opening.tools):
            return None
        chain = self._start(opening)
        for one in opening.system:
            chain = _link(chain, identity(one))
        if (known := self._openings.get((chain,))) is None:
            known = self._openings[chain,] = Entry(
                node_id=self._node_id(chain),
                parent=None,
                start_pos=0,
                num_tokens=max(count_tools(self._counter, opening.tools) + sum(map(self._count, opening.system)), 1),
                kind=NodeKind.PROMPT,
                role="system",
                chain=chain,
                blobs=tuple(self._store(message_json(one)) for one in opening.system),
            )
        return known

    def _entry(self, parent: Entry | None, start: str, line: Line) -> Entry:
        """The node of a message after `parent`: the reply that it is, another call's same message, or a new one."""
        assert line.message is not None
        one, above = line.message, parent or self._top
        assistant = one["role"] == "assistant"
        loose = _digest(without_reasoning(one)) if assistant else ""
        reasoning = _reasoning(one)
        if assistant and (reply := self._reply(above, line, loose, reasoning)) is not None:
            return reply
        content = identity(one)
        chain = _link(parent.chain if parent else start, content)
        if (known := above.prompts.get(chain)) is not None:
            return known
        says = bool(one["content"].strip() or one.get("tool_calls"))
        copied = self._same(loose, reasoning) if assistant and says else None
        made = above.prompts[chain] = Entry(
            node_id=self._node_id(chain),
            parent=parent,
            top=parent.root if parent else None,
            start_pos=parent.end_pos if parent else 0,
            num_tokens=self._count(one),
            kind=NodeKind.PROMPT,
            role=one["role"],
            chain=chain,
            blobs=(self._store(message_json(one)),),
            copy_of=copied.node_id if copied else None,
            loose=loose,
            reasoning=reasoning,
        )
        return made

    def _reply(self, above: Entry, line: Line, loose: str, reasoning: str) -> Entry | None:
        """The reply after `above` that an assistant message is: the one that the source names, else the newest."""
        named = self._by_key.get(line.said_by or "")
        if named is not None and named.output is not None and (named.output.parent or self._top) is above:
            return named.output
        same = (entry for entry in reversed(above.outputs) if entry.loose == loose)
        return next((entry for entry in same if reasoning in ("", entry.reasoning)), None)

    def _same(self, loose: str, reasoning: str) -> Entry | None:
        """The newest reply that an assistant message repeats."""
        same = reversed(self._known.get(loose, ()))
        return next((entry for entry in same if reasoning in ("", entry.reasoning)), None)

    def _output(self, prompt: Entry | None, said: Message, call_id: str, state: CallState) -> Entry:
        above = prompt or self._top
        node_id = f"n_{_digest(self.execution_id, 'output', call_id)[:20]}"
        entry = Entry(
            node_id=node_id,
            parent=prompt,
            top=prompt.root if prompt else None,
            start_pos=prompt.end_pos if prompt else 0,
            num_tokens=self._count(said),
            kind=NodeKind.OUTPUT,
            role="assistant",
            chain=_link(prompt.chain if prompt else "", b"node:" + node_id.encode()),
            blobs=(self._store(message_json(said)),),
            loose=_digest(without_reasoning(said)),
            reasoning=_reasoning(said),
            by=state,
        )
        above.outputs.append(entry)
        self._known.setdefault(entry.loose, []).append(entry)
        for call in said.get("tool_calls", ()):
            if call.get("id"):
                self._spawners.setdefault(call["id"], []).append(entry)
        self._write(entry, call_id, Author.PROVIDER)
        return entry

    def _write(self, entry: Entry, call_id: str, author: Author) -> None:
        entry.call_id = call_id
        self._nodes.append(
            Node(
                node_id=entry.node_id,
                execution_id=self.execution_id,
                root_id=entry.root.node_id,
                parent_id=entry.parent.node_id if entry.parent else None,
                call_id=call_id,
                start_pos=entry.start_pos,
                kind=entry.kind,
                message_role=entry.role,
                author=author,
                copy_of=entry.copy_of,
                token_ids=_NO_IDS,
                message_blobs=entry.blobs or None,
                content_hash=entry.chain,
                fingerprint=self._counter.name,
                counted_tokens=entry.num_tokens,
            )
        )

    def _count(self, one: Message) -> int:
        return count_turn(
            self._counter,
            content=one["content"],
            reasoning=one.get("reasoning"),
            calls=((call["name"], call["arguments"]) for call in one.get("tool_calls", ())),
            blocks=(one.get("raw") or {}).get("blocks"),
        )

    def _node_id(self, chain: str) -> str:
        return f"n_{_digest(self.execution_id, chain)[:20]}"


def _top() -> Entry:
    """Stands above all roots."""
    return Entry(node_id="", parent=None, start_pos=0, num_tokens=0, kind=NodeKind.PROMPT, role="", chain="", blobs=())


def _unwritten(entry: Entry | None) -> list[Entry]:
    """Nodes of a path that no call held before, in order. Above one that was held all were."""
    found = []
    while entry is not None and entry.call_id is None:
        found.append(entry)
        entry = entry.parent
    return found[::-1]


def _reasoning(one: Message) -> str:
    thought = (one.get("reasoning") or "").strip()
    return _digest(thought) if thought else ""


def _digest(*parts: str | bytes) -> str:
    joined = b"\0".join(part if isinstance(part, bytes) else part.encode("utf-8", "replace") for part in parts)
    return hashlib.sha256(joined).hexdigest()[:32]


def _link(before: str, content: bytes) -> str:
    return hashlib.sha256(before.encode() + b"\0" + content).hexdigest()[:32]
