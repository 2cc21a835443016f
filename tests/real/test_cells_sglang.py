"""Cells that serve with real SGLang: drained, killed, swapped and brought back, with a real controller.

Training is emulated here. Async keeps one cell serving: the other one leaves at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from gyre_data.verify import verify
from gyre_sched.actions import CellFailed, CellRecovered, Drained, SwitchDone, WeightsPublished
from gyre_sched.cells.emulation import Emulation
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.wire import ask
from gyre_sched.durations import TwoLevel
from gyre_sched.ledger import read
from gyre_sched.scenario import Scenario
from gyre_train.tiny import make_tiny
from tests.support.engines import ROOT, sglang_venv, wait_until
from tests.support.proxy_server import calls_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

TOKENS = 1500


def test_every_reply_is_whole_although_an_engine_and_the_controller_are_killed(tmp_path: Path) -> None:
    models = [make_tiny(tmp_path / f"v{seed}", vocab=512, context=8192, seed=seed) for seed in range(3)]
    serve = [sys.executable, str(ROOT / "tools" / "sglang" / "serve.py"), str(sglang_venv())]
    engine = {
        "command": ["env", "PYTHONPATH=", *serve, "{weights}", "{port}", "--weight-version", "{label}"],
        "ready_s": 480.0,
    }
    weights = {"base_weights": str(models[0]), "weights": str(tmp_path / "v{version}")}
    scenario = Scenario(
        durations=TwoLevel(mean_s=36.0 * TOKENS, cv_query=0.0, cv_execution=0.0),
        steps=2,
        cells=2,
        batch_groups=1,
        group_size=4,
        saturation_batches=2.0,
        timeout_h=1e6,
        train_cell_h=0.1,
        optimiser_s=60.0,
    )
    changes = {"rollout": engine, **weights, "lost_s": 60.0, "beat_s": 0.5}
    lived = Emulation(
        scenario, "async", {"rollout_cells": 1, "depth": 1.0}, folder=tmp_path / "lived", tokenizer=models[0],
        hour_s=20.0, changes=changes,
    )  # fmt: skip
    with lived:
        ledger = lived.folder / "ledger.jsonl"
        wait_until(lambda: _told(ledger, Drained), "the core to leave", 480)
        wait_until(lambda: _in_flight(lived) == 4, "four replies", 60)
        slot = LocalProcesses(lived.folder / "cells").slot("c1")
        assert slot is not None
        os.killpg(slot.pid, signal.SIGKILL)
        wait_until(lambda: _told(ledger, CellFailed), "its loss to be seen", 60)
        assert lived.controller is not None
        lived.controller.kill()
        lived.controller.wait()
        lived.start_controller()
        lived.wait(480)
        known = ask(f"{lived.proxy}/api/executions", timeout_s=10)["executions"]
        calls = calls_of(lived.folder / "run")
    assert {one["end_reason"] for one in known if one["group"] in ("q0", "q1")} == {"finished"}
    assert len(_told(ledger, CellRecovered)) == 1
    assert [record.version for record in _told(ledger, WeightsPublished)] == [1]  # after the last step all end
    assert [record.cell for record in _told(ledger, SwitchDone)] == ["c0"]
    done = [call for call in calls if call.status == "ok"]
    assert len(done) == 8
    assert all(call.attempts[-1].end == call.output_tokens for call in done)
    assert all(a.end == b.start for call in done for a, b in zip(call.attempts, call.attempts[1:], strict=False))
    assert not verify(lived.folder / "run").problems


def _in_flight(lived: Emulation) -> int:
    known = ask(f"{lived.proxy}/api/executions", timeout_s=10)["executions"]
    return sum(int(one["in_flight"]) for one in known)


def _told(ledger: Path, kind: type) -> list:
    return [record for _, record in read(ledger) if isinstance(record, kind)] if ledger.exists() else []
