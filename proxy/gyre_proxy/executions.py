"""The executions of a run: who may call, what each has going, and the rows that say so.

An execution is `queued` until a launcher claims it (or a harness simply calls), then `claimed` or `running`, then
`ended`. Every change is durable before it is answered, and all of it is read back when the proxy starts again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gyre_data.errors import ConfigError
from gyre_data.schema import EndReason
from gyre_data.types import EnvironmentState, ExecutionEvent, GroupEvent, PolicyVersion, Score

from .dialects.reading import Reader
from .experts import KnownExperts
from .recorder import Scope

if TYPE_CHECKING:
    from .generation import Generation
    from .history import History

__all__ = ["Execution", "Executions", "end_reason", "key_hash", "new_execution_id", "new_key"]


def key_hash(key: str) -> str:
    """What is kept of a key. Keys are 192 random bits, so a plain hash gives nothing away."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class Execution:
    """One harness run. `lock` orders what touches `history`; nothing waits for an engine under it."""

    execution_id: str
    group_id: str | None = None
    task_id: str | None = None
    sample_index: int | None = None
    harness: str | None = None
    launcher: dict[str, Any] = field(default_factory=dict)
    attributes: str | None = None
    key_hashes: set[str] = field(default_factory=set)
    state: str = "running"
    end_reason: str | None = None
    dispatched_at: float | None = None
    environment: EnvironmentState | None = None
    """The state captured last."""
    num_calls: int = 0
    num_elsewhere: int = 0
    """Calls in flight in another process."""
    scores: dict[str, Score] = field(default_factory=dict)
    """The latest verdict of each evaluator."""
    readers: defaultdict[str, Reader] = field(default_factory=lambda: defaultdict(Reader))
    """Know the bodies of its calls, one for each wire: the same bytes mean other things on another."""
    used_at: float = 0.0
    """When its history was last asked for (monotonic seconds)."""
    history: History | None = None
    scope: Scope = field(default_factory=Scope)
    """Belongs to `history`: its rows build on one another."""
    experts: KnownExperts = field(default_factory=KnownExperts)
    """Belongs to `history`: what of its routed experts is on record."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    generations: dict[str, Generation] = field(default_factory=dict)
    """The newest generation of each request identity, for as long as a retry of it would matter."""

    def accepts(self, key: str) -> bool:
        """Whether `key` is one of this execution's own."""
        given = key_hash(key)
        return any(hmac.compare_digest(given, known) for known in self.key_hashes)

    def describe(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.execution_id,
            "group": self.group_id,
            "task": self.task_id,
            "sample_index": self.sample_index,
            "harness": self.harness,
            "launcher": {name: value for name, value in self.launcher.items() if name != "key_sha256"},
            "attributes": json.loads(self.attributes) if self.attributes else None,
            "state": self.state,
            "end_reason": self.end_reason,
            "dispatched_at": self.dispatched_at,
            "calls": self.num_calls,
            "in_flight": self.num_elsewhere + sum(not g.done for g in self.generations.values()),
            "scored": bool(self.scores),
        }

    def started(self, version: PolicyVersion | None = None, harness_version: str | None = None) -> ExecutionEvent:
        """The row that says that it was created, or, with the weights it was dispatched under, that it runs."""
        launcher = {**self.launcher, "key_sha256": sorted(self.key_hashes)} if self.key_hashes else self.launcher
        return ExecutionEvent(
            execution_id=self.execution_id,
            event="started",
            at=datetime.now(UTC),
            group_id=self.group_id,
            task_id=self.task_id,
            sample_index=self.sample_index,
            harness=self.harness,
            harness_version=harness_version,
            launcher=json.dumps(launcher, sort_keys=True) if launcher else None,
            dispatch_policy_id=version.policy_id if version else None,
            dispatch_version=version.n if version else None,
            attributes=self.attributes,
        )


class Executions:
    """Every execution and group of the run. Single-threaded: used from the event loop only."""

    def __init__(self) -> None:
        self._all: dict[str, Execution] = {}
        self._by_sample: dict[tuple[str, int], Execution] = {}
        self.groups: dict[str, GroupEvent] = {}
        """The latest row of each group that was created as one."""

    def __iter__(self) -> Iterator[Execution]:
        return iter(self._all.values())

    def get(self, execution_id: str) -> Execution | None:
        """The execution of that id, if there is one."""
        return self._all.get(execution_id)

    def of_sample(self, group_id: str, sample_index: int) -> Execution | None:
        """The execution with that number in its group, if there is one."""
        return self._by_sample.get((group_id, sample_index))

    def add(self, execution: Execution) -> None:
        """Take in a new execution; its rows are the caller's to write."""
        self._all[execution.execution_id] = execution
        if execution.group_id is not None and execution.sample_index is not None:
            self._by_sample[(execution.group_id, execution.sample_index)] = execution

    def discard(self, execution: Execution) -> None:
        """Undo `add` when the execution's rows could not be written."""
        self._all.pop(execution.execution_id, None)
        if execution.group_id is not None and execution.sample_index is not None:
            self._by_sample.pop((execution.group_id, execution.sample_index), None)

    def idle(self, keep: int) -> list[Execution]:
        """Executions with a history in memory, less the `keep` that were used last; nobody waits for them."""
        live = sorted((e for e in self._all.values() if e.history is not None), key=lambda e: e.used_at)
        return [e for e in live[: max(0, len(live) - keep)] if not e.lock.locked()]

    def queued(self, limit: int, group_id: str | None = None, tasks: Collection[str] | None = None) -> list[Execution]:
        """The oldest queued executions, of one group and of some tasks only when these are given."""
        found = (
            e
            for e in self._all.values()
            if e.state == "queued" and group_id in (None, e.group_id) and (tasks is None or e.task_id in tasks)
        )
        return [execution for execution, _ in zip(found, range(limit), strict=False)]

    def load(
        self,
        events: Iterable[ExecutionEvent],
        environments: Iterable[EnvironmentState],
        scores: Iterable[Score],
        groups: Iterable[GroupEvent],
        num_calls: Mapping[str, int],
    ) -> None:
        """Read back what an earlier process wrote, in the order it was written."""
        for event in events:
            execution = self._all.get(event.execution_id) or Execution(execution_id=event.execution_id, state="queued")
            _apply(execution, event)
            self.add(execution)
        self.groups.update((group.group_id, group) for group in groups)
        for state in environments:
            if state.execution_id in self._all:
                self._all[state.execution_id].environment = state
        for score in scores:
            if score.execution_id in self._all:
                self._all[score.execution_id].scores[score.evaluator] = score
        for execution in self._all.values():
            execution.num_calls = num_calls.get(execution.execution_id, 0)
            if execution.num_calls and execution.state == "queued":
                execution.state = "running"


def _apply(execution: Execution, event: ExecutionEvent) -> None:
    if event.event == "ended":
        execution.state = "ended"
        execution.end_reason = str(event.end_reason) if event.end_reason else None
        return
    for name in ("group_id", "task_id", "sample_index", "harness", "attributes"):
        if getattr(event, name) is not None:
            setattr(execution, name, getattr(event, name))
    if event.launcher:
        launcher = json.loads(event.launcher)
        execution.key_hashes |= set(launcher.pop("key_sha256", ()))
        execution.launcher = launcher
    if event.dispatch_policy_id is not None and execution.state != "ended":
        execution.state = "claimed" if execution.key_hashes else "running"
        execution.dispatched_at = event.at.timestamp()


def new_execution_id() -> str:
    """An id for an execution whose creator gave none."""
    return f"e_{secrets.token_hex(6)}"


def new_key() -> str:
    """A key for one execution; only its hash is kept."""
    return f"gyre-{secrets.token_urlsafe(24)}"


def end_reason(text: str) -> EndReason:
    """Read an end reason; raise ConfigError that names the known ones."""
    known = [str(reason) for reason in EndReason if reason is not EndReason.UNKNOWN_VALUE]
    if text not in known:
        raise ConfigError(f"wanted an end reason, one of {', '.join(known)}, got {text!r}")
    return EndReason(text)
