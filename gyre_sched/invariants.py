"""The rules that keep runs whole, I1-I12 of docs/scheduler.md, checked on a simulation after every event.

`check_policy` is what tells whether a policy of your own is sound; the tests of this project run it on those that ship.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from .actions import (
    Action,
    CellFailed,
    CloseBurst,
    Dispatch,
    Event,
    GroupDropped,
    StepApplied,
    ToRollout,
    ToTrain,
)
from .api import Cell, Plan, Policy, Role, Snapshot
from .durations import TwoLevel
from .errors import PolicyError
from .history import History, Plans
from .scenario import Failures, Scenario
from .simulate import Simulation
from .state import State

__all__ = ["Invariants", "check_policy"]

_AWAY = (Role.ROLLOUT, Role.TO_ROLLOUT)


class Invariants:
    """Attach it to a simulation; `check` raises PolicyError with the number of the rule that does not hold."""

    def __init__(self, simulation: Simulation, also: Callable[[float, Action | Event], None] | None = None) -> None:
        self.simulation, self.state = simulation, simulation.state
        self.failed = False
        self._also = also
        self._records: list[tuple[float, Action | Event]] = []
        self._depth = 0
        self._dropped = 0
        self._consumed: set[str] = set()
        self._moves: Counter[str] = Counter()
        self._version = self.state.version
        simulation.on_record = self._record

    def check(self) -> None:
        """Everything that must hold while nothing is in the middle of being applied."""
        state = self.state
        core = state.cells[state.core]
        serving = [cell for cell in state.cells.values() if cell.role is Role.ROLLOUT]
        self._must("I1", sum(cell.core for cell in state.cells.values()) == 1, "one cell is the core")
        self._must("I1", state.burst is None or core.role not in _AWAY, "the core stays while a burst is open")
        self._cover(serving)
        self._must("I3", bool(serving) or not self.simulation.speed, "only serving cells work for executions")
        self._step()
        groups = state.groups
        known = groups.dispatched - groups.consumed - groups.dropped
        self._must("I7", len(groups.outstanding) == known, "outstanding = dispatched - consumed - dropped")
        left = sum(len(group.unfinished) for group in groups.outstanding.values())
        self._must("I7", groups.unfinished == left, "U counts every unfinished execution once")
        batch = state.params.batch_groups
        self._must("I8", groups.consumed == state.version * batch, "each step consumes exactly B groups")
        waited = sum(state.version - group.version for group in groups.outstanding.values())
        identity = self._depth - groups.consumed == groups.staleness_sum + waited
        self._must("I8", identity or bool(self._dropped), "mean staleness = mean depth - 1")
        self._must("I9", self.simulation.quiet(), "decide() wants nothing more once its actions are applied")
        self._must("I12", len(state.cells) == self.simulation.scenario.cells, "no cell is lost from the count")
        drains = all(cell.role is not Role.DRAINING for cell in state.cells.values())
        self._must("I12", drains, "draining ends")

    def replayed(self) -> State:
        """I9: the state that the records alone give; compare its snapshot with that of the simulation."""
        fresh = Simulation(self.simulation.scenario, _Still(), seed=self.simulation.seed).state
        for now_s, record in self._records:
            self._must("I9", fresh.apply(record, now_s) is None, "a replayed record is accepted again")
        return fresh

    def _record(self, now_s: float, record: Action | Event) -> None:
        self._records.append((now_s, record))
        if self._also:
            self._also(now_s, record)
        state = self.state
        if isinstance(record, StepApplied):
            self._must("I6", record.version == self._version + 1, "the version moves by one")
            self._version = record.version
            self._depth += len(state.groups.outstanding) + state.params.batch_groups
        elif isinstance(record, GroupDropped):
            self._dropped += 1
        elif isinstance(record, CellFailed):
            self.failed = True
        elif isinstance(record, ToTrain | ToRollout):
            self._moves[record.cell] += 1
            most = max(self._moves.values())
            self._must("I11", self.failed or most <= 2, "a cell moves at most twice per burst")
        elif isinstance(record, CloseBurst | Dispatch):
            self._moves = Counter()

    def _cover(self, serving: Sequence[Cell]) -> None:
        state = self.state
        if not state.groups.unfinished or len(serving) >= state.params.min_rollout:
            return
        self._must("I2", self.failed, "enough cells serve while executions are unfinished")
        fleet = state.fleet
        movable = [cell for cell in fleet.idle if not cell.core and (fleet.core.role is Role.TRAIN or not cell.held)]
        self._must("I2", bool(serving or fleet.returning or not movable), "the first idle cell goes to rollout")

    def _step(self) -> None:
        state, step = self.state, self.state.step
        if step is None:
            return
        places = [set(step.pending), set(step.running), set(step.held), set(step.reduced)]
        total = len(step.pending) + sum(len(place) for place in places[1:])
        wanted = len(step.groups) * state.params.microsteps_per_group
        self._must("I4", total == wanted == len(set().union(*places)), "each micro-step is in exactly one place")
        held: Counter[str] = Counter(step.held.values())
        for cell in state.cells.values():
            self._must("I5", cell.held == held[cell.id], f"{cell.id} holds what the step says it holds")
            runs = [key for key, runner in step.running.items() if runner == cell.id]
            self._must("I4", runs == ([cell.running] if cell.running else []), f"{cell.id} runs what the step says")
            right = cell.role is Role.TRAIN or not (cell.held or runs)
            self._must("I5", right, f"{cell.id} is {cell.role} and holds nothing of the step")

    def _must(self, number: str, right: bool, rule: str) -> None:
        if not right:
            raise PolicyError(f"{number} broken at {self.simulation.now_s / 3600:.3f} h: {rule}")


class _Still:
    """Does nothing, so that a state stays as it was made."""

    def decide(self, snapshot: Snapshot) -> list[Action]:
        return []


def check_policy(make: Callable[[], Policy], *, seeds: Sequence[int] = (0, 1, 2), steps: int = 9) -> list[str]:
    """What is wrong with a policy, in words; empty for a sound one.

    Runs it over 1, 3 and 8 cells, with and without contention and failures, and checks I1-I12 after every event. `make`
    gives a new policy object: the rules are checked on two that share nothing, which must decide alike.
    """
    problems: dict[str, str] = defaultdict(str)
    for seed in seeds:
        for name, scenario in _cases(steps).items():
            try:
                _run(scenario, make, seed)
            except PolicyError as error:
                problems[name] = f"{name}, seed {seed}: {error}"
    return list(problems.values())


def _cases(steps: int) -> dict[str, Scenario]:
    base = Scenario(
        durations=TwoLevel(mean_s=3600.0, cv_query=0.3, cv_execution=0.4),
        steps=steps,
        cells=8,
        batch_groups=4,
        group_size=4,
        train_cell_h=2.0,
        timeout_h=2.5,
    )
    return {
        "8 cells": base,
        "3 cells": replace(base, cells=3),
        "1 cell": replace(base, cells=1),
        "contention": replace(base, saturation_batches=1.5),
        "failures every 8 h": replace(base, failures=Failures(mean_between_h=8.0)),
        "failures every 3 h, 3 cells": replace(base, cells=3, failures=Failures(mean_between_h=3.0)),
    }


def _run(scenario: Scenario, make: Callable[[], Policy], seed: int) -> None:
    twice = _TwicePlanned if hasattr(make(), "plan") else _Twice
    simulation = Simulation(scenario, twice(make(), make()), seed=seed)
    rules = Invariants(simulation)
    while simulation.state.version < scenario.steps:
        simulation.advance()
        rules.check()


class _Twice:
    """Asks two objects made alike, each twice; a policy that remembers something shows."""

    def __init__(self, one: Policy, other: Policy) -> None:
        self.one, self.other = one, other
        self.tick_s = getattr(one, "tick_s", 0.0)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        actions = self.one.decide(snapshot)
        if self.one.decide(snapshot) != actions:
            raise PolicyError("I9 broken: decide() gives another answer to the same snapshot; it must be pure")
        if actions and self.other.decide(snapshot) != actions:
            raise PolicyError("I9 broken: a policy object made anew decides otherwise; keep no memory in it")
        return actions


class _TwicePlanned(_Twice):
    """The same for a policy that plans."""

    def plan(self, history: History) -> Plan | None:
        plan = cast(Plans, self.one).plan(history)
        if cast(Plans, self.other).plan(history) != plan:
            raise PolicyError("I9 broken: plan() gives another answer to the same history; it must be pure")
        return plan
