"""`gyre train` with cells: what the controller is told for a config, what is refused, and who waits for whom."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.store import open as open_run
from gyre_data.types import PolicyVersion
from gyre_sched.api import Cell, Params
from gyre_sched.cells.settings import load, to_toml
from gyre_sched.history import History
from gyre_sched.metrics import write_metrics
from gyre_sched.state import State
from gyre_train.config import load_config
from gyre_train.config import to_toml as training_toml
from gyre_train.elastic import fleet
from gyre_train.elastic.command import check_policy_of
from gyre_train.elastic.watch import seen, told
from gyre_train.rollout.evaluation import sampled_by
from tests.support.forest import Forest

GOLDEN = Path(__file__).parent.parent / "golden" / "train_cells.toml"
BASE = (
    "--model.path=m", "--output.dir=out", "--train.steps=4", "--train.executions_per_step=8", "--rollout.tasks=t.toml",
    "--rollout.attempts=4", "--scheduler.cells=2", "--scheduler.policy_settings.burst=2", "--stream.parts=3",
)  # fmt: skip


def test_a_config_says_what_the_controller_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, BASE)
    base = PolicyVersion(policy_id="base", n=0)
    groups = fleet.queries(["a", "b"], 0, 4)
    made = fleet.fleet_settings(config, proxy="http://p", groups=groups, base=base, policy_id="rl")
    text = to_toml(made).replace(str(tmp_path), "/here").replace(sys.executable, "python")
    assert text == GOLDEN.read_text()
    (tmp_path / "fleet.toml").write_text(to_toml(made))
    read = load(tmp_path / "fleet.toml")
    assert (read.batch_groups, read.group_size, read.microsteps_per_group, read.steps) == (2, 4, 3, 4)
    assert read.weights_of(3) == (f"{tmp_path}/out/checkpoints/step-00000003", "rl:3")
    assert [cell.id for cell in read.cells] == ["c0", "c1"]


def test_the_core_has_the_same_config_and_nothing_to_dispatch(tmp_path: Path) -> None:
    config = load_config(None, [*BASE, "--output.keep=2", "--output.page=8766"])
    core = fleet.core_config(config, "rl", check_policy_of(config))
    (tmp_path / "core.toml").write_text(training_toml(core))
    read = load_config(tmp_path / "core.toml", ["--stream.host=h", "--stream.port=7"])
    assert (read.stream.controlled, read.stream.satellites, read.stream.port) == (True, True, 7)
    assert (read.rollout.tasks, read.scheduler.cells, read.output.page) == ("", 0, 0)
    assert read.output.keep == 3, "a cell that comes back in a burst of two loads the weights before it"
    assert (read.data, read.train, read.output.policy_id) == (config.data, config.train, "rl")


def test_weights_of_cells_travel_by_mooncake_when_publishing_is_set_to_it(tmp_path: Path) -> None:
    config = load_config(None, [*BASE, "--publish.method=mooncake", "--publish.host=10.0.0.1"])
    core = fleet.core_config(config, "rl", 3)
    (tmp_path / "core.toml").write_text(training_toml(core))
    read = load_config(tmp_path / "core.toml")
    assert (read.publish.method, read.publish.host, read.publish.engines) == ("mooncake", "10.0.0.1", ())
    base = PolicyVersion(policy_id="base", n=0)
    made = fleet.fleet_settings(config, proxy="p", groups=["a"], base=base, policy_id="rl", receiver="http://r:1")
    (tmp_path / "fleet.toml").write_text(to_toml(made))
    assert load(tmp_path / "fleet.toml").rollout.receiver == "http://r:1"
    assert fleet.receiver_arguments(config, "7")[-4:] == ["--port", "7", "--protocol", "tcp"]


def test_groups_are_every_task_once_a_round_and_a_longer_list_goes_on_from_a_shorter() -> None:
    tasks = ["a", "b", "c"]
    names = fleet.queries(tasks, 7, 9)
    assert sorted(names[:3]) == tasks
    assert sorted(names[3:6]) == [f"{task}#2" for task in tasks]
    assert len(set(names)) == 9
    assert fleet.queries(tasks, 7, 4) == names[:4]
    assert fleet.queries(tasks, 8, 9) != names


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--scheduler.cells=0"], "scheduler.policy_settings has no effect without cells"),
        (["--rollout.tasks=", '--data.runs=["r"]'], "set rollout.tasks"),
        (["--rollout.max_staleness=2"], "the policy bounds the age"),
        (['--publish.engines=["http://e"]'], "cells start engines"),
        (['--publish.receivers=["http://r"]'], "one is started beside the cells"),
        (["--publish.method=broadcast"], "cannot reach engines of cells"),
        (["--publish.confirm=version"], "no effect where a controller has the engines"),
        (["--publish.protocol=rdma"], "no effect with publish.method = files"),
        (["--stream.port=7"], "each cell has its own"),
        (["--scheduler.capacity=0"], "wanted at least 1, got 0"),
        (['--scheduler.engine=["my-engine", "{port}"]'], "wanted {weights} and {label} in it"),
        (
            ['--scheduler.engine=["e {weights} {label} {port}"]', '--rollout.engine_flags=["-x"]'],
            "into scheduler.engine",
        ),
        (['--data.runs=["before"]'], "set data.mix"),
        (['--data.runs=["before"]', "--data.mix.out-run=3", "--data.mix.before=1"], "8 executions would have 6 of"),
        (["--scheduler.policy_settings=[1]"], "wanted a table of plain values"),
        (["--scheduler.cell=2"], r"nearest scheduler\.cells"),
    ],
)
def test_a_wrong_setting_says_what_to_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*BASE, *overrides])


def test_recorded_runs_take_their_share_of_each_step() -> None:
    mix = ['--data.runs=["before"]', "--data.mix.out-run=1", "--data.mix.before=1"]
    assert fleet.batch_groups(load_config(None, [*BASE, *mix])) == 1
    assert fleet.batch_groups(load_config(None, BASE)) == 2


def test_a_policy_that_is_none_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"unknown key waterlevel\.bursts; nearest burst"):
        check_policy_of(load_config(None, [*BASE, "--scheduler.policy_settings.bursts=2"]))
    with pytest.raises(ConfigError, match="wanted a policy, got 'nobody'"):
        check_policy_of(load_config(None, [*BASE, "--scheduler.policy=nobody"]))


def test_without_the_scheduler_the_error_names_fixed_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gyre_sched.choose", None)
    with pytest.raises(ConfigError, match=r"wanted the package gyre_sched.*fixed pools"):
        check_policy_of(load_config(None, BASE))


def test_a_dry_run_shows_what_would_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.toml").touch()
    shown = CliRunner().invoke(app, ["train", "empty.toml", "--dry-run", *BASE])
    assert shown.exit_code == 0, shown.output
    parts = ("gyre proxy --run out-run", "--await-engines", "gyre run -p t.toml", "gyre_sched.cells", "cells c0, c1")
    for part in parts:
        assert part in shown.stdout
    assert "a step is 2 groups of 4 and 0 recorded executions" in shown.stdout
    assert "gyre receive" not in shown.stdout
    more = ["--dry-run", "--publish.method=mooncake", *BASE]
    assert "gyre receive" in CliRunner().invoke(app, ["train", "empty.toml", *more]).stdout
    told = json.loads(CliRunner().invoke(app, ["train", "empty.toml", "--dry-run", "--json", *BASE]).stdout)
    assert told["programs"]["core"][-2:] == ["--stream.host={host}", "--stream.port={port}"]
    assert tomllib.loads(told["config"])["scheduler"]["cells"] == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "empty.toml"], "nothing is written"


def test_the_controllers_figures_say_who_waits_for_whom(tmp_path: Path) -> None:
    assert seen(tmp_path / "metrics.prom") is None
    params = Params(batch_groups=1, group_size=2, microsteps_per_group=2, min_rollout=1)
    cells = [Cell(id=f"c{n}", position=n, capacity=2, core=n == 0) for n in range(2)]
    write_metrics(tmp_path / "metrics.prom", History(State(params, cells), timeout_s=1.0, engine_share=0.5))
    now = seen(tmp_path / "metrics.prom")
    assert now is not None
    assert (now.serving, now.training, now.version, now.at_work, now.step_open) == (2, 0, 0, 0, False)
    line = told(now, 4, 0)
    assert line == "step 1/4  cells: 2 serve version 0  waiting for groups to be judged"
    one = replace(now, serving=1, training=1, at_work=1)
    line = "step 1/4  cells: 1 serves version 0, 1 trains  waiting for 1 execution at work, while cells train"
    assert told(one, 4, 1) == f"{line}; 1 held-out task"
    assert told(replace(one, down=1), 4, 0).endswith("1 trains, 1 down  waiting for 1 lost cell to come back")


def test_a_pass_says_which_weights_sampled_it(tmp_path: Path) -> None:
    forest = Forest()
    for name, group in (("e_a1", "x"), ("e_b1", "other")):
        forest.execution(name, group=group, score=1.0).call(output=7)
    forest.write(tmp_path / "run")
    run = open_run(tmp_path / "run")
    found = sampled_by(run, ["x"])
    assert sum(found.values()) == 7
    assert sampled_by(run, []) == {}
