"""`kill -9` of satellites and of the core in mid-step, whole processes: each micro-step counts once, each step once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from gyre_data import ledger
from gyre_data.store import Run
from gyre_data.store import open as open_run
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from tests.support.live import recording
from tests.support.streaming import ask, counted, events, farthest, processes, until
from tests.support.training import config, recorded_run, tiny_model

GROUPS = 6
COMMON = ("--model.dtype=float64", "--train.executions_per_step=4", "--train.weight_decay=0.1", "--pack.tokens=48")
STREAM = ("--stream.satellites=true", "--stream.parts=8", "--stream.lease_s=5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    return open_run(recorded_run(tmp_path_factory.mktemp("runs") / "whole", model, groups=GROUPS, shift=-0.1))


def settled(out: Path, *names: str) -> bool:
    """Whether all that is offered was computed, and each of these holds some of it."""
    step = ask(out, "/step")
    counts = step["micro_steps"]
    return (
        counts["pending"] == counts["running"] == 0
        and counts["held"] > 0
        and all(step["workers"].get(name, {}).get("held") for name in names)
    )


def test_a_step_survives_what_happens_to_its_satellites(model: Path, whole: Run, tmp_path: Path) -> None:
    """One is killed with micro-steps in its hands, one is cut off and comes back late, one is asked to go."""
    one, out = tmp_path / "one", tmp_path / "out"
    with processes() as started, recording(whole, tmp_path / "run") as live:
        settings = (*COMMON, f'--data.live=["{live.path}"]', "--train.steps=2")
        core = started.core(config(model, out, *settings, *STREAM, runs=live.path), fair=True)
        killed, cut, leaves = (started.satellite(out, name) for name in ("killed", "cut", "leaves"))
        until(lambda: len({event["worker"] for event in events(out, "pulled")}) == 3)
        live.add("g0")
        until(lambda: settled(out, "killed", "cut", "leaves"))

        killed.kill()
        assert cut.pid is not None
        assert leaves.pid is not None
        os.kill(cut.pid, signal.SIGSTOP)
        until(lambda: {event["worker"] for event in events(out, "lost")} == {"killed", "cut"})
        os.kill(leaves.pid, signal.SIGTERM)
        leaves.join(240)
        assert leaves.exitcode == 0
        handed = events(out, "handed_in", "leaves")
        assert handed
        assert events(out, "left", "leaves")
        os.kill(cut.pid, signal.SIGCONT)  # its gradients are void: it joins anew
        until(lambda: len(events(out, "joined", "cut")) == 2)
        until(lambda: settled_again(out))
        assert not ask(out, "/step")["applied"]
        late = started.satellite(out, "late")
        until(lambda: events(out, "pulled", "late"))
        live.add("g1")
        until(lambda: ask(out, "/step")["applied"] == 1)
        found = counted(out, 1)
        assert len(found) == 16
        assert set(found.values()) == {1}
        live.add("g2")
        live.add("g3")
        for process in (core, cut, late):
            process.join(240)
            assert process.exitcode == 0
        train(config(model, one, *settings, runs=live.path))
    for step in (1, 2):
        assert farthest(one / f"checkpoints/step-{step:08d}", out / f"checkpoints/step-{step:08d}") < 1e-9


def settled_again(out: Path) -> bool:
    """Whether what was lost has been computed again."""
    counts = ask(out, "/step")["micro_steps"]
    return bool(counts["pending"] == counts["running"] == 0 and counts["held"] + counts["reduced"] == 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 20261130])
def test_a_core_killed_anywhere_ends_as_if_undisturbed(model: Path, whole: Run, tmp_path: Path, seed: int) -> None:
    """Satellites live through it: they drop what they hold and join the next one.

    Each core finds one group more than the one before it, so none is done before it is killed.
    """
    one, out, draw = tmp_path / "one", tmp_path / "out", random.Random(seed)
    base = (*COMMON, "--train.anchor=burst", "--train.steps_per_burst=2", "--output.save_every=2", "--output.keep=9")
    base = (*base, "--train.executions_per_step=2", f"--train.steps={GROUPS}")
    with processes() as started, recording(whole, tmp_path / "run") as live:
        base = (*base, f'--data.live=["{live.path}"]')
        settings = config(model, out, *base, *STREAM, runs=live.path)
        others = [started.satellite(out, name) for name in "ab"]
        live.add("g0")
        for there in range(2, GROUPS):
            live.add(f"g{there - 1}")
            core, least = started.core(settings), draw.randint(trained_steps(out), there)
            until(lambda least=least: trained_steps(out) >= least)
            core.join(draw.uniform(0, 0.3))
            assert core.is_alive()
            core.kill()
            core.join()
        live.add(f"g{GROUPS - 1}")
        last = started.core(settings)
        for process in (last, *others):
            process.join(240)
            assert process.exitcode == 0
        train(config(model, one, *base, runs=live.path))
    consumed = [[(row.step, row.execution_id) for row in ledger.ledger(folder)] for folder in (one, out)]
    assert sorted(consumed[0]) == sorted(consumed[1])
    name = f"checkpoints/step-{GROUPS:08d}"
    assert farthest(one / name, out / name) < 1e-9


def trained_steps(out: Path) -> int:
    """Steps that the folder's metrics tell of."""
    file = out / "metrics.jsonl"
    return len(read_metrics(file)) if file.exists() else 0
