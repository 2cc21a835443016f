"""Training from recorded groups makes the policy better at the task; benchmarks/learning.py is the long version."""

from pathlib import Path

import pytest

import gyre_train
from benchmarks._toy import Judged, expected_score, make_policy, record


@pytest.mark.timeout(900)  # ten seconds of CPU, but minutes where many share it
def test_recorded_groups_raise_the_expected_score(tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy")
    run = record(tmp_path / "run", policy, groups=20)
    settings = {
        "model.path": policy, "data.runs": f'["{run}"]', "data.evaluators.all": 1, "train.anchor": "step",
        "train.lr": 1e-3, "train.executions_per_step": 16, "output.dir": tmp_path / "out",
    }  # fmt: skip
    done = gyre_train.train(None, [f"--{name}={value}" for name, value in settings.items()])
    assert done.step == 10
    assert done.checkpoint is not None
    before, after = (expected_score(folder, Judged.ALL) for folder in (policy, Path(done.checkpoint)))
    assert 0.4 < before < 0.6
    assert after > before + 0.08, (before, after)
