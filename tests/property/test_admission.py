"""What must hold of every admission, on random runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data.admission import Admission, Count, admit
from gyre_data.eligible import eligibility
from gyre_data.reasons import REASONS, Reason
from gyre_data.schema import AgentRole, CallStatus, ScoreStatus
from tests.support.forest import Forest, forests

few = settings(max_examples=20, deadline=None)
CHECK = {"check": 1.0}


def told(admission: Admission) -> list[Any]:
    """An admission as plain values, by node ids."""
    return [
        (e.execution_id, e.reward, e.advantage, e.score_ids, e.num_owned,
         [(t.index, t.role, [e.tree.node_id[i] for i in t.path], [e.tree.node_id[i] for i in t.owned])
          for t in e.trajectories])
        for e in admission.executions
    ]  # fmt: skip


@few
@given(forests(), st.integers(1, 4), st.booleans())
def test_ownership(run: Forest, j_max: int, need_score: bool) -> None:
    admission = admit(run, j_max=j_max, evaluators=CHECK, need_score=need_score)
    for e in admission.executions:
        owners = Counter(i for t in e.trajectories for i in t.owned)
        assert set(owners.values()) == {1}
        assert e.num_owned == sum(int(e.tree.num_tokens_N[i]) for i in owners) >= 1
        assert len(e.trajectories) <= j_max
        ranks = [list(AgentRole).index(t.role) for t in e.trajectories]
        assert ranks == sorted(ranks)
        seen: set[int] = set()
        for t in e.trajectories:
            assert t.path == tuple(e.tree.path(t.leaf).tolist())
            assert t.num_owned == sum(int(e.tree.num_tokens_N[i]) for i in t.owned)
            assert t.owned
            # The owner is the first kept trajectory that holds the node.
            assert set(t.owned).isdisjoint(seen)
            seen |= set(t.path)
        # What may be trained and lies on a kept trajectory has an owner.
        trainable = set(np.flatnonzero(eligibility(e.tree, need_logprobs=need_score).trainable_N).tolist())
        assert seen & trainable == set(owners)


@few
@given(forests(), st.integers(1, 5))
def test_each_row_counts_in_per_row(run: Forest, j_max: int) -> None:
    once, rows = (admit(run, j_max=j_max, need_score=False, count=count) for count in _COUNTS)
    assert [e.execution_id for e in once.executions] == [e.execution_id for e in rows.executions]
    for a, b in zip(once.executions, rows.executions, strict=True):
        assert a.num_owned <= b.num_owned
        assert {i for t in a.trajectories for i in t.owned} <= {i for t in b.trajectories for i in t.path}
        for t in b.trajectories:
            assert set(t.owned) <= set(t.path)


_COUNTS: tuple[Count, ...] = ("once", "per_row")


@few
@given(forests(), st.integers(1, 4))
def test_j_max_is_monotone(run: Forest, j_max: int) -> None:
    small, large = (admit(run, j_max=j, need_score=False) for j in (j_max, j_max + 1))
    for a, b in zip(small.executions, large.executions, strict=True):
        assert a.trajectories == b.trajectories[: len(a.trajectories)]
    assert small.num_owned <= large.num_owned


@few
@given(forests(), st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_matter(run: Forest, seed: int) -> None:
    one, other = admit(run, evaluators=CHECK), admit(run.shuffled(seed), evaluators=CHECK)
    assert told(one) == told(other)
    assert one.excluded == other.excluded
    assert told(one) == told(admit(run, evaluators=CHECK))


@few
@given(
    forests(), st.sampled_from(["failed", "aborted", "undelivered", "unknown", "side", "no_role"]), st.integers(0, 99)
)
def test_adding_an_ineligible_call_changes_nothing(run: Forest, kind: str, pick: int) -> None:
    before = admit(run, evaluators=CHECK)
    if not before.executions:
        return
    e = before.executions[pick % len(before.executions)]
    eligible = [i for t in e.trajectories for i in t.owned]
    more: dict[str, Any] = {
        "failed": {"status": CallStatus.FAILED},
        "aborted": {"status": CallStatus.ABORTED},
        "undelivered": {"delivery": "undelivered"},
        "unknown": {"delivery": None},
        "side": {"role": "side"},
        "no_role": {"role": "unknown"},
    }[kind]
    builder = _builder(run, e.execution_id)
    builder.call(after=e.tree.node_id[eligible[pick % len(eligible)]], output=50, **more)
    assert told(admit(run, evaluators=CHECK)) == told(before)


def _builder(run: Forest, execution_id: str) -> Any:
    from tests.support.forest import ExecutionBuilder

    nodes = {row.node_id: row for row in run.rows["nodes"] if row.execution_id == execution_id}
    return ExecutionBuilder(run=run, execution_id=execution_id, nodes=nodes)


@few
@given(forests())
def test_everything_left_out_has_a_reason(run: Forest) -> None:
    admission = admit(run, evaluators=CHECK)
    admitted = {e.execution_id for e in admission.executions}
    out = Counter(x.execution_id for x in admission.excluded if x.call_id is None and x.node_id is None)
    assert admitted | set(out) == {row.execution_id for row in run.rows["executions"]}
    assert admitted.isdisjoint(out)
    assert set(out.values()) <= {1}
    for x in admission.excluded:
        named = {"execution": (False, False), "call": (True, False), "trajectory": (False, True)}
        assert (x.call_id is not None, x.node_id is not None) == named[REASONS[x.reason].level]
        assert len(x.detail.split()) > 1 or x.reason in (Reason.CALL_FAILED, Reason.CALL_ABORTED)
    owned = {e.tree.node_id[i] for e in admission.executions for t in e.trajectories for i in t.owned}
    named = {x.call_id for x in admission.excluded if x.call_id}
    beyond = any(x.node_id for x in admission.excluded)
    for call in run.rows["calls"]:
        if call.execution_id in admitted and not beyond:
            assert (call.output_node in owned) != (call.call_id in named)


@few
@given(forests(), st.sampled_from(["failed", "skipped", None]), st.integers(0, 99))
def test_a_missing_verdict_is_never_a_zero(run: Forest, status: str | None, pick: int) -> None:
    before = admit(run, evaluators=CHECK)
    if not before.executions:
        return
    gone = before.executions[pick % len(before.executions)]
    rows = run.rows["scores"]
    lost = [row for row in rows if row.execution_id == gone.execution_id]
    run.rows["scores"] = [row for row in rows if row.execution_id != gone.execution_id]
    run.rows["scores"] += [replace(row, status=ScoreStatus(status), value=None) for row in lost if status is not None]
    after = admit(run, evaluators=CHECK)
    assert gone.execution_id not in {e.execution_id for e in after.executions}
    values = [e.reward for e in before.executions if e.group_id == gone.group_id and e is not gone]
    (group,) = (g for g in after.groups if g.group_id == gone.group_id)
    assert group.num_valid == len(values)
    assert group.mean == (pytest.approx(np.mean(values)) if values else None)
    (why,) = (x for x in after.excluded if x.execution_id == gone.execution_id and not (x.call_id or x.node_id))
    assert why.reason == (Reason.EVALUATOR_FAILED if status == "failed" else Reason.NO_SCORE)


@few
@given(forests(), st.integers(0, 99))
def test_an_execution_that_contradicts_itself_does_not_stop_the_others(run: Forest, pick: int) -> None:
    before = admit(run, need_score=False)
    if not before.executions:
        return
    bad = before.executions[pick % len(before.executions)]
    node_id = bad.tree.node_id[bad.trajectories[0].leaf]
    run.rows["nodes"] = [
        replace(row, start_pos=row.start_pos + 1) if row.node_id == node_id else row for row in run.rows["nodes"]
    ]
    after = admit(run, need_score=False)
    assert told(after) == [one for one in told(before) if one[0] != bad.execution_id]
    (why,) = (x for x in after.excluded if x.execution_id == bad.execution_id)
    assert why.reason is Reason.INCONSISTENT
    assert node_id in why.detail


rewards = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6)


@few
@given(rewards, st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_group_statistics_are_over_executions(values: list[float], branches: list[int]) -> None:
    run = Forest()
    for value, number in zip(values, branches, strict=False):
        e = run.execution(group="g", score=value)
        a = e.call()
        for _ in range(number):
            e.call(after=a)
    admission = admit(run)
    (group,) = admission.groups
    assert group.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert group.std == pytest.approx(np.std(values), abs=1e-12)
    by_id = {e.execution_id: e for e in admission.executions}
    assert len(by_id) == len(values)
    for e in admission.executions:
        assert e.advantage == pytest.approx((e.reward - np.mean(values)) / (np.std(values) + 1e-6), abs=1e-9)
    assert sum(e.advantage for e in admission.executions) == pytest.approx(0, abs=1e-6)


@few
@given(st.floats(-1e3, 1e3), st.integers(2, 16), st.sampled_from(["std", "none"]))
def test_equal_rewards_give_no_advantage(value: float, number: int, scale: Any) -> None:
    run = Forest()
    for _ in range(number):
        run.execution(group="g", score=value).call()
    assert [e.advantage for e in admit(run, scale=scale).executions] == [0.0] * number
    dropped = admit(run, drop_zero_variance=True)
    assert not dropped.executions
    assert dropped.counts()["executions"] == {"zero_variance": number}
