"""A cell that serves: its engine is started, confirmed, admitted, swapped and drained.

An engine is given calls only after it said itself that it serves the wanted weights, and gets none from the moment it
is to leave; replies that it has then finish, or go on elsewhere from what was sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from .lane import CellLostError, Turn
from .processes import Processes, Program, Slot
from .proxy import ProxyApi
from .settings import FleetSettings
from .training import core_address, key
from .wire import ask

__all__ = ["Rollout"]

_LOG = logging.getLogger(__name__)
_PROBE_S = 5.0
_EMPTY_S = 5.0
"""How long replies may take to leave an engine that was told to abort them; then it is removed with them."""


class Rollout:
    """The steps of serving, each of which may be begun again by the next controller."""

    def __init__(self, settings: FleetSettings, processes: Processes, proxy: ProxyApi) -> None:
        self._settings, self._processes, self._proxy = settings, processes, proxy

    def serve(self, turn: Turn, cell: str, epoch: int, version: int) -> None:
        """Bring a cell to serve a version, whatever it does now; returns when the proxy gives it calls."""
        settings = self._settings.rollout
        weights, label = self._settings.weights_of(version)
        found = self._processes.slot(cell)
        if found is not None and not (found.running and (found.kind, found.epoch) == ("rollout", epoch)):
            self.forget(turn, cell, grace_s=settings.grace_s)  # the next engine has another address
        values = {"cell": cell, "weights": weights, "label": label}
        cache = settings.cache
        command = [_filled(part, values) for part in settings.command] + list(cache.flags if cache else ())
        env = cache.env if cache else {}
        program = Program(kind="rollout", epoch=epoch, command=tuple(command), env=env)
        slot = self._processes.start(cell, program)
        url = f"http://{slot.address}"
        served = turn.until(lambda: self._served(cell, url), settings.ready_s, f"engine {url} of cell {cell} ready")
        turn.passed("engine_start")
        if served != label:
            self.load(turn, url, version)
            turn.passed("weights")
        known = turn.insist(lambda: self._proxy.admit(url))
        turn.passed("admit")
        if known != label:
            raise CellLostError(f"wanted cell {cell} to serve {label}, the proxy has it as {known}")

    def _served(self, cell: str, url: str) -> str | None:
        """The version it says that it serves, once it is ready."""
        try:
            ask(f"{url}/ready", timeout_s=_PROBE_S)
            return str(ask(f"{url}/model_info", timeout_s=_PROBE_S).get("weight_version"))
        except OSError:
            slot = self._processes.slot(cell)
            if slot is None or not slot.running:
                raise CellLostError(f"the engine of cell {cell} ended before it was ready; see its log") from None
            return None

    def swap(self, turn: Turn, cell: str, version: int) -> None:
        """Bring another version to a cell that serves; its replies stay open."""
        url = self.url(cell)
        self.load(turn, url, version)
        label = self._settings.weights_of(version)[1]
        turn.insist(lambda: self._proxy.tell_version(url, label))
        turn.passed("weights")

    def load(self, turn: Turn, url: str, version: int) -> None:
        """Pause, load, flush, confirm, continue. OSError leaves an engine that must not serve."""
        label = self._settings.weights_of(version)[1]
        weights = self._brought(url, version)
        turn.wait()
        ask(f"{url}/pause_generation", {"mode": "retract"}, timeout_s=self._settings.call_s)
        body = {"model_path": weights, "weight_version": label, "flush_cache": True, "abort_all_requests": False}
        ask(f"{url}/update_weights_from_disk", body, timeout_s=self._settings.rollout.ready_s)
        served = ask(f"{url}/model_info", timeout_s=self._settings.call_s).get("weight_version")
        if served != label:
            raise CellLostError(f"wanted {url} to serve {label}, it says {served}")
        ask(f"{url}/continue_generation", {}, timeout_s=self._settings.call_s)

    def _brought(self, url: str, version: int) -> str:
        """The folder that an engine is to load: what the core brought there, while the engine computes, or its own."""
        (folder, label), settings = self._settings.weights_of(version), self._settings.rollout
        core = core_address(self._settings, self._processes) if settings.receiver and version else ""
        if not core:
            return folder
        receiver = settings.receiver.replace("{host}", str(urlsplit(url).hostname))
        body = {"version": version, "label": label, "receiver": receiver}
        try:
            brought = str(ask(f"http://{core}/weights", body, timeout_s=settings.ready_s, key=key())["folder"])
        except (OSError, KeyError) as error:
            _LOG.warning("%s: the core did not bring %s, so it loads %s: %s", url, label, folder, error)
            return folder
        _LOG.info("%s: the core brought %s", url, label)
        return brought

    def leave(self, turn: Turn, cell: str, drained: Callable[[], None]) -> None:
        """Take a cell out of service and end its engine; `drained` is called once it has no reply left."""
        found, answers = self._processes.slot(cell), True
        if found is not None and found.kind == "rollout":
            url = f"http://{found.address}"
            turn.insist(lambda: self._proxy.drain(url))
            turn.passed("drain")
            answers = self._empty(turn, url)
            turn.insist(lambda: self._proxy.remove(url))
            turn.passed("replies")
        drained()
        if found is not None and found.kind == "rollout":
            self._processes.end(cell, grace_s=self._settings.rollout.grace_s if answers else 0.0)
            turn.passed("engine_stop")

    def _empty(self, turn: Turn, url: str) -> bool:
        """Let replies finish for a while, then have the engine give back what it has of them; whether it answered."""
        deadline = time.monotonic() + self._settings.rollout.finish_s
        while self._in_flight(turn, url) and time.monotonic() < deadline:
            turn.wait(0.1)
        try:
            ask(f"{url}/abort_request", {"abort_all": True}, timeout_s=_PROBE_S)
        except OSError:
            return False  # its replies go on elsewhere from what it has sent
        deadline = time.monotonic() + _EMPTY_S
        while self._in_flight(turn, url) and time.monotonic() < deadline:
            turn.wait(0.01)
        return True

    def _in_flight(self, turn: Turn, url: str) -> int:
        engine = turn.insist(self._proxy.engines).get(url)
        return int(engine["in_flight"]) if engine else 0

    def forget(self, turn: Turn, cell: str, *, grace_s: float = 0.0) -> None:
        """Take a cell's engine from the proxy, whose replies go on elsewhere, and end what is left of it."""
        found = self._processes.slot(cell)
        if found is None:
            return
        if found.kind == "rollout":
            turn.insist(lambda: self._proxy.remove(f"http://{found.address}"))
        self._processes.end(cell, grace_s=grace_s)

    def url(self, cell: str) -> str:
        """Of a cell's engine."""
        slot: Slot | None = self._processes.slot(cell)
        if slot is None or not slot.running or slot.kind != "rollout":
            raise CellLostError(f"wanted an engine in cell {cell}, got {slot}")
        return f"http://{slot.address}"


def _filled(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace(f"{{{name}}}", value)
    return part
