"""Engine, proxy and launcher, or proxy, launcher and controller of cells, as processes that are kept up meanwhile.

They are no part of the trainer: one that is killed leaves them at work, and the next session finds them by
`services.json` in the trainer's folder. A service that ends is started again: an engine with the newest checkpoint, the
proxy on its port, where harnesses wait for it, the launcher with what the dead one left. When training ends, or is
asked to stop, so do they.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

from gyre_data.child import answers, free_port, start_gyre, stop
from gyre_data.errors import EngineError
from gyre_train.config import TrainingConfig
from gyre_train.folder import latest_checkpoint, read_state
from gyre_train.lineage import lineage_of

__all__ = ["Services", "launcher_arguments", "proxy_arguments", "services"]

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.5
_UP_S = 180.0
_SAME_START_S = 0.05  # the time of a start is told in hundredths of a second
_MAX_STARTS = 5
_ASKING = ("run", "cells")
"""Services that ask something of others; they end first."""
_GAVE_UP = 3
"""Exit status of a controller whose core does not come up."""
_SOON_S = 60.0
"""A service that ends `_MAX_STARTS` times, each within so many seconds, will not come up by itself."""


@dataclass(kw_only=True, slots=True)
class _Service:
    """One process: how to start it, where it answers, and which process it is now."""

    name: str
    arguments: Callable[[], list[str]]
    log: Path
    ready_url: str | None
    module: str = "gyre_data"
    ends: bool = False
    """Whether it ends by itself, with status 0, once its work is done."""
    url: str = ""
    process: psutil.Process | None = None
    child: Popen[bytes] | None = None
    started: float = field(default_factory=time.monotonic)
    num_quick_ends: int = 0

    def is_up(self) -> bool:
        """Whether the process is there."""
        if self.child is not None:
            return self.child.poll() is None
        return _lives(self.process)

    def is_done(self) -> bool:
        """Whether it has ended because its work is done. One that was found is started again, and says so then."""
        return self.ends and self.child is not None and self.child.poll() == 0

    def gave_up(self) -> bool:
        """Whether it has said that another start is no use."""
        return self.ends and self.child is not None and self.child.poll() == _GAVE_UP

    @property
    def title(self) -> str:
        """Its command, for people."""
        return f"gyre {self.name}" if self.module == "gyre_data" else f"python -m {self.module}"

    def start(self) -> None:
        """Start it; it takes a while until it answers."""
        self.child = start_gyre(self.arguments(), self.log, module=self.module)
        self.process, self.started = psutil.Process(self.child.pid), time.monotonic()

    def wait(self) -> None:
        """Wait until it answers; EngineError with the end of its log when it ends or takes too long."""
        deadline = time.monotonic() + _UP_S
        while self.ready_url is not None and not answers(self.ready_url):
            if not self.is_up() or time.monotonic() > deadline:
                raise EngineError(f"`{self.title}` did not come up at {self.ready_url}; {self.tail()}")
            time.sleep(0.1)

    def tail(self) -> str:
        """The end of its log, for an error."""
        told = self.log.read_text(errors="replace")[-800:].strip() if self.log.exists() else ""
        return f"its log {self.log} ends:\n{told}"

    def end(self) -> None:
        """Ask it to end and wait."""
        if self.child is not None:
            stop(self.child)
            return
        if self.process is None:
            return
        deadline = time.monotonic() + 20
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(psutil.NoSuchProcess):  # which psutil says of another under its number too
                self.process.send_signal(number)
            while _lives(self.process) and time.monotonic() < deadline:
                time.sleep(0.05)


def _lives(process: psutil.Process | None) -> bool:
    """Whether it is there: with its number and the time of its start, so that nobody else is taken for it."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _known_process(pid: int, created: float) -> psutil.Process | None:
    """The process that was noted, if it is still there."""
    try:
        found = psutil.Process(pid)
        return found if abs(found.create_time() - created) < _SAME_START_S else None
    except psutil.NoSuchProcess:
        return None


def proxy_arguments(config: TrainingConfig, engines: Sequence[str], port: str) -> list[str]:
    """Of `gyre`: the proxy in front of these engines; without any, of those that cells bring."""
    named = [word for url in engines for word in ("--engine", url)] or ["--await-engines"]
    words = ["proxy", "--run", config.rollout.run, "--tokenizer", config.model.path, "--port", port]
    return [*words, *named, *config.rollout.proxy_flags]


def launcher_arguments(config: TrainingConfig) -> list[str]:
    """Of `gyre`: the launcher that runs what is queued."""
    rollout = config.rollout
    words = ["run", "-p", rollout.tasks, "--run", rollout.run, "--serve", "-j", str(rollout.jobs)]
    words += ["-a", rollout.harness] if rollout.harness else []
    words += ["--worker", rollout.worker] if rollout.worker else []
    return [*words, *rollout.run_flags]


@contextmanager
def services(config: TrainingConfig) -> Iterator[TrainingConfig]:
    """Keep what rollouts need up while the block runs, and give the config with its addresses."""
    if not config.rollout.tasks:
        yield config
        return
    kept = Services(config)
    try:
        kept.start()
        yield kept.config
    finally:
        kept.stop()
    if kept.failed:
        raise EngineError(kept.failed)


class Services:
    """All of them, with the thread that looks after them. `config` has their addresses."""

    def __init__(self, config: TrainingConfig) -> None:
        """Find those that an earlier session left; nothing is started yet."""
        self._output = Path(config.output.dir)
        self._output.mkdir(parents=True, exist_ok=True)
        self._file = self._output / "services.json"
        known = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._known: dict[str, dict[str, float]] = known
        self._services: list[_Service] = []
        engines = config.publish.engines or tuple(
            self._add_engine(config, number).url
            for number in range(0 if config.scheduler.cells else config.rollout.engines)
        )
        proxy = config.publish.proxy or self._add_proxy(config, engines).url
        self.config = replace(config, publish=replace(config.publish, engines=tuple(engines), proxy=proxy))
        self._add_launcher(config)
        self.failed = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="services", daemon=True)

    def add_receiver(self, arguments: Callable[[str], list[str]]) -> str:
        """Also keep a receiver of weights up (`arguments`: of `gyre`, with its port); returns its URL."""
        return self._add("receive", lambda port: arguments(str(port)), "/").url

    def add_controller(self, settings: Path) -> None:
        """Also keep a controller of cells up, until it says that its work is done; none may be added after `start`."""
        self._add("cells", lambda _: [str(settings)], None, module="gyre_sched.cells", ends=True)

    @property
    def is_done(self) -> bool:
        """Whether the controller of cells has done its work."""
        return any(service.is_done() for service in self._services)

    def restart_done(self) -> None:
        """There is more work for the controller that had done its work."""
        for service in self._services:
            if service.is_done():
                service.start()
                self._note()

    def start(self) -> None:
        """Start what is not up yet, in order, and wait for each."""
        for service in self._services:
            if not service.is_up():
                service.start()
                self._note()
            service.wait()
        self._thread.start()

    def stop(self, end_cells: Callable[[], None] = lambda: None) -> None:
        """End them, the launcher before the proxy, so that its harnesses end while the proxy can still say so.

        A controller goes first: it would put new executions, and cells, in the places of those that end. `end_cells`
        is called when nothing is asked of cells any more.
        """
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        for service in reversed([one for one in self._services if one.name in _ASKING]):
            service.end()
        end_cells()
        for service in reversed([one for one in self._services if one.name not in _ASKING]):
            service.end()
        self._file.unlink(missing_ok=True)

    def _look_after(self) -> None:
        while not self._over.wait(_LOOK_S):
            for number, service in enumerate(self._services):
                if service.is_up() or service.is_done():
                    continue
                if service.gave_up():
                    self._fail(f"`{service.title}` gave up; {service.tail()}")
                    return
                needed = [one.ready_url for one in self._services[:number] if one.ready_url is not None]
                if not all(map(answers, needed)):  # it would not come up without them
                    continue
                if not self._revive(service):
                    self._fail(f"`{service.title}` ended {_MAX_STARTS} times soon after its start; {service.tail()}")
                    return

    def _fail(self, why: str) -> None:
        self.failed = why
        _LOG.error("%s", why)
        (self._output / "stop").touch()

    def _revive(self, service: _Service) -> bool:
        quick = time.monotonic() < service.started + _SOON_S
        service.num_quick_ends = service.num_quick_ends + 1 if quick else 1
        if service.num_quick_ends > _MAX_STARTS:
            return False
        _LOG.warning("`%s` ended; it is started again", service.title)
        if self._over.wait(min(5.0, 0.5 * (service.num_quick_ends - 1))):
            return True
        service.start()
        self._note()
        return True

    def _note(self) -> None:
        found = {
            f"{service.name}-{number}": {
                "pid": service.process.pid, "created": service.process.create_time(), "port": _port(service.url)
            }
            for number, service in enumerate(self._services)
            if service.process is not None
        }  # fmt: skip
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(self._file)

    # --- the three of them --------------------------------------------------------------------------------------------

    def _add(self, name: str, arguments: Callable[[int], list[str]], ready_path: str | None, **more: Any) -> _Service:
        known = self._known.get(f"{name}-{len(self._services)}", {})
        process = _known_process(int(known["pid"]), known["created"]) if known else None
        port = int(known.get("port", 0))
        if not _lives(process) and ready_path is not None:
            port = free_port(port)
        url = f"http://127.0.0.1:{port}" if ready_path is not None else ""
        service = _Service(
            name=name, arguments=lambda: arguments(port), log=self._output / f"{name}-{len(self._services)}.log",
            ready_url=f"{url}{ready_path}" if ready_path is not None else None, url=url, process=process,
            **more,
        )  # fmt: skip
        self._services.append(service)
        return service

    def _add_engine(self, config: TrainingConfig, number: int) -> _Service:
        def arguments(port: int) -> list[str]:
            folder, version = self._newest(config)
            return [
                "engine", str(folder), "--port", str(port), "--weight-version", version, *config.rollout.engine_flags
            ]  # fmt: skip

        return self._add("engine", arguments, "/ready")

    def _add_proxy(self, config: TrainingConfig, engines: Sequence[str]) -> _Service:
        return self._add("proxy", lambda port: proxy_arguments(config, engines, str(port)), "/api/status")

    def _add_launcher(self, config: TrainingConfig) -> _Service:
        return self._add("run", lambda _: launcher_arguments(config), None)

    def _newest(self, config: TrainingConfig) -> tuple[Path, str]:
        """The newest weights and their version."""
        newest = latest_checkpoint(self._output / "checkpoints")
        if newest is not None:
            return newest, str(read_state(newest)["version"])
        return Path(config.model.path), str(lineage_of(config.model.path).version)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2]) if url else 0
