"""`gyre eval`: pass@k without bias, intervals over tasks, comparison by task, and what is left out."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError, DataError
from gyre_data.evaluation import compare, evaluate, pass_at_k
from gyre_data.main import app
from tests.support.forest import Forest


def run_of(tasks: dict[str, list[float | None]], **more: Any) -> Forest:
    """Executions with these scores; None is one that nobody scored."""
    forest = Forest(**more)
    for task, values in tasks.items():
        for value in values:
            forest.execution(group=task, task=task, score=value).call()
    return forest


@pytest.mark.parametrize(("attempts", "passes"), [(5, 0), (5, 1), (5, 3), (5, 5), (7, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(attempts: int, passes: int) -> None:
    outcomes = [i < passes for i in range(attempts)]
    for k in range(1, attempts + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_at_k(attempts, passes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(attempts, passes, attempts + 1) is None


def test_a_run_is_the_mean_of_its_tasks() -> None:
    found = evaluate(run_of({"a": [1, 0, 0, 1], "b": [0, 0], "c": [1, 1, 0.5]}), k=(1, 3))
    assert found.pass_at[1].value == pytest.approx((0.5 + 0 + 2 / 3) / 3)
    assert found.pass_at[3].value == pytest.approx(1.0)
    assert (found.pass_at[3].tasks, found.too_few) == (2, {1: 0, 3: 1})
    assert found.mean.value == pytest.approx((0.5 + 0 + 2.5 / 3) / 3)
    assert [(t.task, t.attempts, t.passes) for t in found.tasks] == [("a", 4, 2), ("b", 2, 0), ("c", 3, 2)]
    lower = evaluate(run_of({"c": [1, 1, 0.5]}), threshold=0.5)
    assert lower.pass_at[1].value == 1.0


def test_an_attempt_that_nobody_scored_is_no_zero() -> None:
    found = evaluate(run_of({"a": [1, None, 1], "b": [0, 0]}))
    assert found.pass_at[1].value == 0.5
    assert (found.executions, found.unscored) == (5, {"no_score": 1})


def test_tasks_that_pass_or_fail_have_wilsons_interval() -> None:
    at = evaluate(run_of({f"t{i}": [float(i < 8)] for i in range(10)})).pass_at[1]
    # Wilson (1927) for 8 of 10 at 95 %, as published tables give it.
    assert (at.method, round(at.low or 0, 4), round(at.high or 0, 4)) == ("wilson", 0.4902, 0.9433)
    sure = evaluate(run_of({f"t{i}": [1.0] for i in range(10)})).pass_at[1]
    assert (round(sure.low or 0, 4), sure.high) == (0.7225, pytest.approx(1.0))


def test_other_tasks_have_a_bootstrap_interval_that_is_the_same_each_time() -> None:
    run = run_of({f"t{i}": [float(j < i % 5) for j in range(4)] for i in range(20)})
    at = evaluate(run).pass_at[1]
    assert at.method == "bootstrap"
    # The normal interval of the mean of 20 values 0, 1/4, ..., 1 is 0.5 +- 0.155.
    assert (at.low, at.high) == (pytest.approx(0.345, abs=0.03), pytest.approx(0.655, abs=0.03))
    assert evaluate(run).pass_at[1] == at


def test_one_task_has_no_interval() -> None:
    at = evaluate(run_of({"a": [1, 0]})).pass_at[1]
    assert (at.value, at.low, at.high, at.method, at.tasks) == (0.5, None, None, None, 1)


def test_two_runs_are_compared_task_by_task() -> None:
    """Tasks differ far more than the runs: unpaired, the intervals overlap; paired, the gain is certain."""
    first = evaluate(run_of({f"t{i}": [float(j < i) for j in range(10)] for i in range(9)}))
    second = evaluate(run_of({f"t{i}": [float(j < i + 1) for j in range(10)] for i in range(9)} | {"new": [1.0]}))
    found = compare(first, second)
    assert (found.tasks, found.only_first, found.only_second, found.better, found.worse) == (9, 0, 1, 9, 0)
    gap = found.pass_at[1]
    assert gap.value == pytest.approx(0.1)
    assert gap.low == pytest.approx(0.1)
    assert (first.pass_at[1].high or 0) > (second.pass_at[1].low or 1)
    with pytest.raises(DataError, match="both hold, got none in common"):
        compare(first, evaluate(run_of({"x": [1.0]})))


def test_each_task_counts_with_its_own_difference() -> None:
    first = evaluate(run_of({"a": [0.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 1.0]}), k=(1, 2))
    second = evaluate(run_of({"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 1.0]}), k=(1, 2))
    found = compare(first, second).pass_at
    assert {k: at.value for k, at in found.items()} == {1: pytest.approx((1 + 0.5 + 0) / 3), 2: pytest.approx(1 / 3)}
    assert found[1].low == 0
    assert found[1].high == 1


def test_a_live_run_is_told_by_the_version_that_an_execution_began_under(tmp_path: Path) -> None:
    """Weights that are refreshed in the middle of an execution do not change whose it is."""
    run = Forest()
    for policy, n, scores in (("base", 0, (0, 0, 1, 0)), ("rl", 10, (1, 1)), ("rl", 2, (1, 0)), ("rl", 11, (None,))):
        for number, score in enumerate(scores):
            one = run.execution(task=f"t{number % 2}", score=score, dispatch_policy_id=policy, dispatch_version=n)
            one.call(version=("rl", 99))
    run.execution(task="t0", score=1)
    found = evaluate(run).versions
    assert [one.version for one in found] == ["base:0", "rl:2", "rl:10", None]
    passed = [[(t.task, t.passes, t.attempts) for t in one.tasks] for one in found]
    assert passed[0] == [("t0", 1, 2), ("t1", 0, 2)]
    assert passed[1:] == [[("t0", 1, 1), ("t1", 0, 1)], [("t0", 1, 1), ("t1", 1, 1)], [("t0", 1, 1)]]
    run.write(tmp_path / "r")
    told = CliRunner().invoke(app, ["eval", str(tmp_path / "r"), "-k", "1,2", "--by", "version"]).output.splitlines()
    assert told[1] == "  left out, not counted as zero: no_score 1"
    assert told[2] == "  version  scored  tasks  mean   pass@1                pass@2"
    assert told[3] == "  base:0   4       2      0.25   25.0% [0%, 50%]       50.0% [9%, 91%]"
    assert told[5] == "  rl:10    2       2      1      100.0% [34%, 100%]    -"
    assert told[6] == "  unknown  1       1      1      100.0%                -"
    assert told[7].startswith("  pass@1   ")
    assert told[-1].endswith("--by version")
    as_json = CliRunner().invoke(app, ["eval", str(tmp_path / "r"), "--json"]).output
    assert [one["version"] for one in json.loads(as_json)["versions"]] == ["base:0", "rl:2", "rl:10", None]


def test_the_command(tmp_path: Path) -> None:
    for name, gain in (("a", 0), ("b", 1)):
        run_of({f"t{i}": [float(j < i + gain) for j in range(4)] + [None] for i in range(3)}).write(tmp_path / name)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    told = CliRunner().invoke(app, ["eval", a, "-k", "1,4,8", "--by", "task"]).output
    assert f"{a}: 12 of 15 executions scored by check; 3 tasks" in told
    assert "left out, not counted as zero: no_score 3" in told
    assert "pass@8   -  no task has as many scored attempts" in told
    assert "pass@1   25.0%  [" in told
    assert "95 % bootstrap over 3 tasks" in told
    assert "t2    2/4     0.5    50.0%     100.0%    -" in told
    assert f"next: gyre eval {a} OTHER_RUN" in told
    both = CliRunner().invoke(app, ["eval", a, b]).output
    assert f"{b} minus {a}, paired by task: 3 tasks" in both
    assert "pass@1   +25.0%  [" in both
    assert "better in 3 tasks, worse in 0, equal in 0" in both
    assert json.loads(CliRunner().invoke(app, ["eval", a, b, "--json"]).output)["pass_at"]["1"]["value"] == 0.25
    assert max(map(len, told.splitlines() + both.splitlines())) <= 80 + len(a) + len(b)


def test_wrong_use_says_what_to_do(tmp_path: Path) -> None:
    run = run_of({"a": [None]})
    with pytest.raises(DataError, match=r"wanted scored executions .* got none \(no_score 1\)"):
        evaluate(run)
    with pytest.raises(ConfigError, match="wanted k of at least 1, got 0"):
        evaluate(run, k=(0,))
    run.write(tmp_path / "r")
    wrong = (
        (["-k", "x"], "wanted numbers of attempts"),
        (["--by", "role"], "--by: wanted task or version, got 'role'"),
    )
    for words, message in wrong:
        assert message in str(CliRunner().invoke(app, ["eval", str(tmp_path / "r"), *words]).exception)
