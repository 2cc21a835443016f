"""`stats` counts what its definitions say."""

from __future__ import annotations

import json

import pytest

from gyre_data.counts import count_tree
from gyre_data.run_stats import stats
from gyre_data.tree import Tree
from tests.support.forest import Forest
from tests.support.published_case import CALLS, MESSAGE_NODES, OCCURRENCES, TRAJECTORIES, published_case


def test_the_published_case() -> None:
    found = stats(published_case()).trees
    assert (found.calls, found.message_nodes, found.trajectories) == (CALLS, MESSAGE_NODES, TRAJECTORIES)
    assert (found.occurrences, found.repeats) == (OCCURRENCES, OCCURRENCES - MESSAGE_NODES)
    assert found.trajectory_message_nodes == MESSAGE_NODES
    assert found.sharing_messages == pytest.approx(1.27, abs=0.005)
    assert found.trajectories_kept == 5
    assert (found.calls_failed, found.forks["retry"]) == (4, 4)


def small() -> Forest:
    run = Forest()
    e = run.execution(group="g1", task="t", end="finished", score=0.5)
    a = e.call(new=[("system", 5), ("user", 3)], version=("run", 1))
    b = e.call(after=a, new=[("tool", 6)], output=2, version=("run", 2))
    edited = {"extension": "fork", "branch_reason": "context_rewrite", "echo_difference": "arguments"}
    e.call(after=a, new=[("tool", 7)], output=2, version=None, **edited)
    false = {"extension": "fork", "branch_reason": "template", "fork_check": "V4: not closed", "tokens_lost": 11}
    e.call(after=a, new=[("tool", 8)], output=2, **false)
    e.call(after=b, new=[("tool", 1)], output=3, delivery="undelivered")
    e.call(new=[("user", 1)], output=9, role="side", delivery=None)
    return run


def test_nodes_and_tokens() -> None:
    run = small()
    found = count_tree(Tree.load(run, run.rows["executions"][0].execution_id))
    assert (found.nodes, found.message_nodes) == (19, 13)
    assert found.trajectories == 3
    assert (found.trajectory_message_nodes, found.occurrences, found.repeats) == (9, 15, 6)
    shared = 5 + 3 + 2 + 4
    assert (found.trajectory_nodes, found.node_occurrences) == (9 + 4, 15 + 6)
    assert found.sharing_nodes == pytest.approx(21 / 13)
    assert found.trajectory_tokens == shared + (6 + 2 + 2) + (7 + 2 + 2) + (8 + 2 + 2)
    assert found.expanded_tokens == found.trajectory_tokens + 2 * shared
    assert found.distinct_tokens == found.trajectory_tokens + (1 + 2 + 3) + (1 + 2 + 9)
    assert found.sampled_tokens == 4 + 2 + 2 + 2 + 3 + 9
    assert found.trainable_tokens == found.kept_tokens == 4 + 2 + 2 + 2
    assert found.version_tokens == {"run:1": 4, "run:2": 2, "base:0": 2 + 3 + 9, "unknown": 2}
    assert found.role_tokens == {"main": found.distinct_tokens - 12, "side": 12}
    assert found.author_tokens == {"client": found.distinct_tokens - 22 - 12, "policy": 22, "template": 12}
    assert sorted(found.trajectory_lengths) == [shared + 10, shared + 11, shared + 12]
    assert found.not_trained == {"undelivered": 1, "role_side": 1}


def test_false_forks_are_counted_apart_from_real_ones() -> None:
    found = stats(small()).trees
    assert (found.false_forks, found.false_fork_tokens, found.turns) == (1, 11, 6)
    assert found.false_fork_rate == pytest.approx(1 / 6)
    assert found.false_fork_checks == {"V4": 1}
    assert found.forks == {"context_rewrite": 1}
    assert found.changed_echoes == {"arguments": 1}
    told = json.loads(json.dumps(stats(small()).to_json()))
    assert (told["false_fork_rate"], told["false_fork_checks"]) == (pytest.approx(1 / 6), {"V4": 1})
    assert stats(Forest()).trees.false_fork_rate is None


def test_executions_and_evaluators() -> None:
    run = small()
    failing = run.execution(group="g1", end="crashed")
    failing.score(None, status="failed", detail="timed out")
    run.execution(group="g2", end=None)
    run.execution(end="finished")
    found = stats(run)
    assert (found.executions, found.groups, found.tasks) == (4, 2, 3)
    assert found.by_state == {"scored": 1, "evaluator_failed": 1, "running": 1, "unscored": 1}
    assert found.end_reasons == {"finished": 2, "crashed": 1}
    (check,) = found.evaluators
    assert (check.evaluator, check.scored, check.failed, check.mean) == ("check@1", 1, 1, 0.5)
    assert check.first_failed_at == check.last_failed_at is not None


def test_a_verdict_that_was_given_anew_counts_once() -> None:
    run = Forest()
    one, two = run.execution(score=0.0), run.execution(score=0.5)
    one.score(1.0)
    one.score(None, status="failed")
    two.score(0.25, evaluator="style")
    check, style = stats(run).evaluators
    assert (check.scored, check.failed, check.mean, check.minimum, check.maximum) == (2, 1, 0.75, 0.5, 1.0)
    assert (style.scored, style.mean) == (1, 0.25)


def test_nothing_is_null_not_zero() -> None:
    found = stats(Forest())
    assert (found.executions, found.sharing, found.duration_p50_s, found.evaluators) == (0, None, None, ())
    assert json.loads(json.dumps(found.to_json()))["sharing"] is None


def test_runs_add_up() -> None:
    one, two = stats(small()), stats([small(), small()])
    assert two.trees.expanded_tokens == 2 * one.trees.expanded_tokens
    assert (two.executions, two.groups, two.tasks) == (2, 2, 1)
    as_json = json.loads(json.dumps(two.to_json()))
    assert as_json["forks"] == {"context_rewrite": 2}
    assert as_json["evaluators"][0]["scored"] == 2
