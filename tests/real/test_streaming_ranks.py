"""Core and satellites of two ranks each, as processes: the step is that of one, whoever is killed or late."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from gyre_data.store import open as open_run
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from tests.crash.test_streaming_kills import settled
from tests.support.live import recording
from tests.support.streaming import ask, events, farthest, processes, until
from tests.support.training import config, recorded_run, tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def test_replicas_of_two_ranks_make_the_step_of_one_process(tmp_path: Path) -> None:
    """One is killed with micro-steps in its hands, and its ranks end with it; another joins when half is computed."""
    model = tiny_model(tmp_path / "tiny")
    whole = open_run(recorded_run(tmp_path / "whole", model, groups=2, shift=-0.1))
    one, out = tmp_path / "one", tmp_path / "out"
    settings = ("--model.dtype=float64", "--train.executions_per_step=4", "--pack.tokens=48", "--train.steps=1")
    with processes() as started, recording(whole, tmp_path / "run") as live:
        settings = (*settings, f'--data.live=["{live.path}"]')
        stream = ("--parallel.tp=2", "--stream.satellites=true", "--stream.parts=4")
        core = started.core(config(model, out, *settings, *stream, runs=live.path), fair=True)
        killed, stays = (started.satellite(out, name) for name in ("killed", "stays"))
        until(lambda: {event["worker"] for event in events(out, "pulled")} == {"killed", "stays"})
        live.add("g0")
        until(lambda: settled(out, "killed", "stays"))
        ranks = psutil.Process(killed.pid).children()
        assert len(ranks) == 2
        killed.kill()
        assert psutil.wait_procs(ranks, 60)[1] == []
        ask(out, "/lost", {"worker": "killed"})
        late = started.satellite(out, "late")
        until(lambda: events(out, "pulled", "late"))
        live.add("g1")
        for process in (core, stays, late):
            process.join(240)
            assert process.exitcode == 0
        train(config(model, one, *settings, runs=live.path))
    assert farthest(one / "checkpoints/step-00000001", out / "checkpoints/step-00000001") < 1e-9
    assert read_metrics(out / "metrics.jsonl")[0]["satellite_micro_steps"] >= 2
