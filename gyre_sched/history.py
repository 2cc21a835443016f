"""What a ledger tells of durations and costs, for a planner: a fold over its records, so a restart gives the same."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from .actions import (
    Action,
    AssignMicrostep,
    CloseBurst,
    Dispatch,
    Event,
    ExecutionEnded,
    GroupDropped,
    MicrostepDone,
    Planned,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
    WeightsPublished,
    WeightsPulled,
)
from .api import Cell, Costs, Params, Plan, Role
from .durations import speed
from .state import State

__all__ = ["History", "Plans", "Sample"]

_RECENT_GROUPS = 512
"""What a fit looks at: durations drift while a policy learns."""


class Plans(Protocol):
    """A policy that plans. The driver asks when a burst ends, and puts the answer into the ledger."""

    def plan(self, history: History) -> Plan | None:
        """Return what stands from now on; None keeps what stands."""
        ...


@dataclass(kw_only=True, slots=True)
class Sample:
    """A group's executions in seconds at full speed, the slowing by contention taken out."""

    predicted_s: float | None
    started_s: float
    """On the clock of progress."""
    ended: list[float] = field(default_factory=list)
    """Of those that finished."""
    cut: list[float] = field(default_factory=list)
    """How far those came that a timeout or the scheduler ended: they would have taken longer."""
    left: set[int] = field(default_factory=set)

    @property
    def executed_s(self) -> float:
        """All that was worked for it until now."""
        return sum(self.ended) + sum(self.cut)


class History:
    """Told every record after the state has taken it."""

    def __init__(self, state: State, *, timeout_s: float, engine_share: float) -> None:
        self.state, self.timeout_s, self.engine_share = state, timeout_s, engine_share
        self.executions = 0
        """Ended until now."""
        self.planned_at = 0
        """Executions ended when the last plan was made."""
        self.progress_s = 0.0
        """Time that an execution dispatched at the start would have worked by now."""
        self._now_s = self._speed = 0.0
        self._open: dict[str, Sample] = {}
        self._done: deque[Sample] = deque(maxlen=_RECENT_GROUPS)
        self._executed_s: dict[str, float] = {}
        self._claimed_s: dict[str, float] = {}
        self._moved_s: dict[str, float] = {}
        self._joined_s: dict[str, float] = {}
        self._closing_s = self._applied_s = self._closed_s = 0.0
        self._trained_s = self._trained_for_s = 0.0
        self._sums: dict[str, list[float]] = {}

    @property
    def params(self) -> Params:
        """Of the run."""
        return self.state.params

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Of the run, those that are down with them."""
        return tuple(self.state.cells.values())

    @property
    def bursts(self) -> int:
        """Ended until now."""
        return self.state.groups.bursts

    @property
    def dispatched(self) -> int:
        """Groups dispatched until now."""
        return self.state.groups.dispatched

    @property
    def plan(self) -> Plan | None:
        """The one that stands."""
        return self.state.groups.plan

    @property
    def costs(self) -> Costs:
        """Means until now; 0 where nothing was measured."""
        return Costs(**{name: self.mean_s(name) for name in ("to_train_s", "to_rollout_s", "optimiser_s", "pull_s")})

    @property
    def training_share(self) -> float:
        """Cell-seconds of micro-steps for a second that an execution worked; 0 before the first step."""
        return self._trained_s / self._trained_for_s if self._trained_for_s else 0.0

    def mean_s(self, name: str) -> float:
        """Mean of what was measured under this name."""
        values = self._sums.get(name)
        return values[0] / values[1] if values else 0.0

    def count(self, name: str) -> int:
        """How often that was measured."""
        return int(self._sums[name][1]) if name in self._sums else 0

    def samples(self) -> list[Sample]:
        """The newest groups; what still runs counts as cut where it stands, else the longest were left out."""
        running = [
            Sample(
                predicted_s=one.predicted_s,
                started_s=one.started_s,
                ended=one.ended,
                cut=one.cut + [self.progress_s - one.started_s] * len(one.left),
            )
            for one in self._open.values()
        ]
        return [*self._done, *running]

    def record(self, now_s: float, record: Action | Event) -> None:
        """Take a record that was applied."""
        self.progress_s += (now_s - self._now_s) * self._speed
        self._now_s = now_s
        if isinstance(record, ExecutionEnded):
            self._ended(record)
        elif isinstance(record, Dispatch):
            for query in record.queries:
                predicted_s = self.state.groups.outstanding[query].predicted_s
                members = set(range(self.params.group_size))
                self._open[query] = Sample(predicted_s=predicted_s, started_s=self.progress_s, left=members)
        elif isinstance(record, GroupDropped):
            self._open.pop(record.query, None)
        elif isinstance(record, Planned):
            self.planned_at = self.executions
        else:
            self._measure(now_s, record)
        self._speed = speed(self.state.groups.unfinished, self.state.fleet.capacity, self.engine_share)

    def _ended(self, record: ExecutionEnded) -> None:
        sample = self._open.get(record.query)
        if sample is None:
            return
        sample.left.discard(record.member)
        worked_s = self.progress_s - sample.started_s
        self.executions += 1
        if record.status == "finished":
            sample.ended.append(worked_s)
        elif record.status in ("timed_out", "partial"):
            sample.cut.append(worked_s)
        if not sample.left:
            self._done.append(self._open.pop(record.query))
            self._executed_s[record.query] = sample.executed_s

    def _measure(self, now_s: float, record: Action | Event) -> None:
        step = self.state.step
        if isinstance(record, AssignMicrostep):
            self._claimed_s[record.cell] = now_s
        elif isinstance(record, MicrostepDone):
            self._trained_s += now_s - self._claimed_s.pop(record.cell, now_s)
            self._trained_for_s += self._executed_s.get(record.key[1], 0.0) / self.params.microsteps_per_group
            if step is not None and step.closing:
                self._closing_s = now_s
        elif isinstance(record, ToTrain | ToRollout):
            self._moved_s[record.cell] = now_s
        elif isinstance(record, SwitchDone):
            role = self.state.cells[record.cell].role
            name = "to_train_s" if role is Role.TRAIN else "to_rollout_s"
            self._measured(name, now_s - self._moved_s.pop(record.cell, now_s))
            self._joined_s[record.cell] = now_s
        elif isinstance(record, StepApplied):
            self._applied_s = now_s
            self._measured("optimiser_s", now_s - self._closing_s)
        elif isinstance(record, WeightsPulled):
            since_s = max(self._applied_s, self._joined_s.get(record.cell, 0.0))
            self._measured("pull_s", now_s - since_s)
        elif isinstance(record, CloseBurst):
            self._closed_s = now_s
        elif isinstance(record, WeightsPublished):
            self._measured("publish_s", now_s - self._closed_s)

    def _measured(self, name: str, seconds: float) -> None:
        values = self._sums.setdefault(name, [0.0, 0])
        values[0] += seconds
        values[1] += 1
