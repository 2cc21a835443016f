"""`kill -9` at random points of training, whole processes: consumed executions and weights are an undisturbed run's."""

import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

from gyre_data import ledger
from gyre_data.compact import compact
from gyre_data.pins import tag
from gyre_train.config import TrainingConfig
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from tests.support.checkpoints import same_state
from tests.support.training import config, recorded_run, tiny_model

pytestmark = pytest.mark.slow

STEPS, KILLS = 12, 4
SETTINGS = (
    "--train.executions_per_step=1", "--output.save_every=2", "--output.keep=1", "--train.anchor=burst",
    "--train.steps_per_burst=3", "--train.weight_decay=0.1", "--train.schedule=cosine", f"--train.steps={STEPS}",
)  # fmt: skip


def process(settings: TrainingConfig) -> BaseProcess:
    """A fresh process that trains; it is forked from one that has loaded torch and done nothing with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gyre_train.loop"])
    started = context.Process(target=train, args=(settings,))
    started.start()
    return started


def steps_in(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_somewhere(settings: TrainingConfig, folder: Path, draw: random.Random, step_s: float) -> bool:
    """Train and kill within the next few steps; False when training was done before that."""
    running, begun = process(settings), steps_in(folder)
    wanted, deadline = draw.randrange(4), time.monotonic() + 120
    while running.is_alive() and steps_in(folder) < begun + wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    running.join(draw.uniform(0, step_s))
    killed = running.is_alive()
    running.kill()
    running.join()
    return killed


@pytest.mark.parametrize("seed", [1, 20261129, 412])
def test_killed_anywhere_it_ends_as_if_undisturbed(
    seed: int, undisturbed: Path, data: tuple[Path, Path], tmp_path: Path
) -> None:
    model, run = data
    draw, out = random.Random(seed), tmp_path / "out"
    settings = config(model, out, *SETTINGS, runs=run)
    # By the steps of this machine: on a fast one a fixed time would be all of training.
    step_s = median(row["seconds"] for row in read_metrics(undisturbed / "metrics.jsonl"))
    killed = sum(kill_somewhere(settings, out, draw, step_s) for _ in range(KILLS - 1))
    tag(run, f"seed-{seed}")
    compact(run)
    compact(out)
    killed += kill_somewhere(settings, out, draw, step_s)
    assert killed >= 2
    last = process(settings)
    last.join(120)
    assert last.exitcode == 0

    consumed = [[(r.step, r.execution_id) for r in ledger.ledger(folder)] for folder in (undisturbed, out)]
    assert consumed[0] == consumed[1]
    assert len({execution for _, execution in consumed[0]}) == STEPS
    final = f"checkpoints/step-{STEPS:08d}"
    one, two = (load_file(folder / final / "model.safetensors") for folder in (undisturbed, out))
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert same_state(undisturbed / final, out / final)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("data")
    model = tiny_model(folder / "tiny")
    return model, recorded_run(folder / "r", model, groups=STEPS // 2)


@pytest.fixture(scope="module")
def undisturbed(data: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, run = data
    out = tmp_path_factory.mktemp("undisturbed")
    running = process(config(model, out, *SETTINGS, runs=run))
    running.join(240)
    assert running.exitcode == 0
    return out
