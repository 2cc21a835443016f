"""A cell's own lane for control calls, so that none waits behind replies, or behind another cell that hangs.

What is wanted of a cell last replaces what was wanted before: a job that is superseded ends at its next look.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["CellLostError", "Lane", "SupersededError", "Turn"]

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
T = TypeVar("T")


class SupersededError(Exception):
    """Something else is wanted of the cell now."""


class CellLostError(OSError):
    """A cell's process ended, or does not do what it must."""


class Turn:
    """One job's hold of its lane."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._phases: list[tuple[str, float]] = []
        self._since_s = time.monotonic()

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        """What `passed` noted, oldest first."""
        return tuple(self._phases)

    def passed(self, phase: str) -> None:
        """Note that a phase ends here; it began where the one before it ended."""
        now_s = time.monotonic()
        self._phases.append((phase, now_s - self._since_s))
        self._since_s = now_s

    @property
    def over(self) -> bool:
        """Whether something else is wanted now."""
        return self._over.is_set()

    def wait(self, seconds: float = 0.0) -> None:
        """Sleep; SupersededError as soon as something else is wanted."""
        if self._over.wait(seconds):
            raise SupersededError

    def until(self, done: Callable[[], T | None], seconds: float, what: str, look_s: float = 0.02) -> T:
        """The first result of `done` that is not None; CellLostError when none came in time."""
        deadline = time.monotonic() + seconds
        while True:
            found = done()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise CellLostError(f"wanted {what} within {seconds:g} s, it did not come")
            self.wait(look_s)

    def insist(self, call: Callable[[], T]) -> T:
        """Its result, tried again until it answers: for what must be done, whoever is out of reach meanwhile."""
        while True:
            try:
                return call()
            except CellLostError:
                raise
            except OSError as error:
                _LOG.warning("%s; tried again", error)
                self.wait(_RETRY_S)

    def supersede(self) -> None:
        """End it."""
        self._over.set()


class Lane:
    """A thread that does one job after another; `fail` is told of a job that failed in a way no job should."""

    def __init__(self, cell: str, fail: Callable[[BaseException], None]) -> None:
        self.cell, self._fail = cell, fail
        self._turn: Turn | None = None
        self._job: Callable[[Turn], None] | None = None
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"gyre-cell-{cell}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job waits or runs."""
        with self._wake:
            return self._turn is not None

    def begin(self, job: Callable[[Turn], None]) -> None:
        """Do this, instead of what was wanted before."""
        with self._wake:
            if self._turn is not None:
                self._turn.supersede()
            self._turn, self._job = Turn(), job
            self._wake.notify_all()

    def close(self) -> None:
        """Let go of what runs, and end the thread."""
        with self._wake:
            self._closed = True
            if self._turn is not None:
                self._turn.supersede()
            self._wake.notify_all()
        self._thread.join(5)

    def _work(self) -> None:
        while True:
            with self._wake:
                while self._job is None and not self._closed:
                    self._wake.wait()
                if self._closed or self._job is None or self._turn is None:
                    return
                job, turn, self._job = self._job, self._turn, None
            try:
                job(turn)
            except SupersededError:
                pass
            except Exception as error:  # noqa: BLE001 - told to the controller's own thread
                self._fail(error)
            with self._wake:
                if self._turn is turn:
                    self._turn = None
