"""The core's desk: the board behind a lock, what satellites ask of it, and what the core has to do next.

Requests come in threads of the HTTP server (`server`); they read and change the board only. Everything with tensors is
an `Act`, done by the core's ranks between two micro-steps of their own: to lay out weights, to fetch a satellite's
gradients and add them up, to compute.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gyre_train.figures import Figures, total
from gyre_train.pack import Pack

from .acts import Act, HandIn, Task, Weights
from .board import Board, Gone, Key, Worker
from .told import Told
from .wire import figures_from_json, key_from_json, packs_to_bytes

__all__ = ["Hub"]

_MOST_EVENTS = 10_000
_LONGEST_WAIT_S = 5.0


class Hub:
    """All methods may be called from any thread; those of the core from one at a time."""

    def __init__(self, lease_s: float, version: str, hello: Mapping[str, Any], told: Told | None = None) -> None:
        """With `told`, a controller says who computes what, and when a step is whole."""
        self.told = told
        self.session = secrets.token_hex(6)
        """A core's life; what comes from another is refused."""
        self._hello = {**hello, "session": self.session, "lease_s": lease_s, "controlled": told is not None}
        self._version, self._applied = version, 0
        self._made: int | None = None
        self._board, self._changed = Board(lease_s), threading.Condition()
        self._lease_s = lease_s
        self._packs: dict[Key, tuple[Pack, ...]] = {}
        self._weights: Weights | None = None
        self._wanted = self._over = False
        self._queue: list[HandIn] = []
        self._adding: HandIn | None = None
        self._figures: Figures = {}
        self._events: list[dict[str, Any]] = []
        self._num_events = 0
        self._named: dict[str, None] = {}
        self._stirred = False
        """A controller named something since the core last looked."""
        if told is not None:
            told.on_news = self._heard

    # The core.

    def open(self, step: int) -> None:
        """Begin a step; micro-steps are offered as they come."""
        with self._changed:
            self._board.open(step)
            self._packs, self._weights, self._figures, self._named = {}, None, {}, {}
            self._wanted = bool(self._board.workers)
            self._note("opened")

    def offer(self, micro_steps: Mapping[Key, tuple[Pack, ...]], *, whole: bool) -> None:
        """More micro-steps of the open step; `whole`: these were the last."""
        with self._changed:
            self._packs |= micro_steps
            self._board.offer(micro_steps)
            if micro_steps:
                self._note("offered")
            if whole:
                self._board.seal()
                self._note("sealed")

    def next(self, wait_s: float) -> Act:
        """What to do now; waits up to `wait_s` where that is nothing."""
        until = time.monotonic() + wait_s
        with self._changed:
            while True:
                self._expire()
                if (act := self._act()) is not None:
                    return act
                if (left := until - time.monotonic()) <= 0 or self._stirred:
                    self._stirred = False
                    return Act(task=Task.WAIT)
                self._changed.wait(min(left, self._until_expiry()))

    @property
    def named(self) -> Sequence[str]:
        """Groups of the open step that a controller named, in the order in which it did."""
        with self._changed:
            for key in self.told.wanted() if self.told else ():
                if key[0] == self._board.step:
                    self._named.setdefault(key[1])
            return tuple(self._named)

    @property
    def is_whole(self) -> bool:
        """Whether a controller said that the open step gets nothing more."""
        return self.told is not None and self._board.step is not None and self.told.is_asked(self._board.step)

    def _heard(self) -> None:
        with self._changed:
            self._stirred = True
            self._changed.notify_all()

    def _among(self, wanted: Sequence[Key]) -> Sequence[Sequence[Key] | None]:
        """What may be claimed by one who was told these, first things first; None is anything.

        After what was told comes what no controller names, recorded data of the step; once the step is whole,
        anything that somebody lost.
        """
        if self.told is None or self._board.sealed:
            return [None]
        return [wanted, [key for key in self._board.pending if key[1] not in self._named]]

    def _act(self) -> Act | None:
        board = self._board
        wanted = self.told.wanted() if self.told else []
        for key in wanted:
            if board.is_over(key) and self.told:
                self.told.did(key)
        if self._queue:
            self._adding = self._queue.pop(0)
            return Act(task=Task.ADD, offers=self._adding.offers)
        if self._wanted and self._weights is None:
            return Act(task=Task.OFFER)
        for among in self._among(wanted):
            if (taken := board.take(among)) is not None:
                self._note("claimed", key=taken)
                return Act(task=Task.RUN, packs=self._packs[taken])
        return Act(task=Task.CLOSE) if board.complete else None

    def ran(self) -> None:
        """The micro-step of the last RUN is in the core's gradients."""
        with self._changed:
            key = self._board.mine
            self._note("done", key=key)
            self._board.took()
            if self.told and key is not None:
                self.told.did(key)

    def offered(self, weights: Weights) -> None:
        """Tell satellites where the open step's weights lie."""
        with self._changed:
            self._weights = weights
            self._changed.notify_all()

    def settle(self, error: str | None) -> bool:
        """Whether the core adds what it fetched for the last ADD; `error`: why it could not be fetched."""
        with self._changed:
            asked, self._adding = self._adding, None
            assert asked is not None
            added = False
            if error is not None:
                asked.answer = {"failed": error}
            else:
                try:
                    added = self._board.hand_in(asked.epoch, asked.keys, time.monotonic())
                    asked.answer = {"added": added}
                except Gone as gone:
                    asked.answer = {"gone": str(gone)}
            if added:
                self._figures = total(self._figures, asked.figures)
                name = self._board.workers[asked.epoch].name
                for key in asked.keys:
                    self._note("handed_in", name, key)
            self._changed.notify_all()
            return added

    @property
    def figures(self) -> Figures:
        """Of all that satellites handed in for the open step."""
        return self._figures

    @property
    def handed_in(self) -> int:
        """Micro-steps of the open step that satellites computed."""
        return sum(epoch is not None for epoch in self._board.reduced.values())

    @property
    def reduced(self) -> int:
        """Micro-steps of the open step that are in the core's sum."""
        return len(self._board.reduced)

    def close(self, version: str | None) -> None:
        """The open step made `version`; None: it was given up."""
        with self._changed:
            if version is not None:
                self._version, self._applied, self._made = version, self._applied + 1, self._board.step
            self._note("applied" if version is not None else "given_up")
            self._board.close()
            for asked in self._queue:  # of a step that was given up
                asked.answer = {"added": False}
            self._queue.clear()
            self._changed.notify_all()

    def saved(self) -> None:
        """What was made is on the disk: a controller may have engines load it, and no core will make it again."""
        if self.told and self._made is not None:
            self.told.holds(self._made)

    def end(self, wait_s: float) -> None:
        """Tell all satellites that training is over; wait until each has heard it, but no longer than `wait_s`."""
        until = time.monotonic() + wait_s
        with self._changed:
            self._over = True
            self._changed.notify_all()
            while self._board.workers and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    # Satellites: each method is a route, with the request's JSON.

    def hello(self) -> dict[str, Any]:
        """What a satellite must know before it is built."""
        return dict(self._hello)

    def join(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{worker} -> {epoch}."""
        with self._changed:
            self._same_session(body)
            worker, replaced = self._board.join(str(body["worker"]), time.monotonic())
            for one in replaced:
                self._note("lost", one.name)
            self._note("joined", worker.name)
            return {"epoch": worker.epoch}

    def beat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch}: it lives."""
        with self._changed:
            self._worker(body)
            return {}

    def pulled(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, step}: it holds this step's weights."""
        with self._changed:
            worker = self._worker(body)
            self._board.pulled(worker.epoch, int(body["step"]), time.monotonic())
            self._note("pulled", worker.name)
            return {}

    def claim(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, done, leaving, wait_s, want} -> one of run, hand_in, pull, leave, over, wait, spent.

        `want`: the micro-step that a controller told this worker to compute; `spent`: it needs no computing any more.
        """
        until = time.monotonic() + min(float(body.get("wait_s", 0.0)), _LONGEST_WAIT_S, self._lease_s / 3)
        with self._changed:
            worker = self._worker(body)
            if body.get("done") is not None:
                key = key_from_json(body["done"])
                if self._board.done(worker.epoch, key, time.monotonic()):
                    self._note("done", worker.name, key)
            worker.leaving = bool(body.get("leaving"))
            wanted = [key_from_json(body["want"])] if body.get("want") is not None else []
            for key in wanted:
                if key[0] == self._board.step and key[1] not in self._named:
                    self._named[key[1]], self._stirred = None, True
                    self._changed.notify_all()
            while (answer := self._answer(worker, wanted)) is None:
                if (left := until - time.monotonic()) <= 0:
                    return {"wait": True}
                self._changed.wait(left)
                worker = self._worker(body)
            return answer

    def _answer(self, worker: Worker, wanted: Sequence[Key]) -> dict[str, Any] | None:
        board = self._board
        if any(board.is_over(key) or key in worker.held for key in wanted):
            return {"spent": True}
        if self._over:
            board.leave(worker.epoch)
            self._changed.notify_all()
            return {"over": True}
        if board.must_hand_in(worker):
            return {"hand_in": worker.held}
        if worker.leaving and worker.running is None:
            return {"leave": True}
        if board.step is None or (board.sealed and not board.pending and worker.running is None):
            return None
        if worker.pulled != board.step:
            if self._weights is None:
                self._wanted = True
                self._changed.notify_all()
                return None
            made = self._weights
            return {"pull": {"step": made.step, "weights": made.weights, "anchor": made.anchor}}
        before, key = worker.running, None
        for among in self._among(wanted):
            key = key or board.claim(worker.epoch, time.monotonic(), among)
        if key is not None and before is None:
            self._note("claimed", worker.name, key)
        return None if key is None else {"run": key}

    def packs(self, body: Mapping[str, Any]) -> bytes:
        """{epoch, key}: the packs of a micro-step that this worker runs."""
        with self._changed:
            worker, key = self._worker(body), key_from_json(body["key"])
            if worker.running != key:
                raise Gone(f"worker {worker.name}: wanted the packs of {worker.running}, got {key}; claim again")
            packs = self._packs[key]
        return packs_to_bytes(packs)

    def hand_in(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch, keys, offers, figures} -> one of added, failed, again; `again`: ask the same once more."""
        with self._changed:
            worker = self._worker(body)
            keys = tuple(key_from_json(key) for key in body["keys"])
            if self._board.knows(worker.epoch, keys):
                return {"added": False}
            asked = next((one for one in self._asked() if (one.epoch, one.keys) == (worker.epoch, keys)), None)
            if asked is None:
                figures = figures_from_json(body["figures"])
                asked = HandIn(epoch=worker.epoch, keys=keys, offers=dict(body["offers"]), figures=figures)
                self._queue.append(asked)
                self._changed.notify_all()
            until = time.monotonic() + min(_LONGEST_WAIT_S, self._lease_s / 3)
            while asked.answer is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if asked.answer is None:
                return {"again": True}
            if "gone" in asked.answer:
                raise Gone(asked.answer["gone"])
            return asked.answer

    def leave(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{epoch}: it goes; what it holds is computed again."""
        with self._changed:
            self._same_session(body)
            worker = self._board.leave(int(body["epoch"]))
            if worker is not None:
                self._note("left", worker.name)
            return {}

    # Controllers and people.

    def lost(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """{worker}: its process is dead."""
        with self._changed:
            found = self._board.lost(str(body["worker"]))
            for worker in found:
                self._note("lost", worker.name)
            return {"lost": len(found)}

    def view(self) -> dict[str, Any]:
        """The open step and who works on it."""
        with self._changed:
            board, workers = self._board, self._board.workers.values()
            running = [one.running for one in workers if one.running] + ([board.mine] if board.mine else [])
            counts = {
                "pending": len(board.pending), "running": len(running),
                "held": sum(len(one.held) for one in workers), "reduced": len(board.reduced),
            }  # fmt: skip
            shown = {
                one.name: {
                    "epoch": one.epoch, "step": one.pulled, "running": one.running, "held": one.held,
                    "leaving": one.leaving,
                }
                for one in workers
            }  # fmt: skip
            return {
                "session": self.session, "step": board.step, "version": self._version, "sealed": board.sealed,
                "applied": self._applied, "micro_steps": counts, "workers": shown,
            }  # fmt: skip

    def events(self, after: int) -> dict[str, Any]:
        """What happened after event number `after` of this session."""
        with self._changed:
            return {"session": self.session, "events": [one for one in self._events if one["n"] > after]}

    # Under the lock.

    def _same_session(self, body: Mapping[str, Any]) -> None:
        if body.get("session") != self.session:
            raise Gone(f"wanted session {self.session}, got {body.get('session')}: the core began anew; join again")

    def _worker(self, body: Mapping[str, Any]) -> Worker:
        self._same_session(body)
        self._expire()
        return self._board.beat(int(body["epoch"]), time.monotonic())

    def _asked(self) -> Sequence[HandIn]:
        return [*self._queue, *([self._adding] if self._adding else [])]

    def _expire(self) -> None:
        for worker in self._board.expire(time.monotonic()):
            self._note("lost", worker.name)

    def _until_expiry(self) -> float:
        ends = [worker.until_s for worker in self._board.workers.values()]
        return max(0.01, min(ends, default=float("inf")) - time.monotonic())

    def _note(self, kind: str, worker: str | None = None, key: Key | None = None) -> None:
        self._num_events += 1
        self._events.append(
            {"n": self._num_events, "kind": kind, "worker": worker, "key": key, "step": self._board.step}
        )
        del self._events[:-_MOST_EVENTS]
        self._changed.notify_all()
