"""Whether cells live, seen by a thread each: a process that ended, or one that answers nothing for too long.

A training program is asked for its state, which it holds back until something has changed: its answers are news and
heartbeat in one.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from .processes import Processes, Slot
from .settings import FleetSettings
from .training import TrainerState, read_state
from .wire import ask

__all__ = ["Watch"]

_PROBE_S = 5.0


class Watch:
    """One cell's watcher. `news` is called, from its thread, when there is something to look at."""

    def __init__(
        self,
        cell: str,
        settings: FleetSettings,
        processes: Processes,
        news: Callable[[], None],
    ) -> None:
        self.cell, self._settings, self._processes, self._news = cell, settings, processes, news
        self.state: TrainerState | None = None
        """What the trainer that runs said last."""
        self._seen: Slot | None = None
        self._lost: str | None = None
        self._heard_s = time.monotonic()
        self._lock = threading.Lock()
        """Of the two above: lanes reset them."""
        self._closed = threading.Event()
        self._look_at = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"gyre-watch-{cell}", daemon=True)
        self._thread.start()

    def lost(self, kind: str) -> str | None:
        """Why the process of this kind that the cell should run is lost; None when it is not known to be."""
        seen, why = self._seen, self._lost
        if why is None or (seen is not None and seen.kind != kind):
            return None
        try:
            now = self._processes.slot(self.cell)  # another may have been started since
        except OSError:
            return None
        return why if now == seen or (now is not None and seen is not None and now.pid == seen.pid) else None

    def look(self) -> None:
        """Look now: another process was started, and has answered; its silence before that counts for nothing."""
        self._hear_from()
        self._look_at.set()

    def close(self) -> None:
        """End the thread at its next look."""
        self._closed.set()
        self._look_at.set()

    def _work(self) -> None:
        while not self._closed.is_set():
            try:
                pause_s = self._beat()
            except OSError:  # a place out of reach tells nothing about its cells
                pause_s = self._settings.beat_s
            if self._look_at.wait(pause_s):
                self._look_at.clear()

    def _beat(self) -> float:
        """Look once; returns how long to wait until the next look."""
        settings, slot = self._settings, self._processes.slot(self.cell)
        if slot is None or self._seen is None or slot.pid != self._seen.pid or slot.kind != self._seen.kind:
            self.state = None
            self._hear_from()
        self._seen = slot
        if slot is None or not slot.running:
            self._lose("its process ended" if slot is not None else "its machine has no process for it")
            return settings.beat_s
        started_s = time.monotonic()
        try:
            if slot.kind == "train":
                self._hear(slot)
                pause_s = 0.0
            else:
                ask(f"http://{slot.address}/ready", timeout_s=min(_PROBE_S, settings.lost_s))
                pause_s = settings.beat_s
        except OSError:
            self._lose(f"it answered nothing for {settings.lost_s:g} s", silent_since_s=started_s - settings.lost_s)
            return min(settings.beat_s, settings.lost_s / 4)
        self._hear_from()
        return pause_s

    def _hear_from(self) -> None:
        with self._lock:
            self._heard_s, self._lost = time.monotonic(), None

    def _hear(self, slot: Slot) -> None:
        before = self.state
        timeout_s = min(_PROBE_S, self._settings.lost_s)
        after = -1 if before is None else before.seq
        state = read_state(slot.address, after=after, wait_s=timeout_s / 2, timeout_s=timeout_s)
        if state != before:
            self.state = state
            self._news()

    def _lose(self, why: str, silent_since_s: float = math.inf) -> None:
        with self._lock:
            new = self._lost is None and self._heard_s < silent_since_s
            self._lost = why if new else self._lost
        if new:
            self._news()
