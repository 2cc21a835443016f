"""`gyre train` with cells, as one command: it is killed in the middle, run again, and ends with nothing left at work.

Both cells serve, train and serve again; half of each step is recorded data; the weights before and after are evaluated.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gyre_data import ledger
from gyre_data import open as open_run
from gyre_data.verify import verify
from gyre_sched.actions import StepApplied
from gyre_sched.ledger import read
from gyre_train.metrics import read_metrics
from tests.support.live_training import is_there, python, wait_until, write_tasks
from tests.support.training import recorded_run, tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

STEPS, PATIENCE_S = 2, 900.0


def settings(tmp_path: Path) -> Path:
    model = tiny_model(tmp_path / "tiny")
    before = recorded_run(tmp_path / "before", model, groups=STEPS, size=2)
    tasks = write_tasks(tmp_path)
    (tmp_path / "rl.toml").write_text(
        f'[model]\npath = "{model}"\n'
        f'[data]\neval_tasks = ["t2"]\nruns = ["{before}"]\nmix = {{ "{before}" = 1, "{tmp_path}/out-run" = 1 }}\n'
        f'[rollout]\ntasks = "{tasks}"\nattempts = 2\njobs = 4\neval_every = {STEPS}\n'
        "[scheduler]\ncells = 2\ncapacity = 2\npolicy_settings = { burst = 1, depth = 1.0 }\n"
        f"[train]\nsteps = {STEPS}\nexecutions_per_step = 4\nlr = 1e-3\n[pack]\ntokens = 1024\n[stream]\nparts = 2\n"
        f'[output]\ndir = "{tmp_path}/out"\npolicy_id = "rl"\n'
    )
    return tmp_path / "rl.toml"


def train(config: Path) -> subprocess.Popen[str]:
    return python("gyre_data", "train", str(config), OMP_NUM_THREADS="1")


def pids(out: Path) -> dict[str, int]:
    """Of what the command keeps up, and of the cells' processes, as they are written down."""
    found = {}
    if (out / "services.json").exists():
        found = {name: one["pid"] for name, one in json.loads((out / "services.json").read_text()).items()}
    for born in (out / "scheduler" / "cells").glob("*/born"):
        found[born.parent.name] = int(born.read_text().split("\n")[0])
    return found


@contextmanager
def ended(trainer: subprocess.Popen[str], out: Path) -> Iterator[None]:
    """Nothing of a test that failed stays behind."""
    try:
        yield
    finally:
        trainer.kill()
        trainer.communicate()
        left = pids(out)
        for name in sorted(left, key=lambda name: not name.startswith("cells-")):  # the controller first
            if is_there(left[name]):
                os.kill(left[name], signal.SIGTERM if name.startswith(("run-", "proxy-")) else signal.SIGKILL)


def test_one_command_trains_on_cells_and_goes_on_after_it_was_killed(tmp_path: Path) -> None:
    config, out = settings(tmp_path), tmp_path / "out"
    first = train(config)
    try:
        wait_until(lambda: len(read_metrics(out / "metrics.jsonl")) >= 1, first, PATIENCE_S)
    except BaseException:
        with ended(first, out):
            raise
    first.kill()
    first.communicate()
    left = pids(out)
    second = train(config)
    with ended(second, out):
        assert {"proxy-0", "run-1", "cells-2", "c0", "c1"} <= left.keys()
        assert all(is_there(left[name]) for name in ("proxy-0", "run-1", "cells-2")), "they go on without the command"
        wait_until(lambda: len(read_metrics(out / "metrics.jsonl")) >= STEPS, second, PATIENCE_S)
        assert {name: pid for name, pid in pids(out).items() if name in ("proxy-0", "run-1")}.items() <= left.items()
        told = second.communicate(timeout=900)[1]
        assert second.returncode == 0, told
        assert not [name for name, pid in pids(out).items() if is_there(pid)]
        assert not (out / "services.json").exists()
    assert f"evaluation after step {STEPS} (rl:{STEPS})" in told
    assert "waiting for" in told

    records = [record for _, record in read(out / "scheduler" / "ledger.jsonl")]
    assert [one.version for one in records if isinstance(one, StepApplied)] == [1, 2]
    rows = {(row.step, row.execution_id) for row in ledger.ledger(out)}
    assert len({name for _, name in rows}) == len(rows) == STEPS * 4, "each execution in one step"
    metrics = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert [row["recorded_executions"] for row in metrics] == [2] * STEPS
    assert all(row["staleness_max"] == 0 for row in metrics), "bursts of one step over one batch"
    evals = read_metrics(out / "evals.jsonl")
    assert [row["step"] for row in evals] == [0, STEPS]
    assert all(row["by_task"].keys() == {"t2"} and sum(row["sampled_by"].values()) > 0 for row in evals)
    assert evals[-1]["sampled_by"].keys() == {f"rl:{STEPS}"}
    run = open_run(tmp_path / "out-run")
    known = {row["execution_id"]: row["task_id"] for row in run.table("executions").to_pylist() if row["task_id"]}
    assert {known[name] for _, name in rows if name in known} == {"t0", "t1"}, "held out is held out"
    assert not verify(tmp_path / "out-run").problems


@pytest.mark.skipif(sys.platform != "linux", reason="Mooncake has wheels for Linux only")
def test_a_cell_that_serves_takes_each_version_out_of_the_cores_memory(tmp_path: Path) -> None:
    config, out = settings(tmp_path), tmp_path / "out"
    pools = 'policy = "async"\npolicy_settings = { rollout_cells = 1, depth = 2.0 }\n'
    text = config.read_text().replace("policy_settings = { burst = 1, depth = 1.0 }\n", pools)
    config.write_text(text + '[publish]\nmethod = "mooncake"\n')
    trainer = train(config)
    with ended(trainer, out):
        wait_until(lambda: len(read_metrics(out / "metrics.jsonl")) >= STEPS, trainer, PATIENCE_S)
        told = trainer.communicate(timeout=900)[1]
        assert trainer.returncode == 0, told
        assert not [name for name, pid in pids(out).items() if is_there(pid)]
    said = (out / "cells-3.log").read_text()
    assert "the core brought rl:1" in said
    assert "did not bring" not in said
    assert len(list((out / "scheduler" / "received").glob("rl_*/model*.safetensors"))) >= 1
