"""A discrete-event simulator of cells: it drives the same State and the same policy objects as real cells do.

Model. Requests spread over all serving cells, so executions progress at one common speed: full while the serving
capacity covers them, else 1 / (phi / s + 1 - phi) with s the share that is covered and phi the share of an execution's
time that an engine works for it. A cell does nothing while it switches. Micro-steps take time in proportion to the
executed time of their group. Queries are drawn in one order per seed: policies with one seed see the same first ones.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, cast

from .actions import (
    Action,
    AssignMicrostep,
    CellFailed,
    CellRecovered,
    CloseBurst,
    Dispatch,
    Drained,
    Event,
    ExecutionEnded,
    GroupReady,
    MicrostepDone,
    Planned,
    QueriesOffered,
    ReturnPartial,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
    WeightsPublished,
    WeightsPulled,
)
from .api import Cell, Costs, Plan, Policy, Query, Role
from .durations import lognormal, speed
from .errors import PolicyError
from .history import History, Plans
from .measure import Measured, Watch
from .scenario import Scenario
from .state import Refusal, State

__all__ = ["Simulation", "simulate"]

_MAX_ROUNDS = 200
_LOOKAHEAD_BATCHES = 16
_ROUNDING_S = 1e-6
_NONE: set[int] = set()
_STANDSTILL = 50
"""Times the timeout and a step's work in which a step must come; failures alone keep events pending for ever."""


def simulate(
    scenario: Scenario, policy: Policy, *, seed: int = 0, trace: bool = False, plan: Plan | None = None
) -> Measured:
    """Run `policy` to the scenario's last step; PolicyError when it is unsafe, does not settle, or stops the run.

    With a `plan` that one stands for the whole run, else a policy that plans is asked at the end of each burst.
    """
    simulation = Simulation(scenario, policy, seed=seed, trace=trace, plan=plan)
    while simulation.state.version < scenario.steps:
        simulation.advance()
    return simulation.measured()


class Simulation:
    """One run, an event at a time; tests look at `state` between events."""

    def __init__(
        self, scenario: Scenario, policy: Policy, *, seed: int = 0, trace: bool = False, plan: Plan | None = None
    ) -> None:
        self.scenario, self.policy, self.seed = scenario, policy, seed
        cells = [Cell(id=f"c{i}", position=i, capacity=scenario.capacity, core=i == 0) for i in range(scenario.cells)]
        self.state = State(scenario.params, cells)
        self.state.costs = Costs(
            to_train_s=scenario.to_train_s,
            to_rollout_s=scenario.to_rollout_s,
            optimiser_s=scenario.optimiser_s,
            pull_s=scenario.pull_s,
        )
        self.now_s = 0.0
        self.watch = Watch(trace=trace)
        self.on_record: Callable[[float, Action | Event], None] | None = None
        """Told of every record that changed the state, in order: a ledger."""
        self._random = random.Random(seed)
        self._guess = random.Random(f"{seed}/estimates")
        self._luck = random.Random(f"{seed}/failures")
        self._number = count()
        self._drawn = 0
        self._follow: dict[type, Callable[[Any], None]] = {
            AssignMicrostep: self._run_microstep,
            ToTrain: self._switch,
            ToRollout: self._switch,
            Dispatch: self._dispatched,
            CloseBurst: self._closed,
            ReturnPartial: lambda action: self._end(action.query, action.member, "partial"),
            MicrostepDone: self._microstep_done,
            SwitchDone: self._role_changed,
            CellFailed: self._role_changed,
            CellRecovered: self._role_changed,
            StepApplied: self._step_applied,
        }
        self._later: list[tuple[float, int, Callable[[], Event]]] = []
        self._progress_s = 0.0
        """Time that an execution dispatched at the start would have worked by now."""
        self.speed = 0.0
        """Of every unfinished execution, 1 where capacity covers them all."""
        self._finishing: list[tuple[float, int, str, int]] = []
        self._deadlines: deque[tuple[float, str]] = deque()
        self._seconds: dict[str, tuple[float, ...]] = {}
        self._started_s: dict[str, float] = {}
        self._executed_s: dict[str, float] = {}
        self._ready_s: dict[str, float] = {}
        self._claimed_s: dict[str, float] = {}
        self._optimising: tuple[int, int] | None = None
        self._publishing = 0
        self._dispatched_s = 0.0
        self._needed_s = 0.0
        for cell in cells:
            self.watch.role(cell.id, cell.role, 0.0)
            self._schedule_failure(cell.id)
        self._tick_s: float = getattr(policy, "tick_s", 0.0)
        self._history: History | None = None
        if plan is not None:
            self.tell(Planned(plan=plan))
        elif hasattr(policy, "plan"):
            self._history = History(self.state, timeout_s=scenario.timeout_h * 3600, engine_share=scenario.engine_share)
        self._offer()
        self.settle()

    # Time.

    def advance(self) -> None:
        """Go to the next moment at which something happens, apply all of it, and let the policy settle."""
        next_s = min(self._later[0][0] if self._later else math.inf, self._next_finish())
        if self._deadlines and self._deadlines[0][0] <= next_s:
            next_s = min(next_s, self._next_deadline())
        if self._tick_s:
            next_s = min(next_s, (self.now_s // self._tick_s + 1) * self._tick_s)
        last_s = self.watch.step_ends_s[-1] if self.watch.step_ends_s else 0.0
        longest_h = _STANDSTILL * (self.scenario.timeout_h + self.scenario.train_cell_h)
        if next_s - last_s > longest_h * 3600:
            state = self.state
            raise PolicyError(
                f"I10 broken: step {state.version + 1} never comes; all stands still at {self.now_s / 3600:.2f} h "
                f"with {len(state.groups.outstanding)} groups outstanding and {state.groups.unfinished} executions "
                "unfinished; the policy must dispatch, or move a cell"
            )
        self._pass(next_s)
        while self._later and self._later[0][0] <= self.now_s:
            self.tell(heapq.heappop(self._later)[2]())
        while self._deadlines and self._deadlines[0][0] <= self.now_s:
            query = self._deadlines.popleft()[1]
            for member in sorted(self._left(query)):
                self._end(query, member, "timed_out")
        while self._finishing and self._finishing[0][0] <= self._progress_s + _ROUNDING_S:
            _, _, query, member = heapq.heappop(self._finishing)
            if member in self._left(query):
                self._end(query, member, "finished")
        self.settle()

    def settle(self) -> None:
        """Ask the policy until it wants nothing more."""
        for _ in range(_MAX_ROUNDS):
            actions = self.policy.decide(self.state.snapshot(self.now_s))
            if not actions:
                self._set_speed()
                return
            for action in actions:
                self.act(action)
        raise PolicyError(
            f"wanted the policy to settle within {_MAX_ROUNDS} rounds, it still asks for {actions[:3]}; "
            "decide() must return nothing when what it asked for is under way"
        )

    def quiet(self) -> bool:
        """Whether the policy wants nothing now."""
        return not self.policy.decide(self.state.snapshot(self.now_s))

    def act(self, action: Action) -> Refusal | None:
        """Apply an action and what follows from it; an unsafe one is a PolicyError."""
        refusal = self.state.apply(action, self.now_s)
        if refusal is Refusal.UNSAFE:
            raise PolicyError(
                f"unsafe action at {self.now_s / 3600:.3f} h: {action}; see the rules in docs/scheduler.md"
            )
        if refusal is None:
            self._applied(action)
        return refusal

    def tell(self, event: Event) -> Refusal | None:
        """Apply an event and what follows from it."""
        refusal = self.state.apply(event, self.now_s)
        if refusal is None:
            self._applied(event)
        return refusal

    def _applied(self, record: Action | Event) -> None:
        if self._history is not None:
            self._history.record(self.now_s, record)
        if self.on_record is not None:
            self.on_record(self.now_s, record)
        follow = self._follow.get(type(record))
        if follow is not None:
            follow(record)
        self._duties()

    def _pass(self, until_s: float) -> None:
        passed = until_s - self.now_s
        unfinished, capacity = self.state.groups.unfinished, self.state.fleet.capacity
        self.watch.served_s += capacity * passed
        self.watch.used_s += min(unfinished, capacity) * passed
        self._progress_s += passed * self.speed
        self.now_s = until_s

    def _set_speed(self) -> None:
        self.speed = speed(self.state.groups.unfinished, self.state.fleet.capacity, self.scenario.engine_share)

    def _next_finish(self) -> float:
        while self._finishing and self._finishing[0][3] not in self._left(self._finishing[0][2]):
            heapq.heappop(self._finishing)
        if not self._finishing or not self.speed:
            return math.inf
        return max(self.now_s, self.now_s + (self._finishing[0][0] - self._progress_s) / self.speed)

    def _next_deadline(self) -> float:
        while self._deadlines and not self._left(self._deadlines[0][1]):
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _left(self, query: str) -> set[int]:
        group = self.state.groups.outstanding.get(query)
        return group.unfinished if group is not None else _NONE

    def _after(self, seconds: float, event: Callable[[], Event]) -> None:
        heapq.heappush(self._later, (self.now_s + seconds, next(self._number), event))

    # What follows from actions and events.

    def _dispatched(self, action: Dispatch) -> None:
        for query in action.queries:
            self._dispatch(query)
        self._dispatched_s = self.now_s
        self._offer()

    def _closed(self, action: CloseBurst) -> None:
        self.watch.critical_s += max(0.0, self._needed_s - self._dispatched_s)
        plan = None if self._history is None else cast(Plans, self.policy).plan(self._history)
        if plan is not None:
            self.tell(Planned(plan=plan))

    def _switch(self, action: ToTrain | ToRollout) -> None:
        name = action.cell
        cell = self.state.cells[name]
        seconds = self.scenario.to_train_s if cell.role is Role.DRAINING else self.scenario.to_rollout_s
        self.watch.switches += 1
        self.watch.role(name, cell.role, self.now_s)
        if cell.role is Role.DRAINING:
            self.tell(Drained(cell=name, epoch=cell.epoch))

        def done() -> Event:
            state = self.state
            version = state.rollout_version if cell.role is Role.TO_ROLLOUT else state.version
            return SwitchDone(cell=name, epoch=cell.epoch, version=version)

        self._after(seconds, done)

    def _dispatch(self, query: str) -> None:
        seconds = self._seconds[query]
        self._started_s[query], self._executed_s[query] = self._progress_s, 0.0
        self._deadlines.append((self.now_s + self.scenario.timeout_h * 3600, query))
        for member, needed_s in enumerate(seconds):
            heapq.heappush(self._finishing, (self._progress_s + needed_s, next(self._number), query, member))

    def _run_microstep(self, action: AssignMicrostep) -> None:
        query = action.key[1]
        scenario = self.scenario
        mean_s = scenario.durations.mean_s * scenario.group_size
        group_s = scenario.train_cell_h * 3600 / scenario.batch_groups * self._executed_s[query] / mean_s
        self._claimed_s[action.cell] = self.now_s
        self._after(
            group_s / scenario.microsteps_per_group,
            lambda: MicrostepDone(cell=action.cell, epoch=action.epoch, key=action.key),
        )

    def _end(self, query: str, member: int, status: str) -> None:
        watch, wall_s = self.watch, self.now_s - self.state.groups.outstanding[query].dispatched_s
        self._executed_s[query] += self._progress_s - self._started_s[query]
        watch.ended += 1
        watch.timed_out += status == "timed_out"
        watch.execution_s += wall_s
        self.tell(ExecutionEnded(query=query, member=member, status=status))
        if not self.state.groups.outstanding[query].unfinished:
            watch.queries += 1
            watch.query_s += wall_s
            self._ready_s[query] = self.now_s
            self.tell(GroupReady(query=query))

    def _microstep_done(self, event: MicrostepDone) -> None:
        self.watch.worked(event.cell, "busy", self._claimed_s[event.cell], self.now_s)

    def _role_changed(self, event: SwitchDone | CellFailed | CellRecovered) -> None:
        cell = self.state.cells[event.cell]
        self.watch.role(cell.id, cell.role, self.now_s)
        if isinstance(event, CellFailed):
            epoch = cell.epoch
            self._after(self.scenario.failures.repair_h * 3600, lambda: CellRecovered(cell=cell.id, epoch=epoch))
            if cell.core:
                self._pull()
        elif isinstance(event, CellRecovered):
            self._schedule_failure(cell.id)

    def _step_applied(self, event: StepApplied) -> None:
        self.watch.step_ends_s.append(self.now_s)
        self.watch.worked(self.state.core, "optimiser", self.now_s - self.scenario.optimiser_s, self.now_s)
        self._pull()

    def _pull(self) -> None:
        """Satellites that train get the newest weights."""
        version = self.state.version
        for cell in self.state.cells.values():
            if cell.role is Role.TRAIN and cell.version < version:
                pulled = partial(WeightsPulled, cell=cell.id, epoch=cell.epoch, version=version)
                self._after(self.scenario.pull_s, pulled)

    def _duties(self) -> None:
        """What a driver does by itself: the optimiser step of a full step, and publication between bursts."""
        state, step = self.state, self.state.step
        if step is not None and step.closing and self._optimising != (step.index, step.generation):
            self._optimising = (step.index, step.generation)
            for query in step.groups:
                staleness = state.version - state.groups.outstanding[query].version
                self.watch.weighted += staleness * self._executed_s[query]
                self.watch.weight += self._executed_s[query]
            self._needed_s = max(self._ready_s[query] for query in step.groups)
            applied = StepApplied(version=state.version + 1, generation=step.generation)
            self._after(self.scenario.optimiser_s, lambda: applied)
        if state.burst is None and max(state.rollout_version, self._publishing) < state.version:
            self._publishing = state.version
            published = WeightsPublished(version=state.version)
            if self.scenario.publish_s:
                self._after(self.scenario.publish_s, lambda: published)
            else:
                self.tell(published)

    def _schedule_failure(self, name: str) -> None:
        mean_h = self.scenario.failures.mean_between_h
        if mean_h:
            self._after(
                self._luck.expovariate(1 / (mean_h * 3600)),
                lambda: CellFailed(cell=name, epoch=self.state.cells[name].epoch),
            )

    def _offer(self) -> None:
        """Keep the window of upcoming queries full."""
        scenario = self.scenario
        queries = []
        for _ in range(_LOOKAHEAD_BATCHES * scenario.batch_groups - len(self.state.upcoming)):
            draw = scenario.durations.draw(self._random, scenario.group_size)
            name = f"q{self._drawn}"
            self._drawn += 1
            self._seconds[name] = draw.seconds
            error = scenario.prediction_error
            predicted_s = None if error < 0 else draw.query_s * lognormal(self._guess, error)
            queries.append(Query(id=name, predicted_s=predicted_s))
        self.tell(QueriesOffered(queries=tuple(queries)))

    def measured(self) -> Measured:
        """What the run measured until now."""
        scenario, watch, groups = self.scenario, self.watch, self.state.groups
        watch.finish(self.now_s)
        mean_s = watch.execution_s / max(1, watch.ended)
        batch_s = scenario.batch_groups * scenario.group_size * mean_s / scenario.capacity
        return Measured(
            seed=self.seed,
            steps=self.state.version,
            hours=self.now_s / 3600,
            work_bound_h=self.state.version * (scenario.train_cell_h + batch_s / 3600) / scenario.cells,
            critical_path_h=watch.critical_s / 3600,
            staleness_groups=groups.staleness_sum / max(1, groups.consumed),
            staleness_tokens=watch.weighted / max(1e-9, watch.weight),
            staleness_max=groups.staleness_max,
            train_idle=1 - watch.busy_s / max(1e-9, watch.in_role[Role.TRAIN]),
            rollout_idle=1 - watch.used_s / max(1e-9, watch.served_s),
            switches=watch.switches,
            bursts=groups.bursts,
            executions=watch.ended,
            executions_timed_out=watch.timed_out,
            execution_mean_h=mean_s / 3600,
            query_mean_h=watch.query_s / max(1, watch.queries) / 3600,
            step_ends_h=tuple(end_s / 3600 for end_s in watch.step_ends_s),
            spans=tuple(watch.spans),
        )
