"""Verdicts: the order of commits decides, many at once from a file, and nothing is ever a zero by default."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

import gyre_data as gd
from gyre_data.errors import ConfigError, DataError
from gyre_data.listing import list_executions
from gyre_data.scores import latest_scored, scores_by_execution
from tests.support.busy_case import busy_case
from tests.support.command import gyre, out
from tests.support.forest import START, Forest


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    busy_case().write(Path("runs/a"))
    return Path("runs/a")


def raised(*arguments: object) -> BaseException:
    return gyre(*arguments).exception or AssertionError("nothing was raised")


def test_the_verdict_written_last_counts_whatever_its_clock_says(tmp_path: Path) -> None:
    run = Forest()
    for value in (0.0, 1.0):
        e = run.execution(group="g", score=value)
        e.call()
    # Its evaluator changed its mind after the clock of the machine was set back by a day.
    late = replace(e.score(0.25), at=START - timedelta(days=1), score_id="s_0")
    equal = replace(late, value=0.75, score_id="s_00000")
    run.rows["scores"][-1:] = [late, equal]
    rows = scores_by_execution(run)[e.execution_id]
    assert [row.value for row in rows] == [1.0, 0.25, 0.75]
    for name in ("check", "check@1"):
        last = latest_scored(rows, name)
        assert last is not None
        assert last.score_id == equal.score_id
    found = {x.execution_id: x for x in gd.admit(run).executions}[e.execution_id]
    assert (found.reward, found.score_ids) == (0.75, (equal.score_id,))
    opened = run.write(tmp_path / "r")
    assert [s.score for s in list_executions(opened)] == [0.0, 0.75]
    assert [value for (value,) in opened.sql("select value from scores where counts order by 1")] == [0.0, 0.75]


def test_several_evaluators_each_by_its_own_last_verdict() -> None:
    run = Forest()
    for number in range(2):
        e = run.execution(f"e_{number}", group="g")
        e.call()
        e.score(number, evaluator="tests", version="1")
        e.score(0.5, evaluator="style", version="1")
        e.score(1 - number, evaluator="tests", version="2")
        e.score(None, evaluator="style", version="2", status="failed")
    weighted = gd.admit(run, evaluators={"tests": 1.0, "style": 2.0}).executions
    assert [x.reward for x in weighted] == [2.0, 1.0]
    assert [x.reward for x in gd.admit(run, evaluators={"tests@1": 1.0}).executions] == [0.0, 1.0]
    left_out = gd.admit(run, evaluators={"style@2": 1.0})
    assert not left_out.executions
    assert left_out.counts()["executions"] == {"evaluator_failed": 2}
    with pytest.raises(ConfigError, match=r"the runs hold style, tests; .* --evaluator style"):
        gd.admit(run)


def test_a_run_takes_verdicts(runs: Path) -> None:
    run = gd.open(runs)
    one = run.score("0aaa", 0.5, evaluator="pytest@3", partial=True)
    two = gd.score(run, run["0aaa"], 0.75, evaluator="pytest@4")
    run.refresh()
    assert [s.score_id for s in run["0aaa"].scores[-2:]] == [one.score_id, two.score_id]
    with pytest.raises(DataError, match="no execution starts with it"):
        run.score("9", 0.5, evaluator="x")
    with pytest.raises(DataError, match="3 executions start with it"):
        gd.score(runs, "e_0", 0.5, evaluator="x")


def test_score_skipped_negative_and_json(runs: Path) -> None:
    told = out("score", runs, "0aaa", "-0.5").splitlines()
    assert told[0] == "e_0aaa00000001: -0.5 by manual"
    assert told[-1] == f"is it trained: gyre explain {runs} e_0aaa00000001 --evaluator manual"
    assert "skipped by lint@2" in out("score", runs, "0aaa", "--skipped", "--evaluator", "lint@2", "--detail", "no C")
    (row,) = json.loads(out("score", runs, "0aaa", "1", "--state", "st_1", "--json"))
    assert (row["value"], row["state_id"], row["partial"], row["status"]) == (1.0, "st_1", None, "scored")
    negative, skipped, last = gd.open(runs)["0aaa"].scores[-3:]
    assert (negative.value, skipped.status, skipped.value, skipped.detail) == (-0.5, "skipped", None, "no C")
    assert last.score_id == row["score_id"]
    for words, told in (
        (["0aaa", "--failed", "--skipped"], "got both"),
        (["0aaa", "1", "--skipped"], "wanted no value on a skipped row"),
        ([], "--from FILE"),
        (["0aaa", "1", "--from", "v.jsonl"], "--from FILE"),
        (["--from", "v.jsonl", "--failed"], "write it into the file"),
        (["--from", "none.jsonl"], "wanted a file of verdicts"),
    ):
        with pytest.raises(ConfigError, match=told):
            raise raised("score", runs, *words)


def test_many_verdicts_from_a_file(runs: Path) -> None:
    lines = [
        {"execution": "0aaa", "value": 0, "evaluator": "pytest@4", "detail": {"passed": 0}},
        {"execution": "e_0bbb00000002", "value": 0.5, "partial": True},
        {"execution": "0ccc", "value": None, "status": "failed", "detail": "timed out"},
    ]
    Path("v.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    before = gd.open(runs).table("scores").num_rows
    told = out("score", runs, "--from", "v.jsonl", "--evaluator", "judge@1")
    assert told.splitlines() == [
        "e_0aaa00000001: 0 by pytest@4",
        "e_0bbb00000002: 0.5 partial by judge@1",
        "e_0ccc00000003: failed by judge@1",
        "3 verdicts; next: gyre stats runs/a --by evaluator",
    ]
    run = gd.open(runs)
    assert run.table("scores").num_rows == before + 3
    assert run["0aaa"].scores[-1].detail == '{"passed": 0}'
    assert run["0ccc"].scores[-1].value is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"execution": "0aaa", "valeu": 1}', "unknown key 'valeu'; nearest value"),
        ('{"execution": "0aaa", "zzz": 1}', "unknown key 'zzz'; known: execution, value"),
        ('{"value": 1}', "wanted the key execution"),
        ('{"execution": "0aaa"}', "got no value"),
        ('{"execution": "0aaa", "value": NaN}', "not a number"),
        ('{"execution": "0aaa", "value": true}', "wanted int or float for value, got True"),
        ('{"execution": "0aaa", "value": "1"}', "wanted int or float for value, got '1'"),
        ('{"execution": "9", "value": 1}', "no execution starts with it"),
        ('{"execution": "0aaa", "value": 1, "status": "odd"}', "'odd' is not a valid"),
        ("[1]", "wanted a JSON object"),
        ("{", "line 2"),
    ],
)
def test_a_file_with_a_bad_line_writes_nothing(runs: Path, line: str, told: str) -> None:
    Path("v.jsonl").write_text(f'{{"execution": "0aaa", "value": 1}}\n{line}\n')
    before = gd.open(runs).table("scores").num_rows
    with pytest.raises(ConfigError, match=r"v\.jsonl, line 2: ") as caught:
        raise raised("score", runs, "--from", "v.jsonl")
    assert told in str(caught.value)
    assert gd.open(runs).table("scores").num_rows == before
