"""Cuts of the counts: by role, client and task; what they add up to is what is counted in one."""

from __future__ import annotations

import pytest

from gyre_data.breakdown import by_client, by_role, by_task
from gyre_data.run_stats import stats
from tests.support.busy_case import busy_case
from tests.support.forest import Forest


@pytest.mark.parametrize("cut", [by_role, by_client])
def test_cuts_add_up_to_the_whole(cut: object) -> None:
    runs = [busy_case(), busy_case()]
    rows = cut(runs)  # type: ignore[operator]
    whole = stats(runs).trees
    for name in ("calls", "distinct_tokens", "sampled_tokens", "trainable_tokens", "kept_tokens", "false_forks"):
        assert sum(getattr(row, name) for row in rows) == getattr(whole, name)
    assert sum(sum(row.not_trained.values()) for row in rows) == sum(whole.not_trained.values())


def test_by_client() -> None:
    run = Forest()
    for _ in range(2):
        e = run.execution(group="g")
        e.call(new=[("user", 5)], output=2, client="pi/1", fork_check="V1: x", extension="fork")
    e.call(new=[("user", 7)], output=3)
    pi, unnamed = by_client(run)
    assert (pi.name, pi.executions, pi.calls, pi.distinct_tokens, pi.false_forks) == ("pi/1", 2, 2, 18, 2)
    assert (unnamed.name, unnamed.executions, unnamed.distinct_tokens) == ("(unnamed)", 1, 12)
    assert pi.to_json("client")["client"] == "pi/1"
    assert by_client(Forest()) == []


def test_by_task() -> None:
    run = Forest()
    a = run.execution(group="g1", task="t1", score=1.0)
    a.call(output=4)
    a.score(0.0)  # the latest verdict counts
    run.execution(group="g2", task="t1", score=0.5).score(None, evaluator="style", status="failed")
    failed = run.execution(group="g3", task="t2", end="crashed")
    failed.score(None, status="failed")
    run.execution(end=None)
    one, two, none = by_task([run, Forest()])
    assert (one.task, one.groups, one.executions, one.by_state) == ("t1", 2, 2, {"scored": 2})
    assert (one.scores, one.calls, one.trainable_tokens) == ({"check": 0.25}, 1, 4)
    assert one.sharing == 1.0
    assert one.duration_p50_s is not None
    assert (two.scores, two.by_state, two.sharing) == ({}, {"evaluator_failed": 1}, None)
    assert (none.task, none.duration_p50_s) == ("(unnamed)", None)
