"""Publishing to many engines, whatever carries the weights: pause, swap, flush, confirm, continue; each engine alone.

Every engine has a thread of its own, so that none waits for another, and the trainer waits for none longer than
`timeout_s`. A thread whose engine hangs stays behind: when the engine answers again, it is told to continue if it holds
one version whole. An engine that may hold a mix never computes: it stays paused, and the proxy takes its calls
elsewhere, until the next complete publish.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from gyre_data.errors import EngineError, GyreError
from gyre_data.types import PolicyVersion

from . import Published
from .control import Deadline, EngineControl, EngineGone, ask
from .digests import FolderDigests

__all__ = ["Carrier", "FleetPublisher"]

_LOG = logging.getLogger(__name__)
_SETTLE_S = 5.0
"""What the trainer waits beyond `timeout_s` for threads to say what they found."""
_RETRY_S = 2.0
_LOOK_S = 60.0
_UNUSABLE = "it may hold a mix of weights and is out of service until the next complete publish"
_SILENT = "it is out of service until it answers"


class Carrier(Protocol):
    """Brings the bytes of a version to one engine. Both methods raise GyreError and keep to the deadline."""

    whole: bool
    """Whether the engine itself swaps all tensors or none, so that it may continue before it has been looked at."""

    def stage(self, number: int, folder: Path, version: PolicyVersion, deadline: Deadline) -> str:
        """Do what can be done while engine `number` still computes; the answer is given to `swap`."""
        ...

    def swap(self, engine: EngineControl, staged: str, version: PolicyVersion, deadline: Deadline) -> None:
        """Replace the weights of a paused engine and flush its caches."""
        ...


class FleetPublisher:
    """Publishes to engines by any carrier and tells the proxy, when there is one."""

    def __init__(
        self,
        engines: Sequence[str],
        carrier: Carrier,
        *,
        proxy: str | None = None,
        timeout_s: float = 600.0,
        digests: bool = True,
    ) -> None:
        self._timeout_s = timeout_s
        self._digests = digests
        self._closing = threading.Event()
        self._workers = [
            _Worker(number, url, carrier, proxy, timeout_s, self._closing) for number, url in enumerate(engines)
        ]

    def publish(self, folder: Path, version: PolicyVersion) -> tuple[Published, ...]:
        """Make the engines serve the weights in `folder` as `version`, all at the same time."""
        until = Deadline(self._timeout_s + _SETTLE_S)
        wanted = _Wanted(folder.resolve(), version, self._digests)
        for worker in self._workers:
            worker.begin(wanted)
        return tuple(worker.wait(wanted, until) for worker in self._workers)

    def close(self) -> None:
        """Let go of engines that hung; each is told to continue once more where that cannot serve a mix."""
        self._closing.set()
        until = Deadline(_SETTLE_S)
        for worker in self._workers:
            worker.join(until)


class _Wanted:
    """What one publish is to bring about."""

    def __init__(self, folder: Path, version: PolicyVersion, digests: bool) -> None:
        self.folder, self.version, self.started = folder, version, time.monotonic()
        self.by_digests = digests
        self._known: dict[torch.dtype | None, FolderDigests] = {}
        self._lock = threading.Lock()

    def comparable(self, info: dict[str, object]) -> bool:
        """Whether its digests can be compared with the folder's: not those of sliced tensors or of a GPU's own hash."""
        return self.by_digests and info.get("device", "cpu") == "cpu" and info.get("tp_size", 1) == 1

    def digests(self, info: dict[str, object]) -> FolderDigests:
        """The digests that the engine should report."""
        named = getattr(torch, str(info.get("dtype")), None)
        dtype = named if isinstance(named, torch.dtype) else None
        with self._lock:
            if dtype not in self._known:
                self._known[dtype] = FolderDigests(self.folder, dtype)
            return self._known[dtype]


class _Worker:
    """One engine: at most one thread is at work on it."""

    def __init__(
        self, number: int, url: str, carrier: Carrier, proxy: str | None, timeout_s: float, closing: threading.Event
    ) -> None:
        self._number, self._carrier, self._proxy, self._timeout_s = number, carrier, proxy, timeout_s
        self._engine = EngineControl(url, timeout_s)
        self._closing = closing
        self._thread: threading.Thread | None = None
        self._removed = False
        self._begun: _Wanted | None = None
        self._result: Published | None = None
        self._reported = threading.Event()

    def begin(self, wanted: _Wanted) -> None:
        if self._thread is not None:
            self._thread.join(0.2 if self._reported.is_set() else 0)
            if self._thread.is_alive():
                return
        self._begun, self._result = wanted, None
        self._reported.clear()
        self._thread = threading.Thread(target=self._work, args=(wanted,), name="gyre-publish", daemon=True)
        self._thread.start()

    def wait(self, wanted: _Wanted, until: Deadline) -> Published:
        """What became of it, or that it hangs: in this publish, or still in an earlier one."""
        if self._begun is wanted and self._reported.wait(until.left()) and self._result is not None:
            return self._result
        assert self._begun is not None
        error = f"{self._engine.url}: still busy with {self._begun.version}, the engine hangs; {_SILENT}"
        return self._published(wanted, error, usable=False)

    def join(self, until: Deadline) -> None:
        if self._thread is not None:
            self._thread.join(until.left())
            if self._thread.is_alive():
                _LOG.warning("%s hangs and could not be told to continue", self._engine.url)

    def _published(self, wanted: _Wanted, error: str | None, *, usable: bool) -> Published:
        seconds = time.monotonic() - wanted.started
        return Published(
            engine=self._engine.url, version=wanted.version, seconds=seconds, error=error, usable=usable
        )  # fmt: skip

    def _report(self, wanted: _Wanted, error: str | None, *, usable: bool = True) -> None:
        if error:
            _LOG.warning("publishing %s: %s", wanted.version, error)
        self._result = self._published(wanted, error, usable=usable)
        self._reported.set()

    def _work(self, wanted: _Wanted) -> None:
        deadline = Deadline(self._timeout_s)
        before = _State()
        try:
            staged = self._carrier.stage(self._number, wanted.folder, wanted.version, deadline)
        except GyreError as failure:
            self._report(wanted, f"{failure}; the engine goes on with the weights it has")
            return
        try:
            self._engine.pause()
            before.read(self._engine, wanted, deadline)
            before.touched = True
            self._carrier.swap(self._engine, staged, wanted.version, deadline)
            self._confirm(wanted, before, deadline)
            self._engine.resume()
        except GyreError as failure:
            if deadline.passed:
                self._take_out()
            self._recover(wanted, before, str(failure))
        else:
            error = self._tell_proxy("add" if self._removed else "version", wanted.version)
            self._removed = self._removed and error is not None
            self._report(wanted, error)

    def _confirm(self, wanted: _Wanted, before: _State, deadline: Deadline) -> None:
        served = self._engine.version()
        if served != str(wanted.version):
            raise EngineError(
                f"{self._engine.url}: wanted it to serve {wanted.version}, it says {served}; does someone else publish?"
            )
        if wanted.comparable(before.info):
            wanted.digests(before.info).check(self._engine.digests(deadline))

    def _recover(self, wanted: _Wanted, before: _State, error: str) -> None:
        """After a failure: continue if the engine holds one version whole, else take it out of service."""
        try:
            whole = self._settle(before)
        except GyreError as failure:
            self._take_out()
            doubt = _UNUSABLE if before.touched else _SILENT
            self._report(wanted, f"{error}; {failure}; {doubt}", usable=False)
            if not isinstance(failure, EngineGone):
                self._follow(before)
            return
        if whole:
            self._bring_back()
            self._report(wanted, f"{error}; the engine goes on with {before.version or 'the weights it has'}")
        else:
            self._take_out()
            self._report(wanted, f"{error}; {_UNUSABLE}", usable=False)

    def _settle(self, before: _State) -> bool:
        """Continue if the old version is there whole; GyreError when the engine does not answer."""
        look = Deadline(min(self._timeout_s, _LOOK_S))
        whole = not before.touched or before.is_served(self._engine, self._carrier.whole, look)
        if whole:
            self._engine.resume()
        return whole

    def _follow(self, before: _State) -> None:
        """Wait for an engine that hangs, as long as training goes on, and continue it when that is safe."""
        while not self._closing.wait(_RETRY_S):
            try:
                if self._settle(before):
                    _LOG.warning("%s answers again and goes on with %s", self._engine.url, before.version)
                    self._bring_back()
                else:
                    _LOG.warning("%s answers again; %s", self._engine.url, _UNUSABLE)
            except EngineGone:
                return
            except GyreError:
                continue
            return
        if self._carrier.whole or not before.touched:
            try:
                self._engine.resume()
            except GyreError as failure:
                _LOG.warning("%s", failure)

    def _take_out(self) -> None:
        """Its calls go on elsewhere at once: a call that only drained would be finished by the mix."""
        if not self._removed:
            self._removed = self._tell_proxy("remove", None) is None and self._proxy is not None

    def _bring_back(self) -> None:
        if self._removed:
            self._removed = self._tell_proxy("add", None) is not None

    def _tell_proxy(self, action: str, version: PolicyVersion | None) -> str | None:
        """Return what went wrong, if anything did."""
        if self._proxy is None:
            return None
        body = {"action": action, "url": self._engine.url}
        if version is not None and action == "version":
            body["version"] = str(version)
        try:
            ask("POST", f"{self._proxy.rstrip('/')}/api/engines", body, timeout_s=min(30.0, self._timeout_s))
        except EngineError as failure:
            _LOG.warning("%s", failure)
            return str(failure)
        return None


class _State:
    """What an engine served before its weights were touched."""

    def __init__(self) -> None:
        self.touched = False
        self.version: str | None = None
        self.info: dict[str, object] = {}
        self._digests: dict[str, str] | None = None

    def read(self, engine: EngineControl, wanted: _Wanted, deadline: Deadline) -> None:
        self.version, self.info = engine.version(), engine.info()
        if wanted.by_digests:
            self._digests = engine.digests(deadline)

    def is_served(self, engine: EngineControl, trusted: bool, deadline: Deadline) -> bool:
        """Whether this is what the engine serves now; without digests its word counts if it is `trusted`."""
        if engine.version() != self.version:
            return False
        return trusted if self._digests is None else engine.digests(deadline) == self._digests
