"""The simulator against the figures that the ladder was calibrated on and against those it predicts."""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.main import app
from gyre_sched.choose import policy
from gyre_sched.durations import Recorded, TwoLevel, grouped
from gyre_sched.errors import ScenarioError
from gyre_sched.experiment import compare, interval, ladder, select
from gyre_sched.measure import Measured
from gyre_sched.policies import Async, CarryOver, Colocate, Waterlevel
from gyre_sched.scenario import Scenario, load, rung, shipped
from gyre_sched.simulate import simulate

SMALL = Scenario(
    durations=TwoLevel(mean_s=3600.0, cv_query=0.2, cv_execution=0.3),
    steps=4,
    cells=3,
    batch_groups=2,
    group_size=3,
    train_cell_h=1.0,
)


def test_two_level_durations_fit_what_was_published() -> None:
    """Mean 1.93 h, mean of the longest of 16 2.96 h, 9.51 % of queries with one of 4 h or more."""
    model = TwoLevel(mean_s=1.93, cv_query=0.213, cv_execution=0.261)
    rng = random.Random(1)
    draws = [model.draw(rng, 16).seconds for _ in range(6000)]
    assert sum(map(sum, draws)) / 96000 == pytest.approx(1.93, rel=0.01)
    assert sum(map(max, draws)) / 6000 == pytest.approx(2.96, rel=0.01)
    assert sum(max(draw) >= 4 for draw in draws) / 6000 == pytest.approx(0.0951, abs=0.012)


@pytest.fixture(scope="module")
def hours() -> dict[str, Measured]:
    """48 steps of the 122B set-up, one seed; the ratios of one seed lie within 1.5 % of the means."""
    scenario = replace(ladder("122b")[2][0].scenario, steps=48)
    policies = {
        "E0": Waterlevel(),
        "E1": Waterlevel(burst=1, depth=2.55),
        "Colocate": Colocate(),
        "Async": Async(rollout_cells=4, depth=2.55),
    }
    return {name: simulate(scenario, one, seed=100) for name, one in policies.items()}


@pytest.mark.parametrize(("name", "ratio"), [("E1", 1.095), ("Colocate", 1.449), ("Async", 1.513)])
def test_ratios_to_the_elastic_rule_are_those_of_the_prototype(
    hours: dict[str, Measured], name: str, ratio: float
) -> None:
    assert hours[name].hours / hours["E0"].hours == pytest.approx(ratio, rel=0.03)


def test_hours_slack_staleness_and_bounds_of_the_elastic_rule(hours: dict[str, Measured]) -> None:
    e0 = hours["E0"]
    assert e0.hours == pytest.approx(64.61, rel=0.03)
    assert e0.train_idle == pytest.approx(0.197, abs=0.02)
    assert (e0.staleness_groups, e0.staleness_max) == (1.5, 3)
    assert e0.hours / e0.work_bound_h == pytest.approx(1.23, rel=0.03)
    assert e0.hours / e0.critical_path_h == pytest.approx(1.018, rel=0.01)
    assert e0.switches == 16 * 12  # twice per cell and burst
    assert (e0.execution_mean_h, e0.query_mean_h) == pytest.approx((1.92, 2.95), rel=0.03)


def test_one_seed_gives_one_run_and_policies_see_the_same_queries() -> None:
    one, again, other = (simulate(SMALL, Waterlevel(), seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one.hours != other.hours
    assert simulate(SMALL, CarryOver(), seed=3).executions != 0


def test_recorded_durations_keep_their_groups() -> None:
    recorded = grouped([("a", 60.0), ("b", 600.0), ("a", 66.0), ("b", 660.0)])
    assert recorded.groups == ((60.0, 66.0), (600.0, 660.0))
    draws = [recorded.draw(random.Random(seed), 2).seconds for seed in range(20)]
    assert {sum(draw) for draw in draws} == {126.0, 1260.0}
    assert set(recorded.draw(random.Random(0), 5).seconds) <= {60.0, 66.0} | {600.0, 660.0}
    with pytest.raises(ScenarioError, match="record executions first"):
        Recorded(groups=())


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, round(found.half, 3)) == (2.0, 2.483)
    assert interval([1.0]).half == float("inf")


def test_a_ladder_file_with_a_wrong_key_names_the_nearest(tmp_path: Path) -> None:
    assert shipped() == ["122b", "2.4t", "policies"]
    with pytest.raises(ScenarioError, match=r"unknown key scenario\.cell; nearest scenario\.cells"):
        rung({"cell": 4}, durations=SMALL.durations)
    with pytest.raises(ScenarioError, match=r"wanted scenario\.cells as int, got 'x'"):
        rung({"cells": "x"}, durations=SMALL.durations)
    with pytest.raises(ScenarioError, match="name a TOML file or one of: 122b"):
        load(tmp_path / "none.toml")


def test_a_policy_is_found_by_name_or_path() -> None:
    assert policy("waterlevel", {"burst": 2}) == Waterlevel(burst=2)
    assert policy("gyre_sched.policies:Colocate") == Colocate()
    with pytest.raises(ScenarioError, match="nearest burst"):
        policy("waterlevel", {"bursts": 2})
    with pytest.raises(ScenarioError, match=r"package\.module:Name"):
        policy("nothing")
    with pytest.raises(ScenarioError, match="has no attribute"):
        policy("gyre_sched.policies:Nothing")
    with pytest.raises(ScenarioError, match=r"waterlevel\.burst of at least 1"):
        policy("waterlevel", {"burst": 0})


def test_ratios_are_paired_and_the_base_is_always_run() -> None:
    _, base, rungs = ladder("122b", changes={"steps": 4, "batch_groups": 4})
    found = compare(select(rungs, ["Colocate"], base), seeds=[0, 1], base=base)
    assert [outcome.rung.name for outcome in found.outcomes] == ["E0", "Colocate"]
    own = [b.hours / a.hours for a, b in zip(*(outcome.runs for outcome in found.outcomes), strict=True)]
    assert found.outcomes[1].ratio == interval(own)
    assert found.outcomes[0].ratio.half == 0


def test_the_command_takes_durations_from_a_table(tmp_path: Path) -> None:
    table = tmp_path / "d.csv"
    table.write_text("group,seconds\n" + "".join(f"g{i % 5},{600 + 60 * i}\n" for i in range(40)))
    words = ["simulate", "122b", "--steps", "4", "--seeds", "1", "--durations", str(table), "--policy", "Colocate"]
    done = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    told = json.loads(done.stdout)
    assert [outcome["name"] for outcome in told["outcomes"]] == ["E0", "Colocate"]
    assert told["outcomes"][0]["runs"][0]["execution_mean_h"] == pytest.approx((600 + 60 * 19.5) / 3600, rel=0.1)
    text = CliRunner().invoke(app, words, catch_exceptions=False).stdout
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_takes_durations_from_a_recorded_run() -> None:
    from gyre_data.store import SAMPLE

    words = ["simulate", "122b", "--steps", "4", "--seeds", "1", "--from", str(SAMPLE), "--policy", "E0", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout)["outcomes"][0]["hours"]["mean"] > 0


@pytest.mark.parametrize("name", ["122b", "2.4t", "policies"])
def test_every_ladder_that_ships_runs(name: str) -> None:
    _, base, rungs = ladder(name, changes={"steps": 1, "batch_groups": 2, "group_size": 2})
    found = compare(rungs, seeds=[0], base=base)
    assert all(outcome.runs[0].steps == 1 for outcome in found.outcomes)


def test_nothing_but_two_commands_names_the_scheduler() -> None:
    """Deleting gyre_sched leaves everything else working: `gyre simulate` needs it, and `gyre train` with cells."""
    root = Path(__file__).resolve().parents[2]
    folders = [root / "gyre_data", root / "gyre_train", root / "proxy" / "gyre_proxy"]
    imports = re.compile(r"^\s*(from|import) gyre_sched|import_module\(\"gyre_sched", re.MULTILINE)
    users = [path for folder in folders for path in folder.rglob("*.py") if imports.search(path.read_text())]
    assert users == [root / "gyre_data" / "simulate_command.py", root / "gyre_train" / "elastic" / "command.py"]
    check = (
        "import sys; sys.modules['gyre_sched'] = None\n"
        "import gyre_train.config, gyre_proxy.commands\n"
        "from gyre_data.main import app; app(['tree', 'sample'])"
    )
    env = {"PYTHONPATH": f"{root}:{root / 'proxy'}", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=env, check=False)
    assert "calls" in done.stdout, done.stderr
