"""`gyre train` on rollouts of its own: real engine, proxy, launcher and harnesses as processes, and kills of each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gyre_data import ledger
from gyre_data import open as open_run
from gyre_data.verify import verify
from gyre_train.metrics import read_metrics
from tests.support.live_training import MINI, is_there, python, wait_until, write_tasks
from tests.support.streaming import events, until
from tests.support.training import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, PATIENCE_S = 4, 240.0


def settings(tmp_path: Path, command: Sequence[str] = MINI) -> Path:
    model = tiny_model(tmp_path / "tiny")
    tasks = write_tasks(tmp_path, command)
    (tmp_path / "live.toml").write_text(
        f'[model]\npath = "{model}"\n[data]\neval_tasks = ["t2"]\n'
        f'[rollout]\ntasks = "{tasks}"\nattempts = 2\njobs = 2\nmax_staleness = 1\neval_every = 2\n'
        f"[train]\nsteps = {STEPS}\nexecutions_per_step = 2\nlr = 1e-3\n[pack]\ntokens = 1024\n"
        f'[output]\ndir = "{tmp_path}/out"\npolicy_id = "rl"\n'
    )
    return tmp_path / "live.toml"


def train(config: Path, *overrides: str) -> subprocess.Popen[str]:
    return python("gyre_data", "train", str(config), *overrides)


@contextmanager
def ended(trainer: subprocess.Popen[str], out: Path) -> Iterator[None]:
    """Nothing of a test that failed stays behind."""
    try:
        yield
    finally:
        trainer.kill()
        trainer.wait()
        for pid in pids(out).values():
            if is_there(pid):
                os.kill(pid, signal.SIGTERM)


def pids(out: Path) -> dict[str, int]:
    try:
        return {
            name.partition("-")[0]: one["pid"] for name, one in json.loads((out / "services.json").read_text()).items()
        }
    except FileNotFoundError:
        return {}


def test_it_learns_from_what_it_runs_whatever_is_killed(tmp_path: Path) -> None:
    config, out = settings(tmp_path), tmp_path / "out"

    def steps() -> int:
        return len(read_metrics(out / "metrics.jsonl"))

    first = train(config)
    try:
        wait_until(lambda: steps() >= 1, first, PATIENCE_S)
    finally:
        first.kill()
        first.communicate()
    left = pids(out)
    assert set(left) == {"engine", "proxy", "run"}
    assert all(is_there(pid) for pid in left.values()), "they go on without the trainer"
    second = train(config)
    with ended(second, out):
        wait_until(lambda: steps() >= 2, second, PATIENCE_S)
        assert pids(out) == left, "they were found again"
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not left.items() & pids(out).items() and steps() >= 3, second, PATIENCE_S)
        last = pids(out)
        told = second.communicate(timeout=400)[1]
        assert second.returncode == 0, told
        assert not any(is_there(pid) for pid in last.values())
    rows = ledger.ledger(out)
    consumed = {row.execution_id for row in rows}
    assert len(consumed) == len({(row.execution_id, row.step) for row in rows}), "each execution in one step"
    assert {row.step for row in rows} == set(range(1, STEPS + 1))
    metrics = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["staleness_max"] <= 1 for row in metrics)
    evals = read_metrics(out / "evals.jsonl")
    assert [(row["step"], row["version"].partition(":")[2]) for row in evals] == [(0, "0"), (2, "2"), (4, "4")]
    assert all(row["by_task"].keys() == {"t2"} for row in evals)
    run = open_run(tmp_path / "out-run")
    known = {row["execution_id"]: row["task_id"] for row in run.table("executions").to_pylist() if row["task_id"]}
    assert {known[name] for name in consumed} == {"t0", "t1"}, "held out is held out"
    assert not verify(tmp_path / "out-run").problems


def test_steps_fill_as_groups_come_and_a_satellite_may_help(tmp_path: Path) -> None:
    go, out = tmp_path / "go", tmp_path / "out"
    held = ["sh", "-c", f'while [ ! -e {go} ]; do sleep 0.1; done; exec "$@"', "sh", *MINI]
    trainer = train(settings(tmp_path, held), "--stream.satellites=true", "--stream.parts=2", "--train.steps=2")
    with ended(trainer, out):
        wait_until((out / "stream.json").exists, trainer, PATIENCE_S)
        satellite = python("gyre_train.streaming.satellite", str(out), "--name", "s")
        try:
            until(lambda: events(out, "joined"))
            go.touch()
            told = trainer.communicate(timeout=400)[1]
            assert trainer.returncode == 0, told
            said = satellite.communicate(timeout=400)[1]
            assert satellite.returncode == 0, said
        finally:
            satellite.kill()
            satellite.wait()
    rows = {(row.step, row.execution_id) for row in ledger.ledger(out)}
    assert len({name for _, name in rows}) == len(rows) >= 4, "each execution in one step"
    metrics = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["staleness_max"] <= 1 and row["micro_steps"] >= 2 for row in metrics)
    assert [row["step"] for row in read_metrics(out / "evals.jsonl")] == [0, 2]
