"""Satellites in processes of their own: whoever computes what, a step is the step of one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gyre_data import ledger
from gyre_data.store import Run
from gyre_data.store import open as open_run
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from tests.support.live import recording
from tests.support.streaming import ask, events, farthest, processes, until
from tests.support.training import config, recorded_run, tiny_model

STEPS = 3
BURST = (
    "--train.anchor=burst", "--train.steps_per_burst=2", "--train.executions_per_step=4", "--output.keep=9",
    f"--train.steps={STEPS}", "--pack.tokens=48",
)  # fmt: skip
STREAM = ("--stream.satellites=true", "--stream.parts=3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return open_run(recorded_run(tmp_path_factory.mktemp("runs") / "whole", model, groups=2 * STEPS, shift=-0.1))


@pytest.mark.parametrize(("dtype", "method", "bound"), [("float64", "files", 1e-9), ("float32", "mooncake", 1e-5)])
def test_bursts_with_two_satellites_are_those_of_one_process(
    model: Path, whole: Run, tmp_path: Path, dtype: str, method: str, bound: float
) -> None:
    one, out = tmp_path / "one", tmp_path / "out"
    with processes() as started, recording(whole, tmp_path / "run") as live:
        settings = (*BURST, f"--model.dtype={dtype}", f'--data.live=["{live.path}"]')
        streamed = config(model, out, *settings, *STREAM, f"--stream.method={method}", runs=live.path)
        core = started.core(streamed, fair=True)
        others = [started.satellite(out, name) for name in "ab"]
        for step in range(1, STEPS + 1):
            until(lambda step=step: {e["worker"] for e in events(out, "pulled") if e["step"] == step} == {"a", "b"})
            live.add(f"g{2 * step - 2}")
            until(lambda step=step: len(events(out, "done")) == 6 * step - 3)  # while the step waits for another group
            live.add(f"g{2 * step - 1}")
        for process in (core, *others):
            process.join(240)
            assert process.exitcode == 0
        train(config(model, one, *settings, runs=live.path))
    rows = [read_metrics(folder / "metrics.jsonl") for folder in (one, out)]
    for step in range(STEPS):
        alone, shared = rows[0][step], rows[1][step]
        assert (shared["micro_steps"], shared["executions"]) == (6, 4)
        for name in ("loss", "grad_norm", "ratio", "clip_fraction", "mismatch_max"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name
        name = f"checkpoints/step-{step + 1:08d}"
        assert farthest(one / name, out / name) < bound
    assert sum(row["satellite_micro_steps"] for row in rows[1]) > 0
    assert rows[1][1]["clip_fraction"] > 0  # in a burst's second step the anchor is other weights
    assert {(row.step, row.execution_id) for row in ledger.ledger(one)} == {
        (row.step, row.execution_id) for row in ledger.ledger(out)
    }


def test_a_stop_drops_a_step_that_still_waits_and_the_next_session_takes_it(
    model: Path, whole: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with recording(whole, tmp_path / "run") as live:
        live.add("g0")
        settings = config(
            model, out, *STREAM, f'--data.live=["{live.path}"]', "--train.executions_per_step=4", "--train.steps=1",
            runs=live.path,
        )  # fmt: skip

        def stop() -> None:
            until(lambda: ask(out, "/step")["micro_steps"]["reduced"] == 3)
            (out / "stop").touch()

        stopper = threading.Thread(target=stop)
        stopper.start()
        assert train(settings).steps_done == 0
        stopper.join()
        assert ledger.ledger(out) == []
        live.add("g1")
        assert train(settings).steps_done == 1
    assert {row.group_id for row in ledger.ledger(out)} == {"g0", "g1"}
