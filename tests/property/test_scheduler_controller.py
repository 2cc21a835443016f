"""I1-I12 in the controller: it is killed between any two lines of its ledger, cells fail, duties and events get lost.

The world does each duty once, in any order, while a controller lives or not. What the controller wrote is folded into a
second state, which must be the controller's own after every turn, and on which the rules are checked.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gyre_sched.actions import (
    Action,
    CellFailed,
    CellRecovered,
    Drained,
    Event,
    ExecutionEnded,
    GroupDropped,
    GroupReady,
    MicrostepDone,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    WeightsPublished,
    WeightsPulled,
)
from gyre_sched.api import Cell, Params, Policy, Query, Role
from gyre_sched.controller import Controller, Duty, Task
from gyre_sched.invariants import Invariants
from gyre_sched.ledger import read
from gyre_sched.policies import Async, CarryOver, Cohort, Colocate, Planner, Waterlevel
from gyre_sched.state import State

POLICIES = [
    Waterlevel(),
    Waterlevel(burst=1, depth=2.5),
    CarryOver(),
    Cohort(),
    Planner(),
    Colocate(burst=2, depth=2.0),
    Async(rollout_cells=1, streaming=True),
]
MEMBERS, CAPACITY = 2, 3
QUERIES = tuple(Query(id=f"q{i}", predicted_s=3600.0 + i % 7) for i in range(400))


class Killed(BaseException):
    """SIGKILL, as this process can have it."""


class Cells:
    """A world that does what it is told, when the test says so, and remembers what it has done."""

    def __init__(self) -> None:
        self.happened: list[tuple[int, Event]] = []
        self.open: list[Duty] = []
        self.known: set[Duty] = set()
        self.out_of_reach = 0
        """So many duties are not told."""
        self.made: Counter[int] = Counter()
        """How often the trainer made each version."""
        self.started: Counter[str] = Counter()
        self.say(QueriesOffered(queries=QUERIES))

    def say(self, *events: Event) -> None:
        for event in events:
            self.happened.append((len(self.happened) + 1, event))

    def events(self, after: int) -> Sequence[tuple[int, Event]]:
        return self.happened[after:]

    def do(self, duty: Duty) -> None:
        if self.out_of_reach:
            self.out_of_reach -= 1
            raise ConnectionError("no route")
        if duty in self.known:
            return
        self.known.add(duty)
        self.open.append(duty)
        if duty.task is Task.TO_TRAIN:
            self.say(Drained(cell=duty.of, epoch=duty.number))
        elif duty.task is Task.EXECUTE:
            self.started[duty.of] += 1

    def end(self, duty: Duty, state: State) -> None:
        """Do it; `state` is what the controller believes, which a world may read."""
        cell, number = duty.of, duty.number
        self.open.remove(duty)
        match duty.task:
            case Task.EXECUTE:
                self.say(*(ExecutionEnded(query=cell, member=m) for m in range(MEMBERS)), GroupReady(query=cell))
            case Task.TO_TRAIN:
                self.say(SwitchDone(cell=cell, epoch=number, version=state.version))
            case Task.TO_ROLLOUT:
                self.say(SwitchDone(cell=cell, epoch=number, version=state.rollout_version))
            case Task.RUN:
                self.say(MicrostepDone(cell=cell, epoch=number, key=cast(Any, duty.key)))
            case Task.PULL:
                self.say(WeightsPulled(cell=cell, epoch=number, version=cast(Any, duty.key)[0]))
            case Task.OPTIMISE:
                self.optimise(number)
                self.say(StepApplied(version=number, generation=cast(Any, duty.key)[0]))
            case Task.PUBLISH:
                self.say(WeightsPublished(version=number))
            case _:
                raise AssertionError(duty)

    def optimise(self, version: int) -> None:
        """A core that has made a version, and comes back from its checkpoint, makes it no second time."""
        if not self.made[version]:
            self.made[version] = 1

    def lose(self, cell: Cell) -> None:
        self.open = [duty for duty in self.open if duty.of != cell.id or duty.task is Task.PUBLISH]
        self.say(CellFailed(cell=cell.id, epoch=cell.epoch))


class Controlled(RuleBasedStateMachine):
    """A controller, its ledger, and all that can happen to them."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("gyre_sched.ledger.os.fsync", lambda fd: None)  # nobody pulls the plug here
        self.folder = Path(tempfile.mkdtemp(prefix="gyre-controlled-"))
        self.path, self.now_s = self.folder / "ledger.jsonl", 0.0
        self.written: list[tuple[float, Action | Event]] = []
        self.lines_left: int | None = None

    @initialize(policy=st.sampled_from(POLICIES), cells=st.sampled_from([2, 3, 4]))
    def begin(self, policy: Policy, cells: int) -> None:
        self.policy, self.world = policy, Cells()
        self.fresh: Callable[[], State] = lambda: State(
            Params(batch_groups=2, group_size=MEMBERS, microsteps_per_group=2),
            [Cell(id=f"c{i}", position=i, capacity=CAPACITY, core=i == 0) for i in range(cells)],
        )
        followed = SimpleNamespace(
            state=self.fresh(), now_s=0.0, speed=0.0, scenario=SimpleNamespace(cells=cells), on_record=None
        )
        followed.quiet = lambda: not self.policy.decide(followed.state.snapshot(self.now_s))
        self.rules, self.followed = Invariants(cast(Any, followed)), followed
        self.start()
        self.settle()

    def start(self) -> None:
        """A controller from what lies on the disk."""
        self.controller = Controller(self.fresh(), self.policy, self.world, self.path, clock=lambda: self.now_s)
        append = self.controller.ledger.append

        def writes(now_s: float, record: Action | Event, *, heard: int | None = None) -> None:
            if self.lines_left is not None:
                if not self.lines_left:
                    raise Killed
                self.lines_left -= 1
            append(now_s, record, heard=heard)
            self.written.append((now_s, record))
            assert self.followed.state.apply(record, now_s) is None, record  # I9: what is written follows
            self.followed.now_s = now_s
            self.followed.on_record(now_s, record)

        self.patch.setattr(self.controller.ledger, "append", writes)

    def settle(self) -> None:
        """Turns until there is nothing to hear, decide or tell; then the rules hold."""
        for _ in range(100):
            if not self.controller.turn():
                break
        else:
            raise AssertionError("there is always something to do")
        self.rules.check()
        ours, theirs = (state.snapshot(self.now_s) for state in (self.followed.state, self.controller.state))
        for part in ("seq", "version", "rollout_version", "cells", "unfinished", "ready", "step", "burst", "ledger"):
            assert getattr(ours, part) == getattr(theirs, part), part
        assert set(self.world.started.values()) <= {1}  # no group is started twice
        assert set(self.world.made.values()) <= {1}  # no version is made twice

    def possible(self) -> list[Duty]:
        """I3: executions get on only while a cell serves."""
        serving = bool(self.controller.state.fleet.serving)
        return [duty for duty in self.world.open if serving or duty.task is not Task.EXECUTE]

    @rule(number=st.integers(1, 6), which=st.integers(0, 20))
    def work_is_done(self, number: int, which: int) -> None:
        for _ in range(number):
            if possible := self.possible():
                self.now_s += 60.0
                self.world.end(possible[which % len(possible)], self.controller.state)
                self.settle()

    @rule(which=st.integers(0, 20), number=st.integers(1, 3), lines=st.integers(0, 6), torn=st.booleans())
    def the_controller_is_killed(self, which: int, number: int, lines: int, torn: bool) -> None:
        """After so many lines of what it makes of news; work that was told goes on without it."""
        for _ in range(number):
            if possible := self.possible():
                self.world.end(possible[which % len(possible)], self.controller.state)
        self.lines_left = lines
        with contextlib.suppress(Killed):
            self.controller.turn()
        self.lines_left = None
        self.controller.ledger.close()
        if torn:
            with self.path.open("ab") as file:
                file.write(b'{"crc":12,"ent')
        assert read(self.path) == self.written
        self.start()
        self.settle()

    @rule(which=st.integers(0, 3))
    def a_cell_fails(self, which: int) -> None:
        cells = list(self.controller.state.cells.values())
        cell = cells[which % len(cells)]
        if cell.role is not Role.DOWN:
            self.world.lose(cell)
            self.settle()

    @precondition(lambda self: any(duty.task is Task.OPTIMISE for duty in self.world.open))
    @rule(told=st.booleans())
    def the_core_dies_having_made_a_version(self, told: bool) -> None:
        """I6: whether its last word came through or not, the version is made once."""
        duty = next(duty for duty in self.world.open if duty.task is Task.OPTIMISE)
        core = self.controller.state.cells[duty.of]
        if told:
            self.world.end(duty, self.controller.state)
        else:
            self.world.optimise(duty.number)
        self.world.lose(core)
        self.settle()

    @rule(which=st.integers(0, 3))
    def a_cell_comes_back(self, which: int) -> None:
        down = [cell for cell in self.controller.state.cells.values() if cell.role is Role.DOWN]
        if down:
            cell = down[which % len(down)]
            self.world.say(CellRecovered(cell=cell.id, epoch=cell.epoch))
            self.settle()

    @rule(number=st.integers(1, 4))
    def some_duties_are_not_told(self, number: int) -> None:
        self.world.out_of_reach = number

    @rule(which=st.integers(0, 5))
    def a_group_is_given_up(self, which: int) -> None:
        waiting = [duty for duty in self.world.open if duty.task is Task.EXECUTE]
        if waiting:
            duty = waiting[which % len(waiting)]
            self.world.open.remove(duty)
            self.world.say(GroupDropped(query=duty.of, reason="evaluator failed"))
            self.settle()

    @rule(back=st.integers(0, 60))
    def a_message_comes_again(self, back: int) -> None:
        """I9: all that is told of cells, steps and groups is told once; a copy changes nothing."""
        old = [event for _, event in self.world.happened if not isinstance(event, QueriesOffered)]
        if old:
            before = len(self.written)
            self.world.say(old[-1 - back % len(old)])
            assert not self.controller.turn()
            assert len(self.written) == before

    def teardown(self) -> None:
        """I10: left in peace, it goes on to make steps."""
        try:
            if hasattr(self, "controller"):
                self.world.out_of_reach = 0
                wanted = self.controller.state.version + 2
                while self.controller.state.version < wanted:
                    for cell in self.controller.state.cells.values():
                        if cell.role is Role.DOWN:
                            self.world.say(CellRecovered(cell=cell.id, epoch=cell.epoch))
                    self.settle()
                    possible = self.possible()
                    assert possible or self.controller.state.version >= wanted, "I10: it stands still"
                    for duty in possible[:1]:
                        self.now_s += 60.0
                        self.world.end(duty, self.controller.state)
                self.controller.close()
                assert read(self.path) == self.written
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)


Controlled.TestCase.settings = settings(
    max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestControlled = Controlled.TestCase
