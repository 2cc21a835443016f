"""Settings of rollouts: what is filled in, what is refused, and what a pass over held-out tasks gave."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_train.config import load_config
from gyre_train.rollout.evaluation import EvalLog, score_groups
from gyre_train.rollout.loop import waited_for
from gyre_train.rollout.pace import Out
from tests.support.forest import Forest

BASE = ("--model.path=m", "--output.dir=out", "--train.steps=4", "--rollout.tasks=t.toml", "--rollout.attempts=4")


def test_the_run_of_the_rollouts_is_one_that_grows() -> None:
    config = load_config(None, BASE)
    assert (config.data.runs, config.data.live, config.rollout.run) == (("out-run",), ("out-run",), "out-run")
    mix = ["--data.mix.out-run=3", "--data.mix.before=1"]
    config = load_config(None, [*BASE, '--data.runs=["before"]', *mix])
    assert (config.data.runs, config.data.live) == (("before", "out-run"), ("out-run",))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--rollout.tasks=", '--data.runs=["r"]'], r"rollout\.attempts has no effect without tasks"),
        (["--train.executions_per_step=6"], "wanted a divisor of train.executions_per_step = 6"),
        (["--rollout.eval_every=2"], "no task is held out"),
        (["--rollout.harness=a", "--rollout.worker=b"], "wanted one of them, got both"),
        (["--rollout.max_staleness=-1"], "wanted a number from 0, got -1"),
        (["--rollout.jobs=0"], "wanted at least 1, got 0"),
        (['--data.runs=["other"]', '--data.live=["other"]'], "the one run that grows, got other too"),
        (["--stream.satellites=true", "--stream.controlled=true"], "set scheduler.cells"),
        (["--train.steps=0"], "set train.steps"),
    ],
)
def test_a_wrong_setting_says_what_to_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, *overrides])


def test_a_plan_before_anything_is_recorded_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").touch()
    shown = CliRunner().invoke(app, ["train", "empty.toml", "--dry-run", *BASE])
    assert shown.exit_code == 0, shown.output
    assert 'run = "out-run"' in shown.stdout
    *_, told, following = shown.stdout.splitlines()
    assert told.startswith("nothing is recorded in out-run yet")
    assert following == "next: the same without --dry-run"


def test_a_wait_says_which_tasks_and_who_works_at_them() -> None:
    def told(*complete: bool) -> str:
        out = [Out(group=f"live-{n:06d}", task=f"swe-{n}", step=n, complete=each) for n, each in enumerate(complete)]
        return waited_for(out, 6, load_config(None, [*BASE, "--rollout.max_staleness=2"]).rollout)

    works = "; `gyre run` works at {}: gyre ls out-run"
    begun = "step 7: 5 of 6 groups of executions complete; waiting for "
    one = "task swe-4 (group live-000004), too old for any later step"
    assert told(True, True, True, True, False, True) == begun + one + works.format("it")
    assert told(True, True, True, True, True, False) == begun + "the others" + works.format("them")
    assert (
        "tasks swe-0 (group live-000000), swe-1 (group live-000001), swe-2 (group live-000002) and 2 more, too "
        in told(*5 * [False])
    )
    assert told(False).startswith("step 7: 0 of 1 group of executions complete; waiting for task swe-0 (group ")


def test_a_pass_is_the_mean_over_tasks_and_no_score_is_not_zero(tmp_path: Path) -> None:
    forest = Forest()
    for name, group, score in (("e_a1", "x", 1.0), ("e_a2", "x", 0.0), ("e_b1", "y", 1.0), ("e_b2", "y", None)):
        forest.execution(name, group=group, **({"score": score} if score is not None else {})).call()
    forest.execution("e_c1", group="other", score=0.0).call()
    forest.write(tmp_path / "run")
    found = score_groups(open_run(tmp_path / "run"), {"x": "tx", "y": "ty"}, None)
    assert found == {"score": 0.75, "scored": 3, "unscored": 1, "by_task": {"tx": 0.5, "ty": 1.0}}
    with RunWriter(tmp_path / "empty"):
        pass
    assert score_groups(open_run(tmp_path / "empty"), {"x": "tx"}, None)["score"] is None


def test_passes_of_weights_that_are_gone_are_made_again(tmp_path: Path) -> None:
    log = EvalLog(tmp_path, 0)
    for step in (0, 2, 4):
        log.write({"step": step, "score": step / 4})
    again = EvalLog(tmp_path, 3)
    assert [step in again for step in (0, 2, 4)] == [True, True, False]
    again.write({"step": 4, "score": 0.0})
    assert [row["score"] for row in EvalLog(tmp_path, 9).rows] == [0.0, 0.5, 0.0]
