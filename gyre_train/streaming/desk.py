"""A satellite's first rank between the core and its own ranks: what to do next, and what became of it.

Whatever the core does not answer is asked again. When it answers that this worker is gone (a lease that ended, a core
that began anew), everything computed is dropped, since the core counts on computing it elsewhere, and it joins again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gyre_data.errors import EngineError
from gyre_data.show.numbers import plural
from gyre_train.figures import Figures
from gyre_train.pack import Pack
from gyre_train.publish.control import EngineGone

from .board import Gone, Key
from .carrier import Offer
from .client import Client, Over
from .told import Told
from .wire import figures_to_json, key_from_json, packs_from_bytes

__all__ = ["Desk", "Errand", "Job"]

_LOG = logging.getLogger(__name__)
_WAIT_S = 2.0
_AGAIN_S = 0.5
_LISTEN_S = 0.2
_MOST_TRIES = 5


class Job(StrEnum):
    """What all ranks of a satellite do next."""

    RUN = "run"
    """Compute a micro-step and add its gradients up."""
    PULL = "pull"
    """Take the weights of the open step, with no gradients."""
    HAND_IN = "hand_in"
    """Lay the sum out for the core."""
    DROP = "drop"
    """Forget the sum: the core will not take it."""
    WAIT = "wait"
    """Nothing yet."""
    LEAVE = "leave"
    """End; nothing is held."""
    BEGIN_ANEW = "begin_anew"
    """The core trains something else now: build another replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """One job."""

    job: Job
    packs: tuple[Pack, ...] = ()
    step: int = 0
    weights: Mapping[str, Offer] = field(default_factory=dict)
    anchor: Mapping[str, Offer] | None = None


class Desk:
    """Speaks for one satellite until the core says that training is over, or `stop` exists."""

    def __init__(
        self, where: str, name: str, hello: Mapping[str, Any], stop: Path, patience_s: float, told: Told | None = None
    ) -> None:
        """With `told`, only what a controller told is claimed."""
        self._told = told
        self._where, self._name, self._hello, self._stop, self._patience_s = where, name, hello, stop, patience_s
        self._client = Client(where)
        self._session, self._lease_s = str(hello["session"]), float(hello["lease_s"])
        self._epoch: int | None = None
        self._done: Key | None = None
        self._held: list[Key] = []
        self._running: Key | None = None
        self._heard_s = time.monotonic()
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="gyre-beat", daemon=True)
        self._beating.start()

    def next(self) -> Errand:
        """What to do now; EngineError when the core was away for longer than the patience."""
        leaving = self._stop.exists()
        try:
            errand = self._join(leaving) if self._epoch is None else self._claim(leaving)
        except Gone as gone:
            errand = self._gone(gone)
        except Over:
            return self._over()
        except EngineGone as away:
            if leaving:
                _LOG.info("satellite %s: left; the core is away", self._name)
                self._forget()
                return Errand(job=Job.LEAVE)
            if time.monotonic() - self._heard_s > self._patience_s:
                raise EngineError(f"{away}; it has been away for {self._patience_s:g} s") from away
            time.sleep(_AGAIN_S)
            return Errand(job=Job.WAIT)
        self._heard_s = time.monotonic()
        return errand

    def _gone(self, gone: Gone) -> Errand:
        lost = f"; {plural(len(self._held), 'micro-step')} dropped" if self._held else ""
        _LOG.info("satellite %s: %s%s", self._name, gone, lost)
        self._forget()
        return Errand(job=Job.DROP)

    def _forget(self) -> None:
        self._epoch = self._done = self._running = None
        self._held = []

    def _join(self, leaving: bool) -> Errand:
        if leaving:
            _LOG.info("satellite %s: left", self._name)
            return Errand(job=Job.LEAVE)
        hello = self._client.get("/hello")
        self._session = str(hello["session"])
        if any(hello[part] != self._hello[part] for part in ("config", "anchor")):
            return Errand(job=Job.BEGIN_ANEW)
        self._epoch = int(self._ask("/join", worker=self._name)["epoch"])
        _LOG.info("satellite %s: joined %s", self._name, self._client.url())
        return Errand(job=Job.WAIT)

    def _claim(self, leaving: bool) -> Errand:
        want = self._want(leaving)
        wait_s = _WAIT_S if self._told is None or want else 0.0
        answer = self._ask("/claim", epoch=self._epoch, done=self._done, leaving=leaving, wait_s=wait_s, want=want)
        if self._told and self._done:
            self._told.did(self._done)
        self._done = None
        match answer:
            case {"run": key}:
                self._running = key_from_json(key)
                packs = packs_from_bytes(
                    self._client.post_for_bytes("/packs", session=self._session, epoch=self._epoch, key=key)
                )
                return Errand(job=Job.RUN, packs=packs, step=self._running[0])
            case {"spent": _} if self._told and want:
                self._told.did(want)
            case {"pull": offers}:
                return Errand(job=Job.PULL, step=offers["step"], weights=offers["weights"], anchor=offers["anchor"])
            case {"hand_in": _}:
                return Errand(job=Job.HAND_IN)
            case {"leave": _}:
                self._ask("/leave", epoch=self._epoch)
                self._forget()
                _LOG.info("satellite %s: left", self._name)
                return Errand(job=Job.LEAVE)
            case {"over": _}:
                return self._over()
        return Errand(job=Job.WAIT)

    def _over(self) -> Errand:
        self._forget()
        _LOG.info("satellite %s: left; training is over", self._name)
        return Errand(job=Job.LEAVE)

    def _want(self, leaving: bool) -> Key | None:
        """What a controller told this satellite to compute next."""
        if self._told is None or leaving:
            return None
        if self._done is None:  # else the core hears of that one at once
            self._told.wait(_LISTEN_S)
        return next((key for key in self._told.wanted() if key != self._done), None)

    def ran(self) -> None:
        """The micro-step of the last RUN is in the sum; the core hears it with the next claim."""
        assert self._running is not None
        self._held.append(self._running)
        self._done, self._running = self._running, None

    def pulled(self, step: int, error: str | None) -> None:
        """The weights of the last PULL are in place, or why not: then they are told anew."""
        self._held, self._done = [], None
        if error is not None:
            _LOG.warning("satellite %s: %s", self._name, error)
            time.sleep(_AGAIN_S)
            return
        try:
            self._ask("/pulled", epoch=self._epoch, step=step)
            if self._told:
                self._told.holds(step - 1)
        except (Gone, EngineGone) as failure:  # the next claim shows it
            _LOG.info("satellite %s: %s", self._name, failure)

    def hand_in(self, offers: Mapping[str, Offer], figures: Figures) -> None:
        """Ask until the core has the sum or will never have it; either way it is not held any more."""
        tries = 0
        keys, told = list(self._held), figures_to_json(figures)
        while tries < _MOST_TRIES:
            try:
                answer = self._ask("/hand_in", epoch=self._epoch, keys=keys, offers=offers, figures=told)
            except Gone as gone:
                self._gone(gone)
                return
            except EngineGone:
                if self._stop.exists() or time.monotonic() - self._heard_s > self._patience_s:
                    self._forget()
                    return
                time.sleep(_AGAIN_S)
                continue
            self._heard_s = time.monotonic()
            if "added" in answer:
                _LOG.info("satellite %s: handed in %s", self._name, plural(len(keys), "micro-step"))
                self._held = []
                return
            if "failed" in answer:
                tries += 1
                _LOG.warning("satellite %s: the core could not fetch gradients: %s", self._name, answer["failed"])
                time.sleep(_AGAIN_S)
        self.abandon()

    def abandon(self) -> None:
        """Leave with what is held; the core computes it again. Never raises for a core that is away."""
        epoch = self._epoch
        self._forget()
        if epoch is not None:
            client = Client(self._where)  # whoever interrupts may be in the middle of a request
            try:
                client.post("/leave", session=self._session, epoch=epoch)
            except EngineError as failure:
                _LOG.info("satellite %s: %s", self._name, failure)
            client.close()

    def close(self) -> None:
        """Leave, whatever is held, and let go."""
        self.abandon()
        self._closed.set()
        self._client.close()

    def _ask(self, path: str, **body: Any) -> dict[str, Any]:
        return self._client.post(path, session=self._session, **body)

    def _beat(self) -> None:
        """Keep the lease while a micro-step takes longer than it."""
        client = Client(self._where)
        while not self._closed.wait(self._lease_s / 3):
            if self._epoch is None:
                continue
            try:
                client.post("/beat", session=self._session, epoch=self._epoch)
            except EngineError as failure:  # the next claim meets it too
                _LOG.debug("satellite %s: %s", self._name, failure)
        client.close()
