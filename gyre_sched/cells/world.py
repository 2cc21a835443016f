"""Real cells, the proxy's executions and trainers as the controller's World.

Everything is level-triggered: what cells and executions are to do follows from the state, what they have done is read
from them again and again, and only what the state does not know yet is told as an event. So nothing need be remembered
here, and a controller that was killed loses nothing that happened meanwhile. Numbers of events go on from the ledger's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gyre_sched.actions import (
    CellFailed,
    CellRecovered,
    Drained,
    Event,
    MicrostepDone,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    WeightsPublished,
    WeightsPulled,
)
from gyre_sched.api import Cell, Query, Role
from gyre_sched.controller import Duty, Task
from gyre_sched.errors import CoreError
from gyre_sched.state import State

from .executions import Executions
from .lane import CellLostError, Lane, Turn
from .processes import Processes
from .proxy import ProxyApi
from .rollout import Rollout
from .settings import FleetSettings
from .training import TrainerState, Training
from .watch import Watch

__all__ = ["CellWorld", "num_offered"]

_LOG = logging.getLogger(__name__)
_AGAIN_S = 2.0
"""Between attempts to bring a lost cell back."""
_END_S = 5.0
_MOST_FALLS = 5
"""Ends of the core's training program, with no step in between, after which it will not come up by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Brought:
    """A lane has brought a cell to a role, with weights of a version."""

    cell: str
    epoch: int
    kind: str
    version: int
    phases: tuple[tuple[str, float], ...] = ()
    """As `Turn` noted them, in real seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fell:
    """The core's training program did not come up."""

    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Took:
    """A serving cell has taken the version that is published."""

    cell: str
    version: int


def num_offered(state: State) -> int:
    """Queries that the state has been told of; the settings' list may have grown since, at its end."""
    return len(state.upcoming) + state.groups.dispatched


class CellWorld:
    """The World of one controller; `state` is that controller's, and is read in `events` and `do` only."""

    def __init__(self, state: State, settings: FleetSettings, processes: Processes) -> None:
        self._state, self._settings, self._processes = state, settings, processes
        proxy = ProxyApi(settings.proxy, key=settings.proxy_key or os.environ.get("GYRE_KEY"), call_s=settings.call_s)
        self._rollout = Rollout(settings, processes, proxy)
        self._training = Training(settings, processes)
        self._news = threading.Event()
        self._told: deque[Event | _Brought | _Fell | _Took] = deque()
        self._falls = (0, 0)
        """The version that the core was lost at last, and how often."""
        self._number, self._seq = 0, -1
        self._recovering: dict[str, int] = {}
        """Cells that are being brought back, with their epochs."""
        self._publishing: int | None = None
        self._taking: dict[str, int] = {}
        """Cells that have not taken that version yet, with their epochs."""
        self._failure: BaseException | None = None
        self._lanes = {cell: Lane(cell, self._fail) for cell in state.cells}
        self._watches = {cell: Watch(cell, settings, processes, self._news.set) for cell in state.cells}
        self._executions = Executions(settings, proxy, lambda events: self._tell(*events), self._fail)

    def wait(self, seconds: float) -> None:
        """Return as soon as there may be news."""
        self._news.wait(seconds)
        self._news.clear()

    def close(self) -> None:
        """Let go; cells and executions go on."""
        self._executions.close()
        for watch in self._watches.values():
            watch.close()
        for lane in self._lanes.values():
            lane.close()

    def end_cells(self) -> None:
        """End every cell's process: the run is over."""
        threads = [threading.Thread(target=self._end, args=(cell,)) for cell in self._lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _end(self, cell: str) -> None:
        self._processes.end(cell, grace_s=_END_S)
        self._processes.release(cell)

    def begin(self) -> None:
        """Start the engines of a run that has not begun; returns when all of them serve. OSError when one cannot."""
        fresh = [cell for cell in self._state.cells.values() if cell.role is Role.ROLLOUT and cell.epoch == 0]
        failures: list[str] = []

        def serve(cell: str, turn: Turn) -> None:
            try:
                self._rollout.serve(turn, cell, 0, 0)
                self._watches[cell].look()
            except OSError as error:
                failures.append(str(error))

        for cell in fresh:
            self._lanes[cell.id].begin(partial(serve, cell.id))
        while any(self._lanes[cell.id].busy for cell in fresh):
            self.wait(0.05)
        if failures:
            raise OSError("; ".join(failures))

    def _fail(self, error: BaseException) -> None:
        """A thread met what it should not: the controller stops and says so, the next one goes on."""
        self._failure = error
        self._news.set()

    # What happened.

    def events(self, after: int) -> Sequence[tuple[int, Event]]:
        """What the state does not know yet."""
        if self._failure is not None:
            raise self._failure
        self._number = max(self._number, after)
        state = self._state
        if state.seq != self._seq:
            self._seq = state.seq
            self._expect()
        found: list[Event] = []
        if more := self._settings.queries[num_offered(state) :]:
            found.append(QueriesOffered(queries=tuple(Query(id=query) for query in more)))
        while self._told:
            told = self._told.popleft()
            if isinstance(told, _Brought):
                found += self._brought(told)
            elif isinstance(told, _Fell):
                self._fell(told.why)
            elif isinstance(told, _Took):
                if told.version == self._publishing:
                    self._taking.pop(told.cell, None)
            else:
                found.append(told)
        for cell in state.cells.values():
            found += self._seen(cell)
        found += self._published()
        numbered = list(enumerate(found, self._number + 1))
        self._number += len(found)
        return numbered

    def _expect(self) -> None:
        outstanding = self._state.groups.outstanding
        self._executions.expect(
            {group.query: frozenset(group.unfinished) for group in outstanding.values() if not group.ready}
        )

    def _fell(self, why: str) -> None:
        """Count it; CoreError when nothing else has come of this step so often."""
        core, version = self._state.core, self._state.version
        count = self._falls[1] + 1 if self._falls[0] == version else 1
        self._falls = (version, count)
        if count >= _MOST_FALLS:
            raise CoreError(
                f"wanted the core, cell {core}, to make step {version + 1}, it was lost {count} times before: {why}; "
                f"mend what {self._settings.folder}/cells/{core}/log says, and run the same command again"
            )

    def _tell(self, *told: Event | _Brought | _Fell | _Took) -> None:
        self._told.extend(told)
        self._news.set()

    def _wanted(self, cell: Cell) -> str:
        """What a cell that is on its way, or lost, is to become."""
        if cell.role is Role.DOWN:
            return "train" if cell.core and self._state.burst is not None else "rollout"
        return "train" if cell.role in (Role.DRAINING, Role.TO_TRAIN) else "rollout"

    def _brought(self, told: _Brought) -> list[Event]:
        """The event, when it is still what is wanted; else it is put right first."""
        state, cell = self._state, self._state.cells[told.cell]
        if cell.epoch != told.epoch or cell.role in (Role.ROLLOUT, Role.TRAIN):
            return []
        if told.kind != self._wanted(cell):
            self._recovering.pop(cell.id, None)
            return []
        if told.kind == "rollout" and told.version != state.rollout_version:
            newer = partial(self._catch_up, cell.id, cell.epoch, state.rollout_version, told.phases)
            self._begin(cell.id, cell.epoch, newer)
            return []
        if cell.role is Role.DOWN:
            return [CellRecovered(cell=cell.id, epoch=cell.epoch)]
        version = min(told.version, state.version)  # a trainer may be ahead by a step that is not told yet
        scale = 3600 / self._settings.hour_s
        phases = tuple((name, round(seconds * scale, 3)) for name, seconds in told.phases)
        return [SwitchDone(cell=cell.id, epoch=cell.epoch, version=version, phases=phases)]

    def _seen(self, cell: Cell) -> list[Event]:
        """What is to be seen of a cell; one that is lost is brought back."""
        if cell.role is Role.DOWN:
            if self._recovering.get(cell.id) != cell.epoch:
                self._recovering[cell.id] = cell.epoch
                version = self._state.rollout_version
                kind = self._wanted(cell)
                self._lanes[cell.id].begin(partial(self._recover, cell.id, cell.epoch, kind, version))
            return []
        if cell.role is Role.TO_TRAIN and self._state.cells[self._state.core].role is Role.TO_ROLLOUT:
            # A satellite whose burst ended while it was on its way has nothing to join; the policy says where it goes.
            return [SwitchDone(cell=cell.id, epoch=cell.epoch, version=cell.version)]
        if cell.role not in (Role.ROLLOUT, Role.TRAIN):
            return []
        watch = self._watches[cell.id]
        why = watch.lost("rollout" if cell.role is Role.ROLLOUT else "train")
        if why is not None:
            _LOG.warning("cell %s is lost: %s", cell.id, why)
            if cell.role is Role.TRAIN and cell.core:
                self._fell(why)
            return [CellFailed(cell=cell.id, epoch=cell.epoch)]
        if cell.role is Role.TRAIN and watch.state is not None:
            return self._trained(cell, watch.state)
        return []

    def _trained(self, cell: Cell, said: TrainerState) -> list[Event]:
        state, events = self._state, list[Event]()
        if cell.running is not None and (cell.epoch, cell.running) in said.done:
            events.append(MicrostepDone(cell=cell.id, epoch=cell.epoch, key=cell.running))
        if cell.version < min(said.version, state.version):
            version = min(said.version, state.version)
            events.append(WeightsPulled(cell=cell.id, epoch=cell.epoch, version=version))
        if cell.core and state.step is not None and state.step.closing:
            applied = (state.version + 1, state.step.generation)
            if applied in said.applied:
                events.append(StepApplied(version=applied[0], generation=applied[1]))
        return events

    def _published(self) -> list[Event]:
        """Every cell that still serves as it did has taken the version."""
        if self._publishing is None:
            return []
        for cell, epoch in list(self._taking.items()):
            now = self._state.cells[cell]
            if now.role is not Role.ROLLOUT or now.epoch != epoch:
                del self._taking[cell]
        if self._taking:
            return []
        version, self._publishing = self._publishing, None
        return [WeightsPublished(version=version)]

    # What is to be done.

    def do(self, duty: Duty) -> None:
        """Begin it."""
        cell, epoch = duty.of, duty.number
        if duty.task is Task.EXECUTE:
            self._expect()
        elif duty.task is Task.STOP:
            self._executions.stop(duty.of, duty.number)
        elif duty.task is Task.TO_TRAIN:
            self._begin(cell, epoch, partial(self._to_train, cell, epoch))
        elif duty.task is Task.TO_ROLLOUT:
            self._begin(cell, epoch, partial(self._to_rollout, cell, epoch, self._state.rollout_version))
        elif duty.task is Task.PUBLISH:
            self._publish(duty.number)
        elif duty.task in (Task.RUN, Task.PULL, Task.OPTIMISE):
            self._say(duty)

    def _say(self, duty: Duty) -> None:
        """A training cell is told; its watch hears what comes of it."""
        assert duty.key is not None
        if duty.task is Task.RUN:
            route, body = "run", {"epoch": duty.number, "key": list(duty.key)}
        elif duty.task is Task.PULL:
            route, body = "pull", {"epoch": duty.number, "version": duty.key[0]}
        else:
            route, body = "optimise", {"version": duty.number, "generation": duty.key[0]}
        epoch = self._state.cells[duty.of].epoch
        self._begin(duty.of, epoch, lambda turn: self._training.tell(turn, duty.of, route, body))

    def _publish(self, version: int) -> None:
        self._publishing = version
        self._taking = {cell.id: cell.epoch for cell in self._state.fleet.serving}
        for cell, epoch in self._taking.items():
            self._begin(cell, epoch, partial(self._take, cell, version))
        self._news.set()

    def _begin(self, cell: str, epoch: int, job: Callable[[Turn], None]) -> None:
        """Do this in the cell's lane; a cell that does not survive it is lost."""

        def guarded(turn: Turn) -> None:
            try:
                job(turn)
            except OSError as error:
                if not turn.over:
                    _LOG.warning("cell %s is lost: %s", cell, error)
                    self._tell(CellFailed(cell=cell, epoch=epoch))

        self._lanes[cell].begin(guarded)

    # Jobs, each in its cell's lane.

    def _to_train(self, cell: str, epoch: int, turn: Turn) -> None:
        self._rollout.leave(turn, cell, lambda: self._tell(Drained(cell=cell, epoch=epoch)))
        version = self._join(cell, epoch, turn)
        turn.passed("trainer_start")
        self._watches[cell].look()
        self._tell(_Brought(cell=cell, epoch=epoch, kind="train", version=version, phases=turn.phases))

    def _join(self, cell: str, epoch: int, turn: Turn) -> int:
        try:
            return self._training.join(turn, cell, epoch)
        except CellLostError as error:
            if cell == self._settings.cells[0].id:
                self._tell(_Fell(why=str(error)))
            raise

    def _to_rollout(self, cell: str, epoch: int, version: int, turn: Turn) -> None:
        self._training.leave(cell)
        turn.passed("hand_over")
        self._serve(cell, epoch, version, turn)

    def _serve(self, cell: str, epoch: int, version: int, turn: Turn) -> None:
        self._rollout.serve(turn, cell, epoch, version)
        self._watches[cell].look()
        self._tell(_Brought(cell=cell, epoch=epoch, kind="rollout", version=version, phases=turn.phases))

    def _catch_up(self, cell: str, epoch: int, version: int, before: tuple[tuple[str, float], ...], turn: Turn) -> None:
        self._rollout.swap(turn, cell, version)
        phases = (*before, *turn.phases)
        self._tell(_Brought(cell=cell, epoch=epoch, kind="rollout", version=version, phases=phases))

    def _take(self, cell: str, version: int, turn: Turn) -> None:
        self._rollout.swap(turn, cell, version)
        self._tell(_Took(cell=cell, version=version))

    def _recover(self, cell: str, epoch: int, kind: str, version: int, turn: Turn) -> None:
        """Bring a lost cell back, however often that takes: others go on meanwhile. But see `_fell`."""
        while True:
            try:
                self._rollout.forget(turn, cell)
                if kind == "rollout":
                    self._serve(cell, epoch, version, turn)
                else:
                    made = self._join(cell, epoch, turn)
                    self._watches[cell].look()
                    self._tell(_Brought(cell=cell, epoch=epoch, kind=kind, version=made))
            except OSError as error:
                _LOG.warning("cell %s does not come back: %s; tried again", cell, error)
                turn.wait(_AGAIN_S)
            else:
                return
