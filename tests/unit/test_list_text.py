"""`gyre ls`: states of executions, and what a narrow terminal leaves out."""

from __future__ import annotations

from pathlib import Path

import gyre_data as gd
from gyre_data.listing import list_executions
from gyre_data.show.list_text import execution_list
from tests.support.forest import Forest


def made() -> Forest:
    run = Forest()
    run.execution("e_0aaa00000001", group="g-task", task="task", sample_index=0, score=0.5).call()
    run.execution("e_0bbb00000002", group="g-task", task="task", sample_index=1, end=None).call(status="failed")
    run.execution("e_0ccc00000003", group="g-task", task="task", sample_index=2, end=None)
    return run


def test_an_execution_without_a_call_is_queued(tmp_path: Path) -> None:
    run = made().write(tmp_path / "a")
    assert [e.state for e in list_executions(run)] == ["ended", "interrupted", "queued"]
    with gd.RunWriter(tmp_path / "a"):
        assert [e.state for e in list_executions(gd.open(tmp_path / "a"))] == ["ended", "running", "queued"]


def test_columns_are_left_out_before_an_id_is_cut(tmp_path: Path) -> None:
    found = list_executions(made().write(tmp_path / "a"))
    wide = [line.plain for line in execution_list(found, where="a", width=120)]
    assert wide[0].split() == ["execution", "task", "state", "score", "(check)", "calls", "tokens", "sampled", "group"]
    assert wide[1].split() == ["e_0aaa00000001", "task", "#0", "finished", "0.50", "1", "9", "4", "g-task"]
    assert wide[2].split()[3:6] == ["interrupted", "-", "1"]
    narrow = [line.plain for line in execution_list(found, where="a", width=30)]
    assert narrow[1] == "e_0aaa00000001  task #0"
    assert narrow[4] == "not shown for want of room: state, score (check), calls, tokens, sampled, group"
    assert [line.plain for line in execution_list([], where="a")] == ["a holds no execution yet"]
