"""Controller, engines, trainers as real processes that are killed and stopped: no reply, group or step lost or doubled.

Engines and trainers sleep instead of computing (`gyre_sched.cells.emulated`); proxy, controller and ledger are real.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_data.verify import verify
from gyre_sched.actions import CellFailed, Dispatch, StepApplied
from gyre_sched.api import Cell
from gyre_sched.cells.emulation import Emulation
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.wire import ask
from gyre_sched.durations import TwoLevel
from gyre_sched.ledger import read, replay
from gyre_sched.scenario import Scenario
from gyre_sched.state import State
from tests.contract.cells_contract import state_of as state_of_process
from tests.support.engines import wait_until
from tests.support.proxy_server import calls_of
from tests.support.training import tiny_model

SCENARIO = Scenario(
    durations=TwoLevel(mean_s=1.93 * 3600, cv_query=0.213, cv_execution=0.261),
    steps=4,
    cells=3,
    batch_groups=2,
    group_size=2,
    saturation_batches=3.0,
    timeout_h=50.0,  # faults take real time
)
POLICY = {"burst": 2, "depth": 2.0}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.fixture
def lived(tmp_path: Path, tokenizer: Path) -> Iterator[Emulation]:
    changes = {"lost_s": 1.0, "beat_s": 0.1}
    with Emulation(
        SCENARIO, "waterlevel", POLICY, folder=tmp_path, tokenizer=tokenizer, hour_s=0.6, changes=changes
    ) as emulation:
        yield emulation


def state_of(lived: Emulation) -> State:
    """Where the controller is, by its ledger."""
    state = State(lived.settings.params, lived.settings.fresh_cells())
    replay(lived.folder / "ledger.jsonl", state)
    return state


def when(lived: Emulation, picked: Callable[[State], Cell | None], what: str) -> int:
    """The process of the first cell for which it is so."""
    found: list[Cell] = []

    def so() -> bool:
        assert lived.controller is not None
        assert lived.controller.poll() is None, (lived.folder / "controller.log").read_text()
        cell = picked(state_of(lived))
        found.extend([cell] if cell else [])
        return bool(found)

    wait_until(so, what, 60)
    slot = LocalProcesses(lived.folder / "cells").slot(found[0].id)
    assert slot is not None
    return slot.pid


def serving(version: int) -> Callable[[State], Cell | None]:
    """The last cell in the order that serves while executions run on weights of that version."""

    def picked(state: State) -> Cell | None:
        cells = state.fleet.serving
        return cells[-1] if state.rollout_version == version and state.groups.unfinished and cells else None

    return picked


def training(*, core: bool, least: int) -> Callable[[State], Cell | None]:
    """A cell that runs a micro-step of a later step."""

    def picked(state: State) -> Cell | None:
        cells = [cell for cell in state.cells.values() if cell.core is core and cell.running is not None]
        return cells[0] if state.version >= least and cells else None

    return picked


def kill_controller(lived: Emulation, *, and_wait_s: float = 0.0) -> None:
    assert lived.controller is not None
    lived.controller.kill()
    lived.controller.wait()
    time.sleep(and_wait_s)  # calls and micro-steps go on meanwhile
    lived.start_controller()


def check_whole(lived: Emulation) -> State:
    """Nothing was lost or doubled, in the ledger and in what was recorded."""
    state, scenario = state_of(lived), lived.scenario
    groups, steps = state.groups, scenario.steps
    assert (state.version, groups.consumed, groups.dropped) == (steps, steps * scenario.batch_groups, 0)
    records = [record for _, record in read(lived.folder / "ledger.jsonl")]
    dispatched = [query for record in records if isinstance(record, Dispatch) for query in record.queries]
    assert len(set(dispatched)) == len(dispatched) == groups.dispatched
    assert [record.version for record in records if isinstance(record, StepApplied)] == list(range(1, steps + 1))

    settings = lived.settings
    known = ask(f"{settings.proxy}/api/executions", timeout_s=10)["executions"]
    of_group = Counter(one["group"] for one in known)
    assert of_group == dict.fromkeys(dispatched, scenario.group_size)
    for group in dispatched:
        if group in groups.outstanding:
            continue
        members = sorted((one for one in known if one["group"] == group), key=lambda one: one["sample_index"])
        assert [one["end_reason"] for one in members] == ["finished"] * scenario.group_size
        calls = {call.execution_id: call for call in calls_of(lived.folder / "run")}
        for one in members:  # each got all the tokens that it had asked for
            call = calls[one["id"]]
            assert (call.status, call.output_tokens, call.attempts[-1].end) == ("ok", call.max_tokens, call.max_tokens)
        assert [one["calls"] for one in members] == [1] * scenario.group_size
    assert not verify(lived.folder / "run").problems
    return state


def test_whatever_is_killed_nothing_is_lost_or_doubled(lived: Emulation) -> None:
    os.kill(when(lived, serving(0), "an engine with replies"), signal.SIGKILL)
    wait_until(lambda: failures(lived) >= 1, "its loss to be seen", 60)
    kill_controller(lived, and_wait_s=0.3)
    os.kill(when(lived, training(core=False, least=0), "a satellite at work"), signal.SIGKILL)
    kill_controller(lived)
    os.kill(when(lived, training(core=True, least=1), "the core at work"), signal.SIGKILL)
    silent = when(lived, serving(2), "an engine of the second burst")
    os.kill(silent, signal.SIGSTOP)
    kill_controller(lived)
    lived.wait(120)
    check_whole(lived)
    assert failures(lived) >= 3
    assert state_of_process(silent) in "ZX"  # lost, or drained while it answered nothing: killed in either case


def failures(lived: Emulation) -> int:
    return sum(isinstance(record, CellFailed) for _, record in read(lived.folder / "ledger.jsonl"))
