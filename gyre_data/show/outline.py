"""The shape of one execution as a person thinks of it: agents, runs of calls, and what happened between them.

Calls are numbered c1, c2, ... over the whole execution by start time. Each agent is a lane; within a lane, calls that
go on from one another form a segment. A retry takes its original's place; a compaction, a fork or a new conversation
opens another segment; a sub-agent hangs under the segment whose call started it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from textwrap import shorten
from typing import Any

from gyre_data.eligible import Eligibility, Reason, candidates, eligibility
from gyre_data.errors import DataError
from gyre_data.execution import Execution
from gyre_data.json_values import parsed
from gyre_data.links import SUMMARIES, agent_of, compactions, sub_agents
from gyre_data.ownership import AdmittedTrajectory, Exclusion, keep
from gyre_data.schema import BranchReason, Extension
from gyre_data.tree import Tree
from gyre_data.types import Call

__all__ = ["Lane", "Outline", "Segment", "outline"]

_TITLE_CHARS = 1000
"""Of a first line that a title is made of: a whole file may stand on one line."""
_INSERTED = re.compile(r"<([a-z][\w-]*)>.*?</\1>", re.DOTALL)


@dataclass(kw_only=True, slots=True, eq=False)
class Segment:
    """Calls (by number) that go on from one another. `opening` tells why it did not go on from an older one."""

    number: int
    calls: list[int]
    opening: dict[str, Any] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    """Calls that were tried again or were lost: failed, aborted, undelivered."""
    agents: list[Lane] = field(default_factory=list)
    tail: int = 0
    """The call that the next one goes on from."""


@dataclass(kw_only=True, slots=True, eq=False)
class Lane:
    """All calls of one agent."""

    kind: str
    """main, sub_agent, side or unknown."""
    agent_id: str | None
    spawned_at: int | None
    title: str | None
    segments: list[Segment] = field(default_factory=list)

    @property
    def calls(self) -> list[int]:
        """Numbers of its own calls, retried and failed ones included."""
        found = [n for s in self.segments for n in s.calls] + [
            e["call"] for s in self.segments for e in s.events if e["call"] not in s.calls
        ]
        return sorted(found)

    @property
    def nested(self) -> list[Lane]:
        """The sub-agents that it started, and theirs."""
        own = [agent for segment in self.segments for agent in segment.agents]
        return [lane for agent in own for lane in (agent, *agent.nested)]

    @property
    def subtree(self) -> list[int]:
        """Numbers of its own calls and of all calls of the sub-agents below it."""
        return sorted({*self.calls, *(n for lane in self.nested for n in lane.calls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """One execution, ready to be shown."""

    execution: Execution
    tree: Tree
    judged: Eligibility
    lanes: tuple[Lane, ...]
    kept: tuple[AdmittedTrajectory, ...]
    num_candidates: int
    excluded: tuple[Exclusion, ...]
    j_max: int | None
    tokens: tuple[int, ...]
    """Distinct tokens that each call added."""
    trained: tuple[int, ...]
    """Of these, the tokens that are trained."""

    def call(self, number: int) -> Call:
        """The call numbered c<number>."""
        return self.tree.calls[number - 1]

    def total(self, numbers: list[int]) -> tuple[int, int]:
        """(distinct tokens, trained tokens) of these calls."""
        return sum(self.tokens[n - 1] for n in numbers), sum(self.trained[n - 1] for n in numbers)

    def seconds(self, numbers: list[int]) -> float | None:
        """Time from the start of the first of these calls to the end of the last; None when no end is known."""
        ends = [ended for n in numbers if (ended := self.call(n).ended_at) is not None]
        return (max(ends) - min(self.call(n).started_at for n in numbers)).total_seconds() if ends else None

    def walk(self) -> Iterator[Lane]:
        """Every lane, nested ones after the lane that holds them."""
        todo = list(self.lanes)
        while todo:
            lane = todo.pop(0)
            yield lane
            todo = [agent for segment in lane.segments for agent in segment.agents] + todo


def outline(execution: Execution, *, j_max: int | None = 5) -> Outline:
    """Lay out one execution."""
    tree = execution.tree
    judged = eligibility(tree)
    kept, excluded = keep(tree, judged, j_max=j_max)
    owned = {i for t in kept for i in t.owned}
    number = {call.call_id: n for n, call in enumerate(tree.calls)}
    tokens, trained = [0] * len(tree.calls), [0] * len(tree.calls)
    for i, call_id in enumerate(tree.call_of_N):
        if call_id in number:
            tokens[number[call_id]] += int(tree.num_tokens_N[i])
            trained[number[call_id]] += int(tree.num_tokens_N[i]) if i in owned else 0
    return Outline(
        execution=execution,
        tree=tree,
        judged=judged,
        lanes=_Builder(execution, judged).build(),
        kept=kept,
        num_candidates=len(candidates(tree, judged)),
        excluded=tuple(excluded),
        j_max=j_max,
        tokens=tuple(tokens),
        trained=tuple(trained),
    )


class _Builder:
    """Sorts calls into lanes and segments, in time order."""

    def __init__(self, execution: Execution, judged: Eligibility) -> None:
        self.execution, self.tree = execution, execution.tree
        lost = (Reason.CALL_FAILED, Reason.CALL_ABORTED, Reason.UNDELIVERED)
        self.lost = {call_id for call_id, (reason, _) in judged.reasons.items() if reason in lost}
        self.number = {call.call_id: n for n, call in enumerate(self.tree.calls, 1)}
        self.compactions = {found.call_id: found for found in compactions(self.tree)}
        self.by_prompt: dict[str, list[int]] = {}
        self.segment_of: dict[int, Segment] = {}
        self.lanes: dict[tuple[str, str | None], Lane] = {}
        self.parent = self._parents()

    def build(self) -> tuple[Lane, ...]:
        spawned: dict[str | None, int] = {
            agent.agent_id: self.number[agent.spawned_by_call]
            for agent in sub_agents(self.tree)
            if agent.spawned_by_call is not None
        }
        for n, call in enumerate(self.tree.calls, 1):
            key = agent_of(self.tree, call)
            if key not in self.lanes:
                self.lanes[key] = Lane(
                    kind=key[0], agent_id=call.agent_id, spawned_at=spawned.get(key[1]), title=self._title(call)
                )
            self._place(n, call, self.lanes[key])
            if call.prompt_node is not None:
                self.by_prompt.setdefault(call.prompt_node, []).append(n)
        return self._nested()

    def _parents(self) -> list[int | None]:
        """Per call the number of the call whose output its prompt goes on from; None for a new conversation."""
        tree = self.tree
        nearest: list[int] = []
        for i, above in enumerate(tree.parent_N.tolist()):
            nearest.append(i if i in tree.outputs else (nearest[above] if above >= 0 else -1))
        found: list[int | None] = []
        for call in tree.calls:
            at = -1 if call.prompt_node is None else nearest[tree.index[call.prompt_node]]
            found.append(None if at < 0 else self.number[tree.outputs[at][0].call_id])
        return found

    def _place(self, n: int, call: Call, lane: Lane) -> None:
        above = self.parent[n - 1]
        segment = self.segment_of.get(above) if above is not None else None
        goes_on = segment is not None and segment.tail == above and segment in lane.segments
        first = self._retried(n, call)
        host = self.segment_of.get(first) if first is not None else None
        if first is not None and host is not None and host in lane.segments and host.tail in (first, above):
            self._retry(host, first, n, call)
            return
        if goes_on and segment is not None and call.output_node is None:
            _event(segment, "lost", n, call)
            self.segment_of[n] = segment
        elif goes_on and segment is not None and call.branch_reason is None:
            self._append(segment, n, call)
        else:
            opened = Segment(number=len(lane.segments) + 1, calls=[], opening=self._opening(n, call, lane))
            lane.segments.append(opened)
            self._append(opened, n, call)

    def _retry(self, host: Segment, first: int, n: int, call: Call) -> None:
        _event(host, "retry", first, self.tree.calls[first - 1], taken_over_by=n)
        if host.tail == first:
            host.calls.remove(first)
        elif call.output_node is None:
            _event(host, "lost", n, call)
            self.segment_of[n] = host
            return
        self._append(host, n, call)

    def _append(self, segment: Segment, n: int, call: Call) -> None:
        if call.call_id in self.lost:
            _event(segment, "lost", n, call)
        segment.calls.append(n)
        segment.tail = n
        self.segment_of[n] = segment

    def _retried(self, n: int, call: Call) -> int | None:
        """The earlier call that this one repeats."""
        if call.extension != Extension.RETRY and call.branch_reason != BranchReason.RETRY:
            return None
        same = [m for m in self.by_prompt.get(call.prompt_node or "", []) if m < n]
        return same[-1] if same else None

    def _opening(self, n: int, call: Call, lane: Lane) -> dict[str, Any] | None:
        if call.fork_check is None:
            at = self.number.get(call.continues_from or "")
            if call.agent_role in SUMMARIES and call.branch_reason == BranchReason.COMPACTION:
                return {"kind": "summary", "at": at}
            if call.call_id in self.compactions:
                told = asdict(self.compactions[call.call_id])
                figures = ("tokens_before", "tokens_after", "summary_tokens", "copied_tokens")
                return {"kind": "compaction", "at": at, **{name: told[name] for name in figures}}
            if not lane.segments:
                return None
        unrelated = self.parent[n - 1] is None and (lane.kind == "unknown" or call.branch_reason is None)
        return {
            "kind": "conversation" if unrelated and call.fork_check is None else "fork",
            "at": self.parent[n - 1],
            "reason": None if call.branch_reason is None else str(call.branch_reason),
            "false": call.fork_check is not None,
            "check": call.fork_check,
            "first_difference_message": call.first_difference_message,
            "first_difference_token": call.first_difference_token,
            "tokens_lost": call.tokens_lost,
            "echo_difference": call.echo_difference,
        }

    def _nested(self) -> tuple[Lane, ...]:
        """Hang every sub-agent under the segment that started it; what has no place stays on top, main first."""
        top: list[Lane] = []
        for lane in self.lanes.values():
            host = self.segment_of.get(lane.spawned_at) if lane.spawned_at is not None else None
            if host is None or host in lane.segments:
                top.append(lane)
            else:
                host.agents.append(lane)
        order = {"main": 0, "sub_agent": 1, "side": 2, "unknown": 3}
        return tuple(sorted(top, key=lambda lane: (order[lane.kind], lane.calls[:1])))

    def _title(self, call: Call) -> str | None:
        """First line of the first user message, without what a harness puts between tags."""
        blob = getattr(self.execution.run, "blob", None)
        if blob is None or call.prompt_node is None:
            return None
        names = [
            m for i in self.tree.path(self.tree.index[call.prompt_node]).tolist() for m in self.tree.message_blobs(i)
        ]
        for name in names:
            try:
                message = parsed(blob(name))
            except (KeyError, DataError):  # a title is an extra: `gyre verify` names what is wrong with a blob
                continue
            if isinstance(message, dict) and message.get("role") == "user":
                text = _INSERTED.sub(" ", str(message.get("content") or "")).strip()
                return shorten(text.splitlines()[0][:_TITLE_CHARS], 48, placeholder=" ...") if text else None
        return None


def _event(segment: Segment, kind: str, n: int, call: Call, taken_over_by: int | None = None) -> None:
    """Note a call that was tried again or lost; the note that it was tried again takes the older note's place."""
    segment.events = [event for event in segment.events if event["call"] != n]
    segment.events.append(
        {"kind": kind, "call": n, "status": str(call.status), "error": call.error, "taken_over_by": taken_over_by}
    )
