"""`gyre train` as a user runs it: two ranks started by itself, a dry run, one-line errors, and kill -9."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gyre_data import ledger
from gyre_train.config import TrainingConfig, to_toml
from gyre_train.loop import train
from tests.support.engines import ROOT, wait_until
from tests.support.training import chat_file, config, recorded_run, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def start(settings: TrainingConfig, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    file = folder / "train.toml"
    file.write_text(to_toml(settings))
    path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
    return subprocess.Popen(
        [sys.executable, "-m", "gyre_data", "train", str(file), *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_two_ranks_train_as_one_does(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    overrides = ("--train.executions_per_step=2", "--model.dtype=float64")
    process = start(config(model, tmp_path / "two", *overrides, runs=run), tmp_path, "--parallel.tp=2", "--json")
    train(config(model, tmp_path / "one", *overrides, runs=run))
    out, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    summary = json.loads(out)
    assert (summary["step"], summary["version"]) == (2, "run:2")
    one = load_file(tmp_path / "one/checkpoints/step-00000002/model.safetensors")
    two = load_file(Path(summary["checkpoint"]) / "model.safetensors")
    for name, value in one.items():
        assert (two[name] - value).abs().max() < 1e-9, name
    assert "step 2" in errors  # progress, as lines where there is no terminal
    assert "Transformer Engine" not in errors


def test_kill_9_and_the_same_command_again(model: Path, tmp_path: Path) -> None:
    chat = chat_file(tmp_path / "c.jsonl", *(f"answer {i}" for i in range(7)))
    settings = ("--train.executions_per_step=2", "--data.epochs=4", "--output.save_every=3", "--train.steps=13")
    process = start(config(model, tmp_path / "out", *settings, chat=chat), tmp_path)
    metrics = tmp_path / "out/metrics.jsonl"

    def is_in_the_middle() -> bool:
        return process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 4)

    wait_until(is_in_the_middle, "4 steps", 200)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = train(config(model, tmp_path / "out", *settings, chat=chat))
    whole = train(config(model, tmp_path / "whole", *settings, chat=chat))
    assert done.step == whole.step == 13
    consumed = [[(r.step, r.execution_id) for r in ledger.ledger(tmp_path / name)] for name in ("out", "whole")]
    assert consumed[0] == consumed[1]
    assert len(consumed[0]) >= 26
    final = "checkpoints/step-00000013/model.safetensors"
    one, two = load_file(tmp_path / "out" / final), load_file(tmp_path / "whole" / final)
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_sigterm_saves_the_step_under_way(model: Path, tmp_path: Path) -> None:
    """Both ranks get the signal, as from a batch system; the same command goes on where it stopped."""
    chat = chat_file(tmp_path / "c.jsonl", *(f"answer {i}" for i in range(4)))
    settings = ("--train.executions_per_step=1", "--data.epochs=500", "--output.save_every=100000")
    command = config(model, tmp_path / "out", *settings, '--output.log=["tensorboard"]', chat=chat)
    process = start(command, tmp_path, "--parallel.tp=2")
    metrics = tmp_path / "out/metrics.jsonl"

    def is_in_the_middle() -> bool:
        return process.poll() is not None or (metrics.exists() and metrics.read_text().count("\n") >= 2)

    wait_until(is_in_the_middle, "2 steps", 200)
    os.killpg(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    step = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert 2 <= step < 2000
    assert f"checkpoints/step-{step:08d}" in out
    assert "SIGTERM: the step under way is finished and saved" in errors
    assert list((tmp_path / "out/tensorboard").iterdir())
    done = train(dataclasses.replace(command, train=dataclasses.replace(command.train, steps=step + 1)))
    assert (done.step, done.steps_done) == (step + 1, 1)


def test_a_dry_run_prints_settings_and_plan(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    process = start(config(model, tmp_path / "out", runs=run), tmp_path, "--dry-run", "--train.lr=0.5")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "lr = 0.5" in out
    assert "steps      1   executions 4" in out
    assert "FLOPs" in out
    assert out.endswith("next: the same without --dry-run\n")
    assert not (tmp_path / "out").exists()


def test_an_error_is_one_line(model: Path, tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "r", model)
    process = start(config(model, tmp_path / "out", runs=run), tmp_path, "--train.lr_rate=1")
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors == "gyre: unknown key train.lr_rate; nearest train.lr\n"
    assert out == ""
