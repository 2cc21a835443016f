"""The same forest read from memory and from a folder that the real writer made."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gyre_data as gd
from tests.support.forest import Forest


def made() -> Forest:
    run = Forest()
    for value in (0.0, 1.0):
        e = run.execution(group="g", score=value)
        e.retry(e.call(after=e.call()))
    return run


def test_trees_and_admission_are_the_same_from_disk(tmp_path: Path) -> None:
    run = made()
    stored = run.write(tmp_path / "run")
    in_memory, on_disk = gd.admit(run), gd.admit(stored)
    assert [e.execution_id for e in on_disk.executions] == [e.execution_id for e in in_memory.executions]
    for a, b in zip(in_memory.executions, on_disk.executions, strict=True):
        assert (a.reward, a.advantage, a.score_ids, a.trajectories) == (
            b.reward,
            b.advantage,
            b.score_ids,
            b.trajectories,
        )
        assert a.tree.node_id == b.tree.node_id
        assert all(np.array_equal(a.tree.ids(i), b.tree.ids(i)) for i in range(len(a.tree)))


def test_score_takes_the_lock_of_a_run_for_one_row(tmp_path: Path) -> None:
    run = made()
    stored = run.write(tmp_path / "run")
    execution = stored["c0605"]
    gd.score(stored, execution, 0.75, evaluator="check@2", partial=True)
    stored.refresh()
    last = stored[execution.execution_id].scores[-1]
    assert (last.evaluator, last.evaluator_version, last.value, last.partial) == ("check", "2", 0.75, True)
