"""Who computes which micro-step of the open step: a state machine without clock, threads or tensors.

A micro-step is in exactly one place: pending, running at a worker, held by a worker (its gradient lies in that worker's
sum) or reduced (in the core's). Held is not done: with a worker, everything it runs or holds comes back. A worker is
known by an epoch, given when it joins and never again; whatever comes from an epoch that ended is refused, so a late
message, a second copy, or a worker that was thought dead changes nothing. The core's own work needs no lease: it dies
with the board, and with it everything of the step.

Guarantee: when the step can close, each offered micro-step's gradient was added to the core's sum exactly once,
whatever was claimed, lost, repeated or late (tests/property/test_streaming_board.py).
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from gyre_data.errors import EngineError

__all__ = ["Board", "Gone", "Key", "Worker"]

Key = tuple[int, str, int]
"""Step, group, part."""


class Gone(EngineError):
    """The worker is not known any more: its lease ended, it left, or another took its name. It must join again."""


@dataclass(kw_only=True, slots=True)
class Worker:
    """One satellite as the core sees it."""

    name: str
    epoch: int
    until_s: float
    """When its lease ends."""
    pulled: int | None = None
    """The step for whose weights it is ready."""
    running: Key | None = None
    held: list[Key] = field(default_factory=list)
    leaving: bool = False


class Board:
    """The open step and the workers; times are seconds of any one clock."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._epochs = 0
        self.workers: dict[int, Worker] = {}
        """By epoch."""
        self.step: int | None = None
        self._newest = -1
        self.sealed = False
        """All of the step's micro-steps are offered."""
        self.pending: list[Key] = []
        self.mine: Key | None = None
        """What the core itself runs."""
        self.reduced: dict[Key, int | None] = {}
        """Key: the epoch that handed it in; None: the core computed it."""

    # The core.

    def open(self, step: int) -> None:
        """Begin a step with nothing in it; one that was given up is not opened again under its number."""
        assert self.step is None, "the step before is still open"
        assert step > self._newest, "steps go up, so that a micro-step's key is never used twice"
        self.step = self._newest = step
        self.reduced = {}

    def offer(self, keys: Iterable[Key]) -> None:
        """Micro-steps that can be computed now."""
        assert not self.sealed, "the step is sealed"
        self.pending += keys

    def seal(self) -> None:
        """Nothing more will be offered."""
        self.sealed = True

    def take(self, among: Container[Key] | None = None) -> Key | None:
        """The core claims the next one, if there is one; with `among`, one of these."""
        assert self.mine is None, "the core still runs one"
        self.mine = self._taken(among)
        return self.mine

    def took(self) -> None:
        """What the core ran is in its sum."""
        assert self.mine is not None, "the core runs nothing"
        self.reduced[self.mine], self.mine = None, None

    @property
    def complete(self) -> bool:
        """Whether the step can close: everything that belongs to it is in the core's sum."""
        busy = any(worker.running or worker.held for worker in self.workers.values())
        return self.sealed and not (self.pending or self.mine or busy)

    def close(self) -> None:
        """The step was applied, or given up: nothing of it counts any more, whoever holds it."""
        self.step = None
        self.pending, self.mine, self.sealed = [], None, False
        for worker in self.workers.values():
            worker.running, worker.held = None, []

    def expire(self, now_s: float) -> list[Worker]:
        """End the epochs whose lease is over; returns their workers as they were."""
        return [self._end(epoch) for epoch, worker in list(self.workers.items()) if worker.until_s <= now_s]

    def lost(self, name: str) -> list[Worker]:
        """End the epochs of a name that somebody knows to be dead."""
        return [self._end(epoch) for epoch, worker in list(self.workers.items()) if worker.name == name]

    # Workers.

    def join(self, name: str, now_s: float) -> tuple[Worker, list[Worker]]:
        """A new worker, and those of the same name whose place it takes."""
        replaced = self.lost(name)
        self._epochs += 1
        worker = Worker(name=name, epoch=self._epochs, until_s=now_s + self._lease_s)
        self.workers[worker.epoch] = worker
        return worker, replaced

    def beat(self, epoch: int, now_s: float) -> Worker:
        """Renew a lease; every request of a worker does. Raises Gone when it ended."""
        worker = self.workers.get(epoch)
        if worker is None:
            raise Gone(f"worker {epoch}: wanted one that has joined and not left, it is not known; join again")
        worker.until_s = now_s + self._lease_s
        return worker

    def pulled(self, epoch: int, step: int, now_s: float) -> None:
        """It holds the weights that this step is computed with."""
        self.beat(epoch, now_s).pulled = step

    def claim(self, epoch: int, now_s: float, among: Container[Key] | None = None) -> Key | None:
        """The next micro-step, or the one it has already; None: there is none, or its weights are those of before.

        With `among`, it gets one of these or none.
        """
        worker = self.beat(epoch, now_s)
        if worker.running is None and worker.pulled == self.step and not worker.leaving:
            worker.running = self._taken(among)
        return worker.running

    def done(self, epoch: int, key: Key, now_s: float) -> bool:
        """Its gradient is in the worker's sum; False: that was known, or its step is over. Gone when it is not its."""
        worker = self.beat(epoch, now_s)
        if worker.running == key:
            worker.held.append(key)
            worker.running = None
            return True
        if key in worker.held or key[0] != self.step or self.reduced.get(key) == epoch:
            return False
        self._end(epoch)  # its sum holds what it should not
        raise Gone(f"worker {epoch}: wanted {worker.running} or {worker.held} as done, got {key}; join again")

    def must_hand_in(self, worker: Worker) -> bool:
        """Whether a worker has nothing more to claim, and a sum that the core waits for."""
        over = self.sealed and not self.pending
        return bool(worker.held) and worker.running is None and (over or worker.leaving)

    def hand_in(self, epoch: int, keys: Iterable[Key], now_s: float) -> bool:
        """Count a worker's sum as the core's: True exactly once for each sum, and then the core adds it.

        False: these micro-steps are in the core's sum already, or their step is over. Gone when the worker is not
        known, or when the sum is not of what it holds: it must not be added.
        """
        worker, wanted = self.beat(epoch, now_s), list(keys)
        if wanted and sorted(wanted) == sorted(worker.held) and worker.running is None:
            self.reduced |= dict.fromkeys(wanted, epoch)
            worker.held = []
            return True
        if self.knows(epoch, wanted):
            return False
        self._end(epoch)
        raise Gone(f"worker {epoch}: wanted the sum of {worker.held}, got that of {wanted}; join again")

    def knows(self, epoch: int, keys: Iterable[Key]) -> bool:
        """Whether nothing of a sum is to be added: the core has it from this worker, or its step is over."""
        return all(key[0] != self.step or self.reduced.get(key) == epoch for key in keys)

    def leave(self, epoch: int) -> Worker | None:
        """It goes, with what it still holds given back; None when it had gone."""
        return self._end(epoch) if epoch in self.workers else None

    def is_over(self, key: Key) -> bool:
        """Whether a micro-step is in the core's sum, or belongs to a step that was closed."""
        return key in self.reduced or key[0] < self._newest or (key[0] == self._newest and self.step is None)

    def _taken(self, among: Container[Key] | None) -> Key | None:
        found = next((key for key in self.pending if among is None or key in among), None)
        if found is not None:
            self.pending.remove(found)
        return found

    def _end(self, epoch: int) -> Worker:
        worker = self.workers.pop(epoch)
        back = [*worker.held, *([worker.running] if worker.running else [])]
        self.pending[:0] = sorted(back)
        return worker
