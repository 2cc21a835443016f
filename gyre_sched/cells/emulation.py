"""A scenario of the simulator lived through by real processes: controller, cells, proxy and harnesses that only sleep.

An hour takes some seconds. Durations are the very ones that the simulator draws for the seed; what switches, publishing
and messages cost is what they cost on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gyre_sched.actions import Dispatch, StepApplied
from gyre_sched.choose import policy
from gyre_sched.errors import SchedulerError
from gyre_sched.history import History
from gyre_sched.ledger import read, replay
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate
from gyre_sched.state import State

from .ports import free_port
from .proxy import ProxyApi
from .settings import FleetSettings, load, to_toml
from .wire import ask

__all__ = ["Emulation", "Lived", "emulate", "measured"]

_HERE = Path(__file__).resolve().parents[2]
_UP_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lived:
    """What an emulated run took, beside what the simulator says of it."""

    hours: float
    """Emulated, from the first dispatch to the last step."""
    simulated_h: float
    """The simulator's, with the scenario's own costs."""
    replayed_h: float
    """The same with the means of the costs of switches, steps and publishing that this run had."""
    steps: int
    staleness: float
    switches: int


class Emulation:
    """The processes of one emulated run; tests kill and stop them."""

    def __init__(
        self,
        scenario: Scenario,
        chosen: str,
        policy_settings: Mapping[str, Any],
        *,
        folder: Path,
        tokenizer: Path,
        seed: int = 0,
        hour_s: float = 6.0,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.scenario, self.seed, self.hour_s = folder.resolve(), scenario, seed, hour_s
        self.chosen, self.policy_settings = chosen, dict(policy_settings)
        self.settings_file = self.folder / "settings.toml"
        self.work_file = self.folder / "work.json"
        self._tokenizer, self._changes = tokenizer, dict(changes or {})
        self._stack = ExitStack()
        self.controller: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> FleetSettings:
        """What the controller is told."""
        return load(self.settings_file)

    def __enter__(self) -> Emulation:
        self.folder.mkdir(parents=True, exist_ok=True)
        work = _work(self.scenario, self.seed) | {"ledger": str(self.folder / "ledger.jsonl")}
        self.work_file.write_text(json.dumps(work))
        try:
            self.proxy = self._start_proxy()
            self.settings_file.write_text(to_toml(self._told(list(work["seconds"]))))
            harness = ["harness", "--proxy", self.proxy, "--work", str(self.work_file), "--hour-s", str(self.hour_s)]
            self._stack.enter_context(self._child([*_emulated(), *harness], "harness"))
            self.start_controller()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *of: object) -> None:
        from .local import LocalProcesses

        if self.controller is not None:
            self.controller.kill()
            self.controller.wait()
        place = LocalProcesses(self.folder / "cells")
        for cell in self.settings.cells:
            place.end(cell.id, grace_s=0.0)
        self._stack.close()

    def start_controller(self) -> None:
        """Start it, or start it again."""
        command = [sys.executable, "-m", "gyre_sched.cells", str(self.settings_file)]
        with (self.folder / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())

    def wait(self, seconds: float) -> None:
        """Until the last step is done; SchedulerError with the end of its log when the controller fails."""
        assert self.controller is not None
        if self.controller.wait(seconds) != 0:
            log, code = (self.folder / "controller.log").read_text()[-2000:], self.controller.returncode
            raise SchedulerError(f"wanted the controller to end well, got {code}; its log ends:\n{log}")

    def _start_proxy(self) -> str:
        """A proxy wants an engine to start with; this one gets no calls, for it is no cell."""
        port = free_port("127.0.0.1")
        engine = ["rollout", "--port", str(port), "--label", "base:0"]
        child = self._stack.enter_context(self._child([*_emulated(), *engine], "engine"))
        url, run = f"http://127.0.0.1:{port}", self.folder / "run"
        _until(lambda: ask(f"{url}/ready", timeout_s=1.0), child, self.folder / "engine.log")
        proxy_port = str(free_port("127.0.0.1"))
        flags = ["--engine", url, "--tokenizer", str(self._tokenizer), "--port", proxy_port]
        command = [sys.executable, "-m", "gyre_data", "proxy", "--run", str(run), *flags]
        child = self._stack.enter_context(self._child(command, "proxy"))
        proxy = f"http://127.0.0.1:{proxy_port}"
        _until(lambda: ask(f"{proxy}/api/status", timeout_s=1.0), child, self.folder / "proxy.log")
        ProxyApi(proxy, key=None, call_s=5.0).drain(url)
        return proxy

    @contextlib.contextmanager
    def _child(self, command: Sequence[str], name: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.folder / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), start_new_session=True
            )
        try:
            yield child
        finally:
            child.kill()
            child.wait()

    def _told(self, queries: list[str]) -> dict[str, Any]:
        scenario, hour = self.scenario, ["--hour-s", str(self.hour_s)]
        port = ["--port", "{port}"]
        engine = ["rollout", "--label", "{label}", "--capacity", str(scenario.capacity)]
        engine += ["--share", str(scenario.engine_share)]
        trainer = ["train", "--work", str(self.work_file)]
        core = ["--core-folder", str(self.folder / "core")]
        return {
            "folder": str(self.folder),
            "proxy": self.proxy,
            "queries": queries,
            "batch_groups": scenario.batch_groups,
            "group_size": scenario.group_size,
            "microsteps_per_group": scenario.microsteps_per_group,
            "min_rollout": scenario.min_rollout,
            "steps": scenario.steps,
            "base_weights": "none",
            "base_label": "base:0",
            "weights": "none",
            "label": "run:{version}",
            "policy": self.chosen,
            "hour_s": self.hour_s,
            "beat_s": 0.2,
            "policy_settings": self.policy_settings,
            "rollout": {"command": [*_emulated(), *engine, *port, *hour], "ready_s": 30.0},
            "train": {
                "command": [*_emulated(), *trainer, *port, *hour],
                "core_command": [*_emulated(), *trainer, *core, *port, *hour],
                "ready_s": 30.0,
            },
            "executions": {"judged": False},
            "cells": [{"id": f"c{i}", "capacity": scenario.capacity} for i in range(scenario.cells)],
            **self._changes,
        }

    def lived(self) -> Lived:
        """What it took, from its ledger."""
        state, history = self._replayed()
        costs = history.costs
        own = replace(
            self.scenario,
            to_train_s=costs.to_train_s,
            to_rollout_s=costs.to_rollout_s,
            optimiser_s=costs.optimiser_s,
            pull_s=costs.pull_s,
            publish_s=history.mean_s("publish_s"),
        )
        chosen = policy(self.chosen, self.policy_settings)
        groups = state.groups
        return Lived(
            hours=measured(self.folder / "ledger.jsonl"),
            simulated_h=simulate(self.scenario, chosen, seed=self.seed).hours,
            replayed_h=simulate(own, chosen, seed=self.seed).hours,
            steps=state.version,
            staleness=groups.staleness_sum / max(1, groups.consumed),
            switches=sum(history.count(name) for name in ("to_train_s", "to_rollout_s")),
        )

    def _replayed(self) -> tuple[State, History]:
        settings = self.settings
        state = State(settings.params, settings.fresh_cells())
        scenario = self.scenario
        history = History(state, timeout_s=scenario.timeout_h * 3600, engine_share=scenario.engine_share)
        replay(self.folder / "ledger.jsonl", state, also=history.record)
        return state, history


def emulate(
    scenario: Scenario,
    chosen: str,
    policy_settings: Mapping[str, Any] | None = None,
    *,
    folder: Path,
    tokenizer: Path,
    seed: int = 0,
    hour_s: float = 6.0,
) -> Lived:
    """Live a scenario through and say what it took; the controller has twenty times the scenario's steps' hours."""
    emulation = Emulation(
        scenario, chosen, policy_settings or {}, folder=folder, tokenizer=tokenizer, seed=seed, hour_s=hour_s
    )
    with emulation:
        emulation.wait(120 + hour_s * scenario.steps * (scenario.timeout_h + scenario.train_cell_h))
        return emulation.lived()


def measured(ledger: Path) -> float:
    """Hours from the first dispatch to the last step, by the ledger's clock."""
    times = [(at, record) for at, record in read(ledger) if isinstance(record, Dispatch | StepApplied)]
    return (times[-1][0] - times[0][0]) / 3600


def _work(scenario: Scenario, seed: int) -> dict[str, Any]:
    """How long everything is to take, in emulated seconds; groups in the order and of the length that the simulator
    draws for this seed."""
    luck, mean_s, timeout_s = random.Random(seed), scenario.durations.mean_s, scenario.timeout_h * 3600
    seconds, microstep_s = {}, {}
    group_s = scenario.train_cell_h * 3600 / scenario.batch_groups / scenario.microsteps_per_group
    for number in range(scenario.batch_groups * (scenario.steps + 8)):
        drawn = scenario.durations.draw(luck, scenario.group_size).seconds
        seconds[f"q{number}"] = drawn
        executed_s = sum(min(one, timeout_s) for one in drawn)
        microstep_s[f"q{number}"] = group_s * executed_s / (mean_s * scenario.group_size)
    return {
        "seconds": seconds,
        "microstep_s": microstep_s,
        "timeout_s": timeout_s,
        "optimiser_s": scenario.optimiser_s,
        "pull_s": scenario.pull_s,
    }


def _emulated() -> list[str]:
    return [sys.executable, "-S", "-m", "gyre_sched.cells.emulated"]


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(_HERE), str(_HERE / "proxy"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def _until(call: Callable[[], Any], child: subprocess.Popen[bytes], log: Path) -> None:
    """Until a child answers; SchedulerError with the end of its log when it does not."""
    deadline = time.monotonic() + _UP_S
    while True:
        try:
            call()
        except OSError as error:
            if child.poll() is not None or time.monotonic() > deadline:
                told = log.read_text()[-1000:]
                raise SchedulerError(f"wanted it to come up, got {error}; {log} ends:\n{told}") from error
            time.sleep(0.05)
        else:
            return
