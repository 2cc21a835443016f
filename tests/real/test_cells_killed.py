"""`kill -9` of the controller, the core and a satellite, with embedded engines and real training in the cells.

What is asked of states only: the harnesses of the second group call on until the test lets them end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_data import ledger as trained
from gyre_data.verify import verify
from gyre_sched.actions import CellFailed, Dispatch, StepApplied
from gyre_sched.api import Cell
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.settings import load, to_toml
from gyre_sched.ledger import read, replay
from gyre_sched.state import State
from tests.real.test_cells_streamed import SIZE, STEPS, settings
from tests.support.engines import embedded_engine, wait_until
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import calls_of
from tests.support.streaming import events
from tests.support.training import tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

PATIENCE_S = 600


class Harnesses:
    """Claim what there is; each execution calls once, those of `t1` again and again until `let_go`."""

    def __init__(self, url: str) -> None:
        self.url, self.answered, self.let_go = url, Counter[str](), threading.Event()
        self._over, self._threads, self._failures = threading.Event(), list[threading.Thread](), list[str]()
        self._begin(self._claim)

    def _begin(self, what: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=what, args=args))
        self._threads[-1].start()

    def _claim(self) -> None:
        with httpx.Client(timeout=300, trust_env=False) as http:
            while not self._over.wait(0.2):
                for one in http.post(f"{self.url}/api/executions/claim", json={"limit": 8}).json()["executions"]:
                    self._begin(self._execute, one)

    def _execute(self, one: dict[str, Any]) -> None:
        with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
            ask = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": one["task"]}]}
            while not self._over.is_set():
                answer = http.post(f"{one['base_url']}/v1/messages", json=ask, headers={"x-api-key": one["key"]})
                if answer.status_code != 200:
                    self._failures.append(answer.text)
                    return
                self.answered[one["id"]] += 1
                if one["task"] != "t1" or self.let_go.is_set():
                    break
            http.post(f"{self.url}/api/executions/{one['id']}/end", json={"reason": "finished"})
            verdict = {"evaluator": "toy", "status": "scored", "value": float(one["sample_index"])}
            http.post(f"{self.url}/api/executions/{one['id']}/scores", json=verdict)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert self._failures == []


class Run:
    """The controller, and what its ledger says."""

    def __init__(self, file: Path) -> None:
        self.file, self.folder = file, file.parent / "sched"
        self.settings, self.places = load(file), LocalProcesses(self.folder / "cells")
        self.start()

    def start(self) -> None:
        with (self.file.parent / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-m", "gyre_sched.cells", str(self.file)], stdout=log, stderr=log
            )

    def state(self) -> State:
        state = State(self.settings.params, self.settings.fresh_cells())
        replay(self.folder / "ledger.jsonl", state)
        return state

    def until(self, what: Any, said: str) -> None:
        """Until it is so of the ledger's state; the controller must live meanwhile."""

        def so() -> bool:
            assert self.controller.poll() in (None, 0), (self.file.parent / "controller.log").read_text()[-3000:]
            return bool(what(self.state()))

        wait_until(so, said, PATIENCE_S)

    def lost(self, cell: str) -> int:
        records = [record for _, record in read(self.folder / "ledger.jsonl")]
        return sum(isinstance(record, CellFailed) and record.cell == cell for record in records)

    def trains(self, cell: str) -> bool:
        """Whether its training program is there."""
        slot = self.places.slot(cell)
        return slot is not None and slot.kind == "train" and slot.running

    def kill(self, cell: str) -> None:
        slot, before = self.places.slot(cell), self.lost(cell)
        assert slot is not None
        os.kill(slot.pid, signal.SIGKILL)
        self.until(lambda state: self.lost(cell) > before, f"the loss of {cell} to be seen")


@contextmanager
def running(folder: Path, model: Path, proxy: ProxyProcess) -> Iterator[Run]:
    """Nothing outlives the test."""
    told = {**settings(folder, model, proxy), "policy_settings": {"burst": STEPS, "depth": 2.0}}
    (folder / "fleet.toml").write_text(to_toml(told))
    run = Run(folder / "fleet.toml")
    try:
        yield run
    finally:
        run.controller.kill()
        run.controller.wait()
        for cell in ("c0", "c1"):
            run.places.release(cell)


def core(state: State) -> Cell:
    return state.cells["c0"]


def test_calls_and_micro_steps_go_on_without_the_controller_and_nothing_is_lost_with_any_of_them(
    tmp_path: Path,
) -> None:
    model = tiny_model(tmp_path / "tiny")
    with embedded_engine(model, "--weight-version", "tiny:0") as first:
        proxy = ProxyProcess(tmp_path / "run", first.url, model, "--port", "0")
        httpx.post(f"{proxy.url}/api/engines", json={"action": "drain", "url": first.url}, trust_env=False)
        harnesses = Harnesses(proxy.url)
        try:
            with running(tmp_path, model, proxy) as run:
                lived(run, harnesses)
        finally:
            harnesses.end()
            proxy.stop()
        check(run, tmp_path, harnesses)


def lived(run: Run, harnesses: Harnesses) -> None:
    """The controller is killed while the core computes and replies are under way, then the core, then a satellite."""
    wait_until((run.folder / "ledger.jsonl").exists, "a ledger", PATIENCE_S)
    out = run.file.parent / "out"
    run.until(lambda state: core(state).running is not None, "the core to be given a micro-step")
    wait_until(lambda: events(out, "claimed"), "the core to take it", PATIENCE_S)
    run.controller.kill()
    run.controller.wait()
    key, epoch = core(run.state()).running, core(run.state()).epoch
    assert run.state().groups.unfinished == SIZE  # those of t1 call on
    so_far = harnesses.answered.copy()
    # What the ledger says may not be told yet: what the core has taken is what goes on.
    taken = {tuple(event["key"]) for event in events(out, "claimed")}
    wait_until(
        lambda: taken <= {tuple(event["key"]) for event in events(out, "done")}, "a micro-step to be done", PATIENCE_S
    )
    wait_until(
        lambda: sum((harnesses.answered - so_far).values()) >= 2 * SIZE, "replies without the controller", PATIENCE_S
    )
    run.start()
    run.until(lambda state: core(state).epoch == epoch and core(state).running != key, "the next to go on from there")
    run.kill("c0")
    harnesses.let_go.set()
    run.until(lambda state: run.trains("c1") or state.version == STEPS, "a satellite")
    if run.trains("c1"):
        run.kill("c1")
    assert run.controller.wait(PATIENCE_S) == 0


def check(run: Run, folder: Path, harnesses: Harnesses) -> None:
    """No group lost or doubled, each version once, every reply recorded."""
    records = [record for _, record in read(run.folder / "ledger.jsonl")]
    assert [record.version for record in records if isinstance(record, StepApplied)] == list(range(1, STEPS + 1))
    dispatched = [query for record in records if isinstance(record, Dispatch) for query in record.queries]
    assert len(set(dispatched)) == len(dispatched)
    state = run.state()
    assert (state.groups.consumed, state.groups.dropped) == (STEPS, 0)
    rows = [(row.step, row.execution_id, row.leaf_node) for row in trained.ledger(folder / "out")]
    assert len(set(rows)) == len(rows)
    assert len({row[1] for row in rows}) == len({row[:2] for row in rows}) == STEPS * SIZE
    recorded = Counter(call.execution_id for call in calls_of(folder / "run") if call.status == "ok")
    assert recorded == harnesses.answered
    assert not verify(folder / "run").problems
