"""The controller killed with SIGKILL at any moment: it comes back from its ledger, and nothing is lost or doubled."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from gyre_sched.actions import (
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
    OpenBurst,
    Planned,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    WeightsPublished,
    WeightsPulled,
    to_json,
)
from gyre_sched.api import Plan, Query, Snapshot
from gyre_sched.controller import Controller, Duty, Task, duties
from gyre_sched.errors import PolicyError
from gyre_sched.history import History
from gyre_sched.ledger import Ledger, read, replay
from gyre_sched.policies import Waterlevel
from tests.support.controlled import BATCH, MEMBERS, STEPS, fresh

ROOT = Path(__file__).resolve().parents[2]


class Emulated:
    """Cells that do each duty once, however often they are told, and work on while no controller lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: Counter[Duty] = Counter()
        self.open: list[Duty] = []
        self.epochs: Counter[str] = Counter()
        self.version = self.published = self._number = self._read = 0
        (path / "duties.jsonl").touch()
        (path / "events.jsonl").touch()
        self.say(QueriesOffered(queries=tuple(Query(id=f"q{i}") for i in range(100))))

    def say(self, *events: Event) -> None:
        with (self.path / "events.jsonl").open("a") as file:
            for event in events:
                self._number += 1
                file.write(json.dumps([self._number, to_json(event)]) + "\n")

    def listen(self) -> None:
        lines = (self.path / "duties.jsonl").read_text().split("\n")[:-1]
        for line in lines[self._read :]:
            told = json.loads(line)
            key = None if told["key"] is None else tuple(told["key"])
            duty = Duty(task=Task(told["task"]), of=told["of"], number=told["number"], key=key)
            if duty not in self.told:
                self.open.append(duty)
            if duty.task in (Task.TO_TRAIN, Task.TO_ROLLOUT, Task.RUN, Task.PULL):
                self.epochs[duty.of] = max(self.epochs[duty.of], duty.number)
            self.told[duty] += 1
        self._read = len(lines)

    def work(self) -> None:
        """End the oldest duty."""
        duty = self.open.pop(0)
        cell, epoch = duty.of, duty.number
        if duty.task is Task.EXECUTE:
            self.say(*(ExecutionEnded(query=duty.of, member=m) for m in range(MEMBERS)), GroupReady(query=duty.of))
        elif duty.task is Task.TO_TRAIN:
            self.say(Drained(cell=cell, epoch=epoch), SwitchDone(cell=cell, epoch=epoch, version=self.version))
        elif duty.task is Task.TO_ROLLOUT:
            self.say(SwitchDone(cell=cell, epoch=epoch, version=self.published))
        elif duty.task is Task.RUN:
            assert duty.key is not None
            assert len(duty.key) == 3
            self.say(MicrostepDone(cell=cell, epoch=epoch, key=duty.key))
        elif duty.task is Task.PULL:
            self.say(WeightsPulled(cell=cell, epoch=epoch, version=self.version))
        elif duty.task is Task.OPTIMISE:
            assert duty.key is not None
            assert duty.number == self.version + 1  # applied zero or one time
            self.version = duty.number
            self.say(StepApplied(version=self.version, generation=duty.key[0]))
        else:
            assert duty.task is Task.PUBLISH
            self.published = duty.number
            self.say(WeightsPublished(version=self.published))

    def lose(self, cell: str) -> None:
        """A cell is lost with its duties, and comes back."""
        self.open = [duty for duty in self.open if duty.of != cell]
        epoch = self.epochs[cell]
        self.say(CellFailed(cell=cell, epoch=epoch), CellRecovered(cell=cell, epoch=epoch + 1))


def start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.support.controlled", str(path)], cwd=ROOT)


def live(cells: Emulated, process: subprocess.Popen[bytes], duties_until_killed: int | None) -> None:
    """Work until the controller has told that many duties more, and kill it; without a number until it is done."""
    before, deadline_s = sum(cells.told.values()), time.monotonic() + 120
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline_s, (cells.open, cells.told)
            cells.listen()
            if duties_until_killed is not None and sum(cells.told.values()) - before >= duties_until_killed:
                return
            if cells.open and sum(cells.told.values()) > before:  # else all is done before the controller has started
                cells.work()
            time.sleep(0.002)
    finally:
        process.kill()
        process.wait()
        cells.listen()


def test_it_comes_back_from_its_ledger_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    cells, luck, lives = Emulated(tmp_path), random.Random(4), 1
    for life in range(4):
        process = start(tmp_path)
        live(cells, process, luck.randint(4, 16))
        lives += 1
        told_before = {(duty.task, duty.of, duty.key) for duty in cells.told}
        entries = [record for _, record in read(tmp_path / "ledger.jsonl")]
        dispatched = {query for record in entries if isinstance(record, Dispatch) for query in record.queries}
        assigned = {record.key for record in entries if isinstance(record, AssignMicrostep)}
        for task, of, key in told_before:  # nothing was done that the disk does not know
            assert task is not Task.EXECUTE or of in dispatched
            assert task is not Task.RUN or key in assigned
        if life == 1:
            cells.lose("c1")
        while len(cells.open) > 1 and luck.random() < 0.7:  # without a controller, work goes on
            cells.work()
    process = start(tmp_path)
    live(cells, process, None)
    assert process.returncode == 0
    assert 1 < max(cells.told.values()) <= lives  # told again by the next, never twice by one

    state = fresh()
    replay(tmp_path / "ledger.jsonl", state)
    assert (state.version, state.groups.consumed, state.groups.dropped) == (STEPS, STEPS * BATCH, 0)
    starts = Counter(duty.of for duty in cells.told if duty.task is Task.EXECUTE)
    assert set(starts.values()) == {1}  # a group told again is told with the version it was dispatched with
    assert len(starts) == state.groups.dispatched
    optimised = Counter(duty.number for duty in cells.told if duty.task is Task.OPTIMISE)
    assert optimised == dict.fromkeys(range(1, STEPS + 1), 1)


class Told:
    """A world in memory; duties in `unreachable` fail."""

    def __init__(self, *events: Event) -> None:
        self.happened = list(enumerate(events, 1))
        self.duties: list[Duty] = []
        self.unreachable: set[str] = set()

    def events(self, after: int) -> list[tuple[int, Event]]:
        return [one for one in self.happened if one[0] > after]

    def do(self, duty: Duty) -> None:
        if duty.of in self.unreachable:
            raise ConnectionError(f"no route to {duty.of}")
        self.duties.append(duty)


OFFER = QueriesOffered(queries=tuple(Query(id=f"q{i}") for i in range(8)))


def test_what_could_not_be_told_is_told_again_and_the_rest_goes_on(tmp_path: Path) -> None:
    world = Told(OFFER)
    world.unreachable = {"q1"}
    controller = Controller(
        fresh(), Waterlevel(burst=2, depth=2.0), world, tmp_path / "ledger.jsonl", clock=lambda: 5.0
    )
    assert controller.turn()
    assert [duty.of for duty in world.duties] == ["q0", "q2", "q3"]
    world.unreachable = set()
    controller.turn()
    assert [duty.of for duty in world.duties] == ["q0", "q2", "q3", "q1"]
    assert not controller.turn()
    controller.close()


def test_an_event_is_heard_once_and_the_number_survives(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        world = Told(OFFER, ExecutionEnded(query="q0", member=0))
        controller = Controller(fresh(), Waterlevel(burst=2, depth=2.0), world, path, clock=lambda: 5.0)
        controller.turn()
        controller.close()
    assert sum(isinstance(record, QueriesOffered) for _, record in read(path)) == 1
    with Ledger(path) as ledger:
        assert ledger.heard == 2


def test_a_plan_is_made_when_a_burst_ends_and_stands_after_a_restart(tmp_path: Path) -> None:
    class PlansOnce:
        def decide(self, snapshot: Snapshot) -> list[Action]:
            if not snapshot.outstanding:
                return [Dispatch(queries=("q0", "q1"), version=0)]
            if snapshot.ledger.bursts:
                return []
            return [CloseBurst(done=0) if snapshot.burst is not None else OpenBurst(steps=1)]

        def plan(self, history: History) -> Plan:
            return Plan(burst=history.bursts, outstanding=history.executions, since=history.dispatched)

    for executions in (0, 1, 1):  # that of q0 is heard once q0 is dispatched, and replayed after that
        world = Told(OFFER, ExecutionEnded(query="q0", member=0))
        controller = Controller(fresh(), PlansOnce(), world, tmp_path / "ledger.jsonl", clock=lambda: 5.0)
        controller.turn()
        assert controller.state.groups.plan == Plan(burst=1, outstanding=0, since=2)
        assert controller.history.executions == executions
        controller.close()
    assert sum(isinstance(record, Planned) for _, record in read(tmp_path / "ledger.jsonl")) == 1


def test_a_policy_that_is_unsafe_or_never_settles_stops_the_controller(tmp_path: Path) -> None:
    class Unsafe:
        def decide(self, snapshot: Snapshot) -> list[Action]:
            return [OpenBurst(steps=0)]

    class Restless:
        def decide(self, snapshot: Snapshot) -> list[Action]:
            return [OpenBurst(steps=1)]

    for number, (policy, told) in enumerate(((Unsafe(), "unsafe action"), (Restless(), "settle"))):
        controller = Controller(fresh(), policy, Told(), tmp_path / f"{number}.jsonl")
        with pytest.raises(PolicyError, match=told):
            controller.turn()
        controller.close()
    assert list(duties(fresh())) == []
