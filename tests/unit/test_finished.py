"""A training whose steps are all taken says so from its folder and config alone, before anything is loaded."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_train.config import TrainingConfig, load_config, to_toml
from gyre_train.folder import finished

LIVE = ("--rollout.tasks=t.toml", "--train.executions_per_step=8", "--rollout.attempts=4", "--data.eval_share=0.5")
EVALUATED = (*LIVE, "--rollout.eval_every=2")


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., TrainingConfig]:
    """The config of a training of which two steps are saved."""
    model, out = tmp_path / "model", tmp_path / "out"
    checkpoint = out / "checkpoints/step-00000002"
    for folder, state in (
        (model, {"step": 0, "version": "base:0", "policy_ids": ["base"]}),
        (checkpoint, {"step": 2, "version": "rl:4", "policy_ids": ["rl", "base"]}),
    ):
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps(state))
    (out / "run.json").write_text(json.dumps({"base": "base:0", "policy_id": "rl", "newest_version": 4}))

    def with_settings(*overrides: str) -> TrainingConfig:
        data = () if set(LIVE) & set(overrides) else ('--data.runs=["r"]',)
        return load_config(None, [f"--model.path={model}", f"--output.dir={out}", "--train.steps=2", *data, *overrides])

    return with_settings


@pytest.mark.parametrize(
    "settings", [(), ("--train.steps=1",), ("--output.policy_id=rl",), LIVE, (*LIVE, "--scheduler.cells=2")]
)
def test_a_training_that_took_its_steps_is_finished(
    trained: Callable[..., TrainingConfig], settings: tuple[str, ...]
) -> None:
    done = finished(trained(*settings))
    assert done is not None
    assert (done.step, done.steps_done, done.version, done.stopped) == (2, 0, "rl:4", False)
    assert str(done.checkpoint).endswith("checkpoints/step-00000002")


@pytest.mark.parametrize(
    "settings",
    [
        ("--train.steps=3",),
        ("--train.steps=0",),
        ('--publish.engines=["http://e"]',),
        ("--stream.satellites=true",),
        ("--output.policy_id=other",),
        EVALUATED,
        (*EVALUATED, "--scheduler.cells=2"),
    ],
)
def test_it_is_begun_where_there_may_be_something_to_do(
    trained: Callable[..., TrainingConfig], settings: tuple[str, ...]
) -> None:
    assert finished(trained(*settings)) is None


def test_it_is_begun_for_what_others_left_and_for_another_model(trained: Callable[..., TrainingConfig]) -> None:
    config = trained(*EVALUATED)
    out = Path(config.output.dir)
    (out / "evals.jsonl").write_text('{"step": 0}\n{"step": 2}\n')
    assert finished(config) is not None
    (out / "services.json").write_text("{}")
    assert finished(config) is None
    (out / "services.json").unlink()
    (Path(config.model.path) / "state.json").write_text('{"version": "base:1", "policy_ids": ["base"]}')
    assert finished(config) is None


def test_the_command_says_it_without_torch(trained: Callable[..., TrainingConfig], tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(to_toml(trained()))
    code = "import sys; sys.modules.update(torch=None, megatron=None); from gyre_data.main import run; run()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code, "train", str(tmp_path / "rl.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing to do: step 2 is reached or the data is used up; ")
    assert done.stdout.endswith(f"next: gyre view {tmp_path / 'out'}\n")
