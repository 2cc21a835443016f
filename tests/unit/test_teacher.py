"""On-policy distillation: a teacher's log-probs in the side table, and training on nothing else."""

from pathlib import Path

import numpy as np
import pytest

import gyre_train
from gyre_data.errors import ConfigError
from gyre_data.store import open as open_run
from gyre_train import teacher
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from gyre_train.teacher import teacher_logprobs
from tests.support.training import config, recorded_run, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_model_that_teaches_itself_says_what_was_recorded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "_TOGETHER", 3)  # of four executions
    folder = recorded_run(tmp_path / "r", model)
    with pytest.raises(ConfigError, match=r"wanted one teacher's log-probs in .*, it holds those of none; name one"):
        train(config(model, tmp_path / "out", "--loss.teacher=1", runs=folder))
    told = gyre_train.teach(folder, model, teacher="self:0")
    run = open_run(folder)
    values = teacher_logprobs(run, None)
    assert told == sum(map(len, values.values())) > 0
    nodes = run.table("nodes")
    recorded = dict(zip(nodes.column("node_id").to_pylist(), nodes.column("logprobs").to_pylist(), strict=True))
    assert values.keys() == {node for node, value in recorded.items() if value is not None}
    for node, value in values.items():
        np.testing.assert_allclose(value, recorded[node], atol=1e-5)


def test_the_teacher_alone_moves_the_policy_towards_itself(model: Path, tmp_path: Path) -> None:
    folder, other = recorded_run(tmp_path / "r", model, groups=1), tiny_model(tmp_path / "teacher", seed=3)
    gyre_train.teach(folder, other, teacher="other:0")
    gyre_train.teach(folder, model, teacher="self:0")
    distil = ["--loss.advantage=0", "--loss.teacher=1", "--train.executions_per_step=8"]
    with pytest.raises(ConfigError, match=r"it holds those of other:0, self:0; name one with loss\.teacher_name"):
        train(config(model, tmp_path / "none", *distil, runs=folder))
    gaps = []
    for name in ("other:0", "self:0"):
        out = tmp_path / name
        train(config(model, out, *distil, f"--loss.teacher_name={name}", runs=folder))
        (row,) = read_metrics(out / "metrics.jsonl")
        gaps.append((row["teacher_gap"], row["grad_norm"]))
    assert abs(gaps[0][0]) > 0.01
    assert gaps[1][0] == pytest.approx(0.0, abs=1e-5)
    assert gaps[1][1] < 1e-3 * gaps[0][1]  # nothing to learn from oneself
