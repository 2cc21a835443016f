"""The controller: it hears what happened, asks the policy, and has cells do what the state says.

Level-triggered on both sides. What is to be done follows from the state alone (`duties`), and each duty is told with
what makes it unique, so that a cell that is told twice does it once. Every record is on the disk before anything is
done for it. A controller that was killed therefore comes back from its ledger, tells every open duty again, and hears
what happened meanwhile; executions, calls and claimed micro-steps went on without it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, cast

from .actions import Action, CloseBurst, Event, Planned
from .api import Key, Policy, Role
from .errors import PolicyError
from .history import History, Plans
from .ledger import Ledger, replay
from .metrics import write_metrics
from .state import Refusal, State

__all__ = ["Controller", "Duty", "Task", "World", "duties"]

_MAX_ROUNDS = 200
_METRICS_S = 1.0
_LOG = logging.getLogger(__name__)


class Task(StrEnum):
    """What a duty asks for, and the event that ends it."""

    EXECUTE = "execute"
    """Start a group's executions on weights `number`: ExecutionEnded of each, then GroupReady."""
    STOP = "stop"
    """End member `number` of a group now: ExecutionEnded as partial."""
    TO_TRAIN = "to_train"
    """Drain cell and switch it, in epoch `number`: Drained, SwitchDone."""
    TO_ROLLOUT = "to_rollout"
    """Hand over what the cell holds and switch it, in epoch `number`: SwitchDone."""
    RUN = "run"
    """Run micro-step `key` on the cell in epoch `number`: MicrostepDone."""
    PULL = "pull"
    """Bring the newest weights to a training cell, in epoch `number`: WeightsPulled."""
    OPTIMISE = "optimise"
    """Reduce and make version `number`, attempt `key[0]`: StepApplied."""
    PUBLISH = "publish"
    """Bring version `number` to the serving cells: WeightsPublished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Duty:
    """One thing to be done, once; equal duties are the same one."""

    task: Task
    of: str
    """A cell or a group's query; the core's id for what concerns the step."""
    number: int
    key: Key | tuple[int] | None = None


class World(Protocol):
    """Cells, executions and trainer as the controller reaches them, by HTTP or otherwise."""

    def events(self, after: int) -> Sequence[tuple[int, Event]]:
        """Return what happened after number `after`, oldest first; a number always means the same event."""
        ...

    def do(self, duty: Duty) -> None:
        """Begin a duty without waiting for its end; ignore one that was told before. OSError: told again next time."""
        ...


def duties(state: State) -> Iterator[Duty]:
    """All that is to be done and not known to be done."""
    for group in state.groups.outstanding.values():
        if group.unfinished:
            yield Duty(task=Task.EXECUTE, of=group.query, number=group.version)
        for member in sorted(group.returning & group.unfinished):
            yield Duty(task=Task.STOP, of=group.query, number=member)
    for cell in state.cells.values():
        if cell.role in (Role.DRAINING, Role.TO_TRAIN):
            yield Duty(task=Task.TO_TRAIN, of=cell.id, number=cell.epoch)
        elif cell.role is Role.TO_ROLLOUT:
            yield Duty(task=Task.TO_ROLLOUT, of=cell.id, number=cell.epoch)
        elif cell.running is not None:
            yield Duty(task=Task.RUN, of=cell.id, number=cell.epoch, key=cell.running)
        elif cell.role is Role.TRAIN and cell.version < state.version:
            yield Duty(task=Task.PULL, of=cell.id, number=cell.epoch, key=(state.version,))
    # Satellites may complete a step while the core is lost: it is told when it is back.
    if state.step is not None and state.step.closing and state.cells[state.core].role is Role.TRAIN:
        attempt = (state.step.generation,)
        yield Duty(task=Task.OPTIMISE, of=state.core, number=state.version + 1, key=attempt)
    if state.burst is None and state.rollout_version < state.version:
        yield Duty(task=Task.PUBLISH, of=state.core, number=state.version)


class Controller:
    """One run's controller; `state` is fresh and comes to where the ledger ends.

    `timeout_s` and `engine_share` are the run's, for a policy that plans (`Scenario` says what they are). It plans
    within a turn, which takes seconds and happens seldom; nothing but decisions waits for it. `metrics` is a file that
    its figures are put into as Prometheus text, every second at most.
    """

    def __init__(
        self,
        state: State,
        policy: Policy,
        world: World,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        timeout_s: float = math.inf,
        engine_share: float = 0.6,
        metrics: Path | None = None,
    ) -> None:
        self._metrics, self._metrics_at = metrics, -math.inf
        self.state, self.policy, self.world = state, policy, world
        self.history = History(state, timeout_s=timeout_s, engine_share=engine_share)
        self._clock = clock
        replay(path, state, also=self.history.record)
        self.ledger = Ledger(path)
        self._told: set[Duty] = set()

    def turn(self) -> bool:
        """Hear, decide, do; True when anything was heard, decided or told."""
        now_s, before = self._clock(), self.state.seq
        for number, event in self.world.events(self.ledger.heard):
            self._apply(event, now_s, heard=number)
        self._settle(now_s)
        did = self._tell() or self.state.seq > before
        self._expose()
        return did

    def _expose(self) -> None:
        """Nothing but the figures depends on that file: what goes wrong with it is told and no more."""
        now = time.monotonic()
        if self._metrics is None or now < self._metrics_at + _METRICS_S:
            return
        self._metrics_at = now
        try:
            write_metrics(self._metrics, self.history)
        except OSError as error:
            _LOG.warning(
                "wanted to write figures to %s, got: %s; free the disk, or name another file", self._metrics, error
            )

    def _settle(self, now_s: float) -> None:
        for _ in range(_MAX_ROUNDS):
            actions = self.policy.decide(self.state.snapshot(now_s))
            if not actions:
                return
            for action in actions:
                if self._apply(action, now_s) is Refusal.UNSAFE:
                    raise PolicyError(f"unsafe action: {action}; see the rules in docs/scheduler.md")
        raise PolicyError(f"wanted the policy to settle within {_MAX_ROUNDS} rounds, it still asks for {actions[:3]}")

    def _apply(self, record: Action | Event, now_s: float, heard: int | None = None) -> Refusal | None:
        refusal = self.state.apply(record, now_s)
        if refusal is None:
            self.ledger.append(now_s, record, heard=heard)
            self.history.record(now_s, record)
            if isinstance(record, CloseBurst) and hasattr(self.policy, "plan"):
                plan = cast(Plans, self.policy).plan(self.history)
                if plan is not None:
                    self._apply(Planned(plan=plan), now_s)
        return refusal

    def _tell(self) -> bool:
        wanted = dict.fromkeys(duties(self.state))
        new = [duty for duty in wanted if duty not in self._told]
        self._told.intersection_update(wanted)
        for duty in new:
            try:
                self.world.do(duty)
            except OSError as error:
                _LOG.warning("%s of %s was not told, it is tried again: %s", duty.task, duty.of, error)
            else:
                self._told.add(duty)
        return bool(new)

    def close(self) -> None:
        """Close the ledger; everything in it is on the disk already."""
        self._metrics_at = -math.inf
        self._expose()
        self.ledger.close()
