"""`gyre eval --rescore`: kept workspaces are judged again on copies, and verdicts are appended under their own name."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.scores import scores_by_execution
from gyre_data.store import open as open_run
from gyre_proxy.launch.rescore import rescore
from tests.support.forest import Forest

JUDGE = """
import json, os, pathlib, sys
space = pathlib.Path(sys.argv[1])
assert space == pathlib.Path(os.environ["GYRE_WORKSPACE"]) == pathlib.Path.cwd()
text = (space / "answer").read_text()
(space / "answer").write_text("spoiled by the judge")
value = {"good": 1.0, "bad": 0.0}.get(text)
told = {"end": os.environ["GYRE_END_REASON"], "task": os.environ["GYRE_TASK"]}
json.dump({"value": value, "detail": told}, open(os.environ["GYRE_SCORE_FILE"], "w"))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three kept workspaces, one that is gone, and one execution that still runs."""
    forest = Forest()
    for number, answer in enumerate(("good", "bad", "odd", None)):
        e = forest.execution(f"e_{number}", group="g", task="t", score=0.25)
        e.call()
        if answer:
            work = tmp_path / "r/workspaces" / f"e_{number}" / "work"
            work.mkdir(parents=True)
            (work / "answer").write_text(answer)
    forest.execution("e_9", end=None).call()
    forest.write(tmp_path / "r")
    (tmp_path / "judge.py").write_text(JUDGE)
    return tmp_path / "r"


def test_kept_workspaces_are_judged_again(run: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} {tmp_path / 'judge.py'} {{workspace}}"
    done = rescore(run, command, jobs=2)
    assert (done.evaluator, done.scored, list(done.failed)) == ("judge", 2, ["e_2"])
    assert "not a number: value is None" in done.failed["e_2"]
    assert done.skipped == {"no_workspace": 1, "running": 1}
    found = scores_by_execution(open_run(run))
    told = {name: [(s.evaluator, s.status, s.value) for s in rows] for name, rows in found.items()}
    assert told["e_0"] == [("check", "scored", 0.25), ("judge", "scored", 1.0)]
    assert told["e_2"] == [("check", "scored", 0.25), ("judge", "failed", None)]
    assert found["e_0"][1].detail == '{"end": "finished", "task": "t"}'
    assert run.joinpath("workspaces", "e_0", "work", "answer").read_text() == "good"  # the judge had a copy


def test_no_id_leads_out_of_the_workspaces(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "work").mkdir(parents=True)
    forest = Forest()
    forest.execution("../../elsewhere", group="g", task="t").call()
    forest.write(run)
    assert rescore(run, f"{sys.executable} -c 1 {{workspace}}").skipped == {"no_workspace": 2, "running": 1}


def test_the_command_judges_and_tells(run: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} {tmp_path / 'judge.py'} {{workspace}}"
    told = CliRunner().invoke(app, ["eval", str(run), "-k", "1,2", "--rescore", command]).output
    assert "judged again by judge: 2 scored, 1 failed" in told
    assert "e_2 failed, not counted as zero: not a number" in told
    assert "2 of 5 executions scored by judge; 1 task\n" in told
    assert "pass@1   50.0%" in told
    assert "they count in the place of what judge said of the same executions before" in told


def test_an_evaluator_that_fails_on_all_says_so_briefly(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_data.show.eval_command._FAILURES", 1)
    told = CliRunner().invoke(app, ["eval", str(run), "--rescore", f"{sys.executable} -c 'raise SystemExit(3)'"]).output
    assert told.count("failed, not counted as zero") == 1
    assert "  and 2 more failed\n" in told
    assert "they count" not in told


def test_an_evaluator_that_lies_here_is_named_by_its_full_path(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"got judge\.py, which no workspace holds; write {tmp_path}/judge\.py"):
        rescore(run, f"{sys.executable} judge.py {{workspace}}")
    assert all(row.evaluator == "check" for rows in scores_by_execution(open_run(run)).values() for row in rows)
    (run / "workspaces" / "e_0" / "work" / "judge.py").write_text(JUDGE)  # what a workspace holds is meant there
    assert rescore(run, f"{sys.executable} judge.py {{workspace}}").scored == 1


def test_a_command_that_needs_what_is_not_kept_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"wanted at most \{workspace\} and \{sample_index\}, got \{prompt\}"):
        rescore(run, "judge {prompt}")
    with pytest.raises(ConfigError, match="--rescore: wanted a command line"):
        rescore(run, " ")
