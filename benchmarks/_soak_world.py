"""The processes of a soak: proxy, launcher, controller with cells, and who keeps them up, stops and kills them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gyre_data.child import answers, free_port
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.settings import to_toml
from gyre_train.tiny import make_tiny

__all__ = ["FAULTS", "World", "client_folders", "schedule"]

ROOT = Path(__file__).resolve().parents[1]
HARNESS = Path(__file__).with_name("_soak_harness.py")
CELLS = ("c0", "c1", "c2")
SIZE, GROUPS, BURST, JOBS = 2, 3, 2, 8
WINDOW = 16384
FAULTS = (
    "kill engine", "stop engine", "kill proxy", "kill core", "kill satellite", "kill controller", "kill run",
    "stop proxy", "stop core", "stop controller",
)  # fmt: skip
_VICTIM_S = 90.0
_UP_S = 600.0
_GROWN_UP_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is to happen, and when at the earliest."""

    at_s: float
    kind: str
    pause_s: float
    """How long it is stopped, or stays down before the same command is given again."""
    luck: float
    """Which of several victims, and which moment of a process's life."""


def schedule(seed: int, seconds: float, gap_s: tuple[float, float]) -> list[Fault]:
    """Faults until `seconds`: every kind once before any comes again, in an order and at times of the seed."""
    luck, at, bag, found = random.Random(seed), 0.0, list[str](), list[Fault]()
    while True:
        at += luck.uniform(*gap_s)
        if at > seconds:
            return found
        if not bag:
            bag = luck.sample(FAULTS, len(FAULTS))
        pause_s = luck.uniform(1.0, 12.0) if bag[-1].startswith("kill") else luck.uniform(3.0, 25.0)
        found.append(Fault(at_s=at, kind=bag.pop(), pause_s=pause_s, luck=luck.random()))


def client_folders() -> tuple[dict[str, Path], str]:
    """Real clients that are installed, and a PATH that has them."""
    folder = Path(os.environ.get("GYRE_TEST_CLIENTS") or ROOT / ".cache" / "clients").resolve()
    npm, mini = folder / "node_modules", folder / "mini"
    places = {
        "pi": npm / "@mariozechner/pi-coding-agent",
        "mini-swe-agent": mini / ".ready",
        "claude": npm / "@anthropic-ai/claude-code-linux-x64",
    }
    path = [npm / ".bin", npm / "@anthropic-ai/claude-code-linux-x64", mini / "bin", os.environ["PATH"]]
    return {name: place for name, place in places.items() if place.exists()}, os.pathsep.join(map(str, path))


class Kept:
    """A process that a person would start again by the same command."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
        self.name, self._command, self._folder, self._env = name, list(command), folder, dict(env)
        self.lock = threading.Lock()
        """Held by who stops, kills or starts it."""
        self.start()

    def start(self) -> None:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self.child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, cwd=self._folder,
                start_new_session=True,
            )  # fmt: skip

    def end(self, seconds: float) -> int:
        """SIGTERM, and SIGKILL if that does not do; the exit status."""
        self.child.send_signal(signal.SIGCONT)
        self.child.terminate()
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self.child.kill()
            return self.child.wait()


class World:
    """Everything that runs, in one folder. `faults.jsonl`, `memory.jsonl` and `ends.jsonl` tell what happened."""

    def __init__(self, folder: Path, *, real: bool = True) -> None:
        self.folder, self.began = folder.resolve(), time.time()
        self.cells = LocalProcesses(self.folder / "sched" / "cells")
        self._over = threading.Event()
        self._cpu: dict[tuple[int, float], float] = {}
        self.clients, path = client_folders() if real else ({}, os.environ["PATH"])
        (self.folder / "journal").mkdir(parents=True)
        source = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
        self._env = {
            **os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "SOAK_PATH": path,
            "SOAK_JOURNAL": str(self.folder / "journal"),
        }  # fmt: skip
        self.model = make_tiny(self.folder / "model", context=WINDOW)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.kept: dict[str, Kept] = {}
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._keep, self._sample)]

    def start(self) -> None:
        """Start everything; returns when the first harness has its first reply, from which on time counts."""
        gyre, folder = [sys.executable, "-m", "gyre_data"], self.folder
        port = free_port()  # a proxy wants an engine to start with; this one only sleeps, and gets no calls
        resting = [sys.executable, "-S", "-m", "gyre_sched.cells.emulated", "rollout", "--port", str(port)]
        self._begin("resting", [*resting, "--label", "tiny:0"])
        self._until(lambda: answers(f"http://127.0.0.1:{port}/ready"), "the engine that rests")
        proxy = ["proxy", "--run", str(folder / "run"), "--tokenizer", str(self.model), "--engine"]
        more = [f"http://127.0.0.1:{port}", "--port", self.url.rpartition(":")[2], "--max-tokens", "48"]
        self._begin("proxy", [*gyre, *proxy, *more, "--context-window", str(WINDOW)])
        self._until(self._proxy_answers, "the proxy")
        self.ask("/api/engines", {"action": "drain", "url": f"http://127.0.0.1:{port}"})
        (folder / "tasks.toml").write_text(self._tasks())
        (folder / "fleet.toml").write_text(to_toml(self._fleet()))
        (folder / "empty.toml").touch()
        run = ["run", "-p", str(folder / "tasks.toml"), "--run", str(folder / "run"), "--serve", "-j", str(JOBS)]
        self._begin("run", [*gyre, *run])
        self._begin("controller", [sys.executable, "-m", "gyre_sched.cells", str(folder / "fleet.toml")])
        self._until(lambda: any(path.stat().st_size for path in (folder / "journal").glob("*.jsonl")), "a first reply")
        self.began = time.time()
        for thread in self._threads:
            thread.start()

    def _begin(self, name: str, command: Sequence[str]) -> None:
        self.kept[name] = Kept(name, command, self.folder, self._env)

    def _until(self, there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _UP_S
        while not there():
            ended = any(one.child.poll() is not None for name, one in self.kept.items() if name != "run")
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"wanted {what}, got none; see the logs in {self.folder}")
            time.sleep(0.1)

    def _proxy_answers(self) -> bool:
        return answers(f"{self.url}/api/status")

    def stop(self) -> None:
        """End launcher, controller, cells and proxy, in this order, as a person would."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._until(self._proxy_answers, "the proxy back")
        self.kept["run"].end(120)
        self.kept["controller"].end(30)
        for cell in CELLS:
            self.cells.end(cell, grace_s=60.0)
        if code := self.kept["proxy"].end(120):
            self._write("ends.jsonl", {"ended": "proxy", "status": code, "asked": True})
        self.kept["resting"].end(5)
        self._write("memory.jsonl", {"at_s": self._now(), "cpu_s": sum(self._cpu.values())})

    def kill_all(self) -> None:
        """Leave nothing behind, whatever went wrong."""
        self._over.set()
        for one in self.kept.values():
            one.child.kill()
            one.child.wait()
        for cell in CELLS:
            self.cells.release(cell)
        for process in psutil.process_iter(["cwd"]):  # harnesses
            if (process.info["cwd"] or "").startswith(str(self.folder)):
                process.kill()

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The proxy's API."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=5) as answer:
            return json.loads(answer.read())

    def _now(self) -> float:
        return round(time.time() - self.began, 1)

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _keep(self) -> None:
        """Note what ends by itself, and start it again. A launcher may: it waits for its proxy for a minute only."""
        while not self._over.wait(0.5):
            for one in self.kept.values():
                if one.lock.acquire(blocking=False):
                    try:
                        if (code := one.child.poll()) is not None:
                            if one.name != "run" or self._proxy_answers():
                                self._write("ends.jsonl", {"at_s": self._now(), "ended": one.name, "status": code})
                            one.start()
                    finally:
                        one.lock.release()

    # --- faults -------------------------------------------------------------------------------------------------------

    def play(self, fault: Fault) -> None:
        """Do it to whom it concerns; a kind without a victim for a while is noted and left out."""
        how, _, whom = fault.kind.partition(" ")
        kept = self.kept.get(whom)
        if kept is not None:
            with kept.lock:
                self._do(how, kept.child.pid, fault, kept.child.wait if how == "kill" else lambda: None)
                if how == "kill":
                    kept.start()
            return
        deadline = time.monotonic() + _VICTIM_S
        while time.monotonic() < deadline and not self._over.is_set():
            victims = self._victims(whom)
            if victims:
                time.sleep(fault.luck * 5)  # not only what has just begun
                victims = [one for one in self._victims(whom) if one in victims]
            if victims:
                cell, pid = victims[int(fault.luck * len(victims))]
                self._do(how, pid, fault, lambda: None, cell=cell)
                return
            time.sleep(0.2)
        self._write("faults.jsonl", {"at_s": self._now(), "kind": fault.kind, "pid": None})

    def _victims(self, whom: str) -> list[tuple[str, int]]:
        found = []
        for cell in CELLS:
            slot = self.cells.slot(cell)
            if slot is not None and slot.running and slot.pid:
                kind = "engine" if slot.kind == "rollout" else "core" if cell == CELLS[0] else "satellite"
                found += [(cell, slot.pid)] if kind == whom else []
        return found

    def _do(self, how: str, pid: int, fault: Fault, gone: Callable[[], object], **more: str) -> None:
        line = {"at_s": self._now(), "kind": fault.kind, "pid": pid, "pause_s": round(fault.pause_s, 1), **more}
        self._write("faults.jsonl", {**line, "in_flight": self._in_flight()})
        process = psutil.Process(pid)  # knows when it was started: no other is meant by its number
        try:
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            gone()
            self._over.wait(fault.pause_s)
            if how == "stop":
                process.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return

    def _in_flight(self) -> dict[str, Any]:
        """What is at work now; less when the proxy does not say."""
        cells = {cell: self.cells.slot(cell) for cell in CELLS}
        found: dict[str, Any] = {"cells": {name: slot and slot.running and slot.kind for name, slot in cells.items()}}
        try:
            told = self.ask("/api/status")
            found |= {"calls": told["in_flight"], "executions": told["executions"]}
        except OSError as error:
            found["proxy"] = repr(error)
        return found

    # --- memory and time ----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        while not self._over.wait(10.0):
            line: dict[str, Any] = {"at_s": self._now()}
            for name in ("proxy", "controller", "run"):
                line[name] = _resident(self.kept[name].child.pid)
            for cell in CELLS:
                slot = self.cells.slot(cell)
                if slot is not None and slot.running:
                    line[f"{slot.kind} {cell}"] = _resident(slot.pid)
            self._write("memory.jsonl", line)
            self._count_cpu()

    def _count_cpu(self) -> None:
        """Of all processes seen that work in the folder or are told of it."""
        own = str(self.folder)
        for process in psutil.process_iter(["pid", "create_time", "cpu_times", "cwd", "cmdline"]):
            told = process.info
            if (told["cwd"] or "").startswith(own) or any(own in word for word in told["cmdline"] or ()):
                times = told["cpu_times"]
                self._cpu[told["pid"], told["create_time"]] = times.user + times.system

    # --- settings -----------------------------------------------------------------------------------------------------

    def _tasks(self) -> str:
        def words(*more: str) -> str:
            return json.dumps([sys.executable, "-S", str(HARNESS), *more])

        tables = [
            f"[[task]]\nid = {json.dumps(name)}\nprompt = 'Count the files here.'\n"
            f"command = {words(name, '{prompt}')}\nevaluator = {words('judge')}\ntimeout_s = 400\n"
            for name in ("loop", *self.clients)
        ]
        return "\n".join(tables)

    def _queries(self) -> list[str]:
        """Of any three groups one is a real client's, where there are any."""
        order = [name for client in self.clients or ("loop",) for name in ("loop", "loop", client)]
        return [f"{order[number % len(order)]}#{number}" for number in range(1500)]

    def _fleet(self) -> dict[str, Any]:
        gyre, out, run = [sys.executable, "-m", "gyre_data"], self.folder / "out", self.folder / "run"
        train = [
            f"--model.path={self.model}", f'--data.runs=["{run}"]', f'--data.live=["{run}"]', "--train.steps=100000",
            f"--train.executions_per_step={GROUPS * SIZE}", "--train.lr=1e-4", f"--output.dir={out}",
            "--output.policy_id=rl", "--stream.satellites=true", "--stream.controlled=true", "--stream.parts=2",
            "--stream.host={host}", "--stream.port={port}", "--output.keep=12", f"--pack.tokens={WINDOW}",
        ]  # fmt: skip
        engine = ["engine", "{weights}", "--port", "{port}", "--threads", "1", "--weight-version", "{label}"]
        satellite = ["-m", "gyre_train.streaming.satellite", str(out), "--name", "{cell}", "--listen", "{host}:{port}"]
        return {
            "folder": str(self.folder / "sched"), "proxy": self.url, "queries": self._queries(),
            "batch_groups": GROUPS, "group_size": SIZE, "microsteps_per_group": 2, "steps": 100_000,
            "base_weights": str(self.model), "base_label": "tiny:0",
            "weights": f"{out}/checkpoints/step-{{version:08}}", "label": "rl:{version}",
            "policy_settings": {"burst": BURST, "depth": BURST + 1.0}, "lost_s": 15.0,
            "cells": [{"id": cell, "capacity": JOBS} for cell in CELLS],
            "rollout": {"command": [*gyre, *engine]},
            "train": {
                "core_command": [*gyre, "train", str(self.folder / "empty.toml"), *train],
                "command": [sys.executable, *satellite],
            },
        }  # fmt: skip


def _resident(pid: int) -> float:
    """MiB of a process; 0 while it is not there, or has only begun."""
    try:
        process = psutil.Process(pid)
        old = time.time() - process.create_time() > _GROWN_UP_S
        return round(process.memory_info().rss / 2**20, 1) if old else 0.0
    except psutil.Error:
        return 0.0
