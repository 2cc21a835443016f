"""`gyre train` with `scheduler.cells`: everything is kept up and looked at until the controller has done its work."""

from __future__ import annotations

import fcntl
import logging
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from gyre_data.child import answers
from gyre_data.errors import ConfigError, EngineError
from gyre_data.run_info import read_info
from gyre_data.show.numbers import plural
from gyre_data.store import RunWriter
from gyre_data.types import PolicyVersion
from gyre_train.config import TrainingConfig, to_toml
from gyre_train.folder import TrainSummary, Versions, check_folder, checkpoints, latest_checkpoint, read_state
from gyre_train.interrupts import asked_to_stop
from gyre_train.lineage import lineage_of
from gyre_train.metrics import read_metrics
from gyre_train.page import Page
from gyre_train.progress import ProgressLine
from gyre_train.rollout.dispatch import Dispatcher, ProxyApi
from gyre_train.rollout.loop import split_tasks
from gyre_train.rollout.services import Services
from gyre_train.source import Split

from .fleet import (
    batch_groups,
    cell_names,
    core_config,
    engine_command,
    fleet_settings,
    folder_of,
    queries,
    receiver_arguments,
)
from .passes import Passes
from .watch import Seen, seen, told

__all__ = ["check_policy_of", "train_on_cells"]

_LOG = logging.getLogger(__name__)
_LOOK_S = 0.5
_STEPS_KEPT = 9
"""Checkpoints for a policy whose bursts have no fixed length: a cell that comes back loads the served ones."""
_REFUSALS = 3
_GRACE_S = 60.0
_READY_S = 600.0
_LAST = "last"
"""The cell that serves the last weights for their pass, when the others have ended."""


def train_on_cells(config: TrainingConfig, *, show_progress: bool = False) -> TrainSummary:
    """Train as configured until `train.steps`, on cells that serve and train in turns; resumes what was stopped."""
    keep = check_policy_of(config)
    check_folder(Path(config.output.dir))
    folder_of(config).mkdir(parents=True, exist_ok=True)
    with (folder_of(config) / "command.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another `gyre train` works on {config.output.dir}; wait for it or stop it") from None
        page = Page(config.output)
        try:
            elastic = _Elastic(config, keep, show_progress)
            with asked_to_stop(elastic.ask_to_stop):
                return elastic.run()
        finally:
            page.close()


def check_policy_of(config: TrainingConfig) -> int:
    """Checkpoints that must be kept for cells under the policy; ConfigError when there is no such policy."""
    scheduler = config.scheduler
    try:
        choose, errors = import_module("gyre_sched.choose"), import_module("gyre_sched.errors")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"scheduler.cells: wanted the package gyre_sched, got {error}; install it again, or remove [scheduler] for "
            "fixed pools"
        ) from error
    try:
        policy = choose.policy(scheduler.policy, scheduler.policy_settings)
    except errors.SchedulerError as error:
        raise ConfigError(f"scheduler.policy: {error}") from error
    return int(getattr(policy, "burst", _STEPS_KEPT - 1)) + 1


class _Elastic:
    """One session."""

    def __init__(self, config: TrainingConfig, keep: int, show_progress: bool) -> None:
        self._config, self._show = config, show_progress
        self._stop = threading.Event()
        self._out, self._folder = Path(config.output.dir), folder_of(config)
        self._stop_file = self._out / "stop"
        self._stop_file.unlink(missing_ok=True)
        self._tasks, self._held_out = split_tasks(config, Split(config.data))
        if odd := [name for name in self._tasks if "#" in name]:
            raise ConfigError(f"rollout.tasks: a task's id may hold no # with cells, got {odd[0]}; rename it")
        self._base, self._policy_id = lineage_of(config.model.path).version, _policy_id(config)
        core = core_config(config, self._policy_id, keep)
        (self._folder / "core.toml").write_text(to_toml(core), encoding="utf-8")
        self._services = Services(config)
        brings = config.publish.method == "mooncake"
        self._receiver = self._services.add_receiver(partial(receiver_arguments, config)) if brings else ""
        self._services.add_controller(self._folder / "fleet.toml")
        self._proxy = str(self._services.config.publish.proxy)
        self._place = import_module("gyre_sched.cells.local").LocalProcesses(self._folder / "cells")
        self._core_log = self._folder / "cells" / cell_names(config)[0] / "log"
        self._core_read = self._core_log.stat().st_size if self._core_log.exists() else 0
        """How much of the core's log is read; what earlier sessions wrote is not looked at."""
        self._core_said = deque[str](maxlen=_REFUSALS)
        self._first, self._shown, self._metrics_size = self._step(), 0, 0
        self._said = self._refused = ""

    def ask_to_stop(self, number: signal.Signals) -> None:
        """End everything in order."""
        _LOG.warning("%s: controller, harnesses, cells and proxy are ended in this order", number.name)
        self._stop.set()

    def _step(self) -> int:
        newest = latest_checkpoint(checkpoints(self._config))
        return int(read_state(newest)["step"]) if newest else 0

    def _version(self, step: int) -> PolicyVersion:
        return PolicyVersion(policy_id=self._policy_id, n=step) if step else self._base

    def run(self) -> TrainSummary:
        """Until the controller has done its work, or all is to stop."""
        config = self._config
        self._write_fleet()
        try:
            self._services.start()
            api = ProxyApi(self._proxy)
            dispatcher = Dispatcher(api, self._tasks, attempts=config.rollout.attempts, seed=config.train.seed)
            passes = Passes(config, dispatcher, self._held_out, self._version, self._first)
            total, file = config.train.steps, self._out / "doing.json"
            with ProgressLine(total=total, done=self._first, show=self._show, file=file) as progress:
                while not self._is_stopping() and not self._is_over():
                    self._look(passes, progress)
                self._show_steps(progress)
                if not self._is_stopping():
                    self._evaluate_last(api, passes, progress)
            api.close()
        finally:
            self._services.stop(self._end_cells)
            if self._stop_file.exists():
                self._stop.set()
            self._stop_file.unlink(missing_ok=True)
        if failed := self._services.failed or self._refused:
            raise EngineError(failed)
        return self._summary()

    def _write_fleet(self) -> None:
        """The controller's settings, with as many groups as the steps that are left need and some were given up for."""
        config, now = self._config, seen(self._folder / "metrics.prom")
        count = config.train.steps * batch_groups(config) + (now.dropped if now else 0)
        settings = fleet_settings(
            config, proxy=self._proxy, groups=queries(self._tasks, config.train.seed, count), base=self._base,
            policy_id=self._policy_id, receiver=self._receiver,
        )  # fmt: skip
        new = self._folder / "fleet.partial"
        new.write_text(import_module("gyre_sched.cells.settings").to_toml(settings), encoding="utf-8")
        new.replace(self._folder / "fleet.toml")

    def _is_stopping(self) -> bool:
        return self._stop.is_set() or self._stop_file.exists() or bool(self._services.failed or self._refused)

    def _is_over(self) -> bool:
        """Whether the last step is made; a controller that ran out of groups gets others for those given up."""
        if not self._services.is_done:
            return False
        if self._step() >= self._config.train.steps:
            return True
        self._write_fleet()
        self._services.restart_done()
        return False

    def _look(self, passes: Passes, progress: ProgressLine) -> None:
        """Show what came, queue and write passes, and wait a little."""
        self._show_steps(progress)
        self._look_at_core()
        now = seen(self._folder / "metrics.prom")
        if now is not None and now.serving and passes.is_due(now.served):
            passes.begin(now.served)
        self._say(progress, now, passes.look())

    def _look_at_core(self) -> None:
        """A core that refuses what it is to train is started again and again: the third time it is told."""
        if not self._core_log.exists():
            return
        with self._core_log.open("rb") as file:
            file.seek(self._core_read)
            came = file.read()
        whole = came[: came.rfind(b"\n") + 1]
        self._core_read += len(whole)
        said = whole.decode(errors="replace").splitlines()
        self._core_said.extend(line.removeprefix("gyre: ") for line in said if line.startswith("gyre: "))
        if len(self._core_said) == _REFUSALS and len(set(self._core_said)) == 1:
            self._refused = f"the core does not train, it says: {self._core_said[0]}"

    def _say(self, progress: ProgressLine, now: Seen | None, held_out: int) -> None:
        steps, folder = self._config.train.steps, self._folder
        line = told(now, steps, held_out) if now else f"waiting for cells to start ({folder}/cells/*/log)"
        quiet = told(replace(now, at_work=min(now.at_work, 1)), steps, 0) if now else line  # not a line for each end
        if quiet != self._said:
            _LOG.info("%s", line)
        self._said = quiet
        with progress.waiting("cells", line):
            self._stop.wait(_LOOK_S)

    def _show_steps(self, progress: ProgressLine) -> None:
        file = self._out / "metrics.jsonl"
        size = file.stat().st_size if file.exists() else 0
        if size == self._metrics_size:
            return
        self._metrics_size = size
        for row in read_metrics(file):
            if row["step"] > max(self._first, self._shown):
                progress.step(row)
                self._shown = row["step"]

    def _evaluate_last(self, api: ProxyApi, passes: Passes, progress: ProgressLine) -> None:
        """The cells have ended: one engine with the newest weights serves what is still to be evaluated."""
        step = self._step()
        if passes.is_due(step):
            passes.begin(step)
        if not passes.open:
            return
        with progress.waiting("evaluate", f"evaluating {self._version(step)}: waiting for an engine"):
            url = self._serve_last(step)
            api.send("POST", "/api/engines", {"action": "add", "url": url})
        while (missing := passes.look()) and not self._is_stopping():
            with progress.waiting("evaluate", f"evaluating: waiting for {plural(missing, 'held-out task')}"):
                self._stop.wait(_LOOK_S)

    def _serve_last(self, step: int) -> str:
        """An engine in a cell of its own, which the next session finds again; EngineError when it does not come up."""
        weights = latest_checkpoint(checkpoints(self._config)) or Path(self._config.model.path)
        values = {"{weights}": str(weights.resolve()), "{label}": str(self._version(step)), "{cell}": _LAST}
        command = engine_command(self._config)
        for name, value in values.items():
            command = [part.replace(name, value) for part in command]
        make = import_module("gyre_sched.cells.processes").Program
        slot = self._place.start(_LAST, make(kind="rollout", epoch=step, command=tuple(command)))
        deadline = time.monotonic() + _READY_S
        while not answers(f"http://{slot.address}/ready"):
            now = self._place.slot(_LAST)
            if now is None or not now.running or time.monotonic() > deadline:
                raise EngineError(f"the engine for the last pass did not come up; see {self._folder}/cells/{_LAST}/log")
            time.sleep(_LOOK_S)
        return f"http://{slot.address}"

    def _end_cells(self) -> None:
        """Each is asked, all at once, as trainers hand over what they hold first; the proxy forgets their engines."""
        api, names = ProxyApi(self._proxy, patience_s=1.0), [*cell_names(self._config), _LAST]
        for name in names:
            slot = self._place.slot(name)
            if slot is not None and slot.kind == "rollout":
                with suppress(EngineError, ConfigError):  # a proxy that is away has nothing to lose
                    api.send("POST", "/api/engines", {"action": "remove", "url": f"http://{slot.address}"})
        api.close()
        ends = [threading.Thread(target=self._place.end, args=(name,), kwargs={"grace_s": _GRACE_S}) for name in names]
        for one in ends:
            one.start()
        for one in ends:
            one.join()

    def _summary(self) -> TrainSummary:
        rows = [row for row in read_metrics(self._out / "metrics.jsonl") if row["step"] > self._first]
        newest, step = latest_checkpoint(checkpoints(self._config)), self._step()
        return TrainSummary(
            output=self._config.output.dir,
            version=str(self._version(step)),
            checkpoint=str(newest) if newest else None,
            step=step,
            steps_done=step - self._first,
            loss=rows[-1]["loss"] if rows else None,
            trained_tokens=sum(row["trained_tokens"] for row in rows),
            publish_errors=(),
            stopped=self._stop.is_set(),
        )


def _policy_id(config: TrainingConfig) -> str:
    """Of the weights that will be made. Decided on first use; a core that an earlier session left holds the folder."""
    output = Path(config.output.dir)
    known = read_info(output)
    if "policy_id" in known and "base" in known:
        return str(known["policy_id"])
    with RunWriter(output) as writer:
        return Versions(config, writer, lineage_of(config.model.path).version).policy_id
