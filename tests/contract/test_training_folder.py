"""What the real trainer writes in its folder is what the page's data module reads of it."""

from pathlib import Path

import gyre_data
import gyre_train
from gyre_data.training_folder import TrainingFolder
from gyre_data.view.training import open_training
from gyre_train.rollout.evaluation import EvalLog
from tests.support.training import config, recorded_run, tiny_model

SHOWN = ("step", "reward_mean", "loss", "mismatch_mean", "mismatch_max", "age_mean", "age_max", "trained_tokens_per_s",
         "seconds", "plan_seconds", "grad_norm", "sharing", "trained_tokens")  # fmt: skip
"""Figures that the page shows by name (training.js, steps.js)."""


def test_the_page_reads_what_the_trainer_wrote(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    run = recorded_run(tmp_path / "run", model, shift=0.01)
    gyre_train.train(config(model, tmp_path / "out", "--train.executions_per_step=2", runs=run))
    shown, training = open_training(gyre_data.open(run), None)  # found beside the run by what the trainer noted
    assert training is not None
    assert training.folder.path == tmp_path / "out"
    told = training.model()
    assert told["columns"]["step"] == [1, 2]
    for name in SHOWN:
        assert all(isinstance(value, int | float) for value in told["columns"][name]), name
    assert told["columns"]["age_mean"] == [0, 1]  # sampled by the weights that training began with
    assert told["versions"] == ["run:1", "run:2"]
    assert (told["policy"], told["total"]) == ("run", 2)
    assert told["doing"] is not None
    assert (told["doing"]["text"], told["doing"]["waiting"], told["running"]) == ("ended", False, False)
    assert told["consumed"].keys() == {e.info.execution_id for e in shown}
    for step in (1, 2):
        rows = training.step(step)["executions"]
        assert sorted(row["reward"] for row in rows) == [0.0, 1.0]
        for row in rows:
            assert told["consumed"][row["execution_id"]] == step
            tree = shown[row["execution_id"]].tree
            assert all(one["leaf"] in tree.index for one in row["trajectories"])


def test_the_page_reads_the_passes_that_the_trainer_notes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    log = EvalLog(tmp_path, 0)
    passed = {
        "version": "run:2",
        "at": 1.8e9,
        "score": 0.5,
        "scored": 2,
        "unscored": 0,
        "by_task": {"a": 1.0, "b": 0.0},
    }
    for step in (0, 2):
        log.write({**passed, "step": step})
    assert TrainingFolder(tmp_path).evals == log.rows
