"""Each rule of admission by itself: what is left out, and the reason that is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gyre_data.admission import Admission, Reason, admit
from gyre_data.errors import ConfigError
from tests.support.forest import START, ExecutionBuilder, Forest


def two(**second: Any) -> tuple[Forest, ExecutionBuilder]:
    """A run of one group: a plain execution, and one to spoil."""
    run = Forest()
    run.execution("e_plain", group="g", score=1.0).call()
    return run, run.execution("e_other", group="g", **({"score": 0.0} | second))


def why(admission: Admission, execution_id: str = "e_other") -> dict[str | None, Reason]:
    return {x.call_id or x.node_id: x.reason for x in admission.excluded if x.execution_id == execution_id}


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"temperature": 0.0}, Reason.GREEDY),
        ({"temperature": None}, Reason.TEMPERATURE_UNKNOWN),
        ({"temperature": math.nan}, Reason.TEMPERATURE_UNKNOWN),
        ({"temperature": -1.0}, Reason.TEMPERATURE_UNKNOWN),
        ({"top_p": 0.95}, Reason.TOP_P),
        ({"top_k": 40}, Reason.TOP_K),
        ({"constrained": True}, Reason.CONSTRAINED),
        ({"logprobs": False}, Reason.NO_LOGPROBS),
        ({"status": "failed"}, Reason.CALL_FAILED),
        ({"status": "aborted"}, Reason.CALL_ABORTED),
        ({"output": None}, Reason.NO_OUTPUT),
        ({"role": "side"}, Reason.ROLE_SIDE),
        ({"role": "unknown"}, Reason.ROLE_UNKNOWN),
        ({"delivery": "undelivered"}, Reason.UNDELIVERED),
        ({"delivery": "abandoned"}, Reason.UNDELIVERED),
        ({"delivery": None}, Reason.DELIVERY_UNKNOWN),
    ],
)
def test_a_call_that_is_not_trained(columns: dict[str, Any], reason: Reason) -> None:
    run, e = two()
    good = e.call()
    bad = e.call(after=good, **columns)
    admission = admit(run)
    assert why(admission)[bad.id] == reason
    (other,) = (x for x in admission.executions if x.execution_id == "e_other")
    assert [other.tree.node_id[i] for t in other.trajectories for i in t.owned] == [good.output]
    assert other.num_owned == 4


def test_a_token_that_the_engine_called_impossible_is_not_trained_by_rl() -> None:
    run, e = two()
    good = e.call()
    bad = e.call(after=good)
    for place, node in enumerate(run.rows["nodes"]):
        if node.node_id == bad.output:
            logprobs = np.array([-1.0, -np.inf, -1.0, -1.0], np.float32)
            run.rows["nodes"][place] = replace(node, logprobs=logprobs)
    assert why(admit(run))[bad.id] == Reason.LOGPROB_NOT_FINITE
    assert [x.num_owned for x in admit(run, need_score=False).executions] == [8, 4]


def test_sampling_settings_do_not_matter_to_sft_and_may_be_allowed() -> None:
    run, e = two()
    e.call(temperature=0.0)
    e.call(logprobs=False)
    assert [x.num_owned for x in admit(run, need_score=False).executions] == [8, 4]
    assert admit(run).executions == ()
    assert [x.num_owned for x in admit(run, allow=["greedy"]).executions] == [4, 4]


def test_unknown_or_undelivered_counts_when_something_later_rests_on_it() -> None:
    run, e = two()
    a = e.call(delivery=None)
    b = e.call(after=a, delivery="undelivered", new=[("tool", 2)])
    e.call(new=[("user", 5)], branch_reason="compaction", extension="fork", continues_from=b.id)
    admission = admit(run)
    assert set(why(admission)) == set()
    owned = next(x for x in admission.executions if x.execution_id == "e_other").num_owned
    assert owned == 12


def test_a_sub_agent_that_runs_shows_that_the_call_which_started_it_arrived() -> None:
    run, e = two()
    a = e.call(delivery=None)
    e.call(role="sub_agent", spawned_by_node=a.output, branch_reason="sub_agent")
    assert why(admit(run)) == {}


def test_of_two_delivery_rows_the_later_one_counts() -> None:
    run, e = two()
    a, b = e.call(delivery="undelivered"), e.call(delivery="delivered")
    e.deliver(a, "delivered")
    e.deliver(b, "abandoned")
    run.rows["deliveries"].reverse()
    assert why(admit(run)) == {b.id: Reason.UNDELIVERED}
    run.rows["deliveries"] = [replace(row, at=START) for row in run.rows["deliveries"]]
    assert why(admit(run)) == {}


def test_a_copied_tail_shows_that_the_turn_arrived_and_is_not_trained_again() -> None:
    run, e = two()
    a = e.call(delivery="undelivered")
    e.call(new=[("user", 5), ("assistant", 4, {"copy_of": a.output})])
    (other,) = (x for x in admit(run).executions if x.execution_id == "e_other")
    assert other.num_owned == 8


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"end": "infra_fault"}, Reason.INFRA_FAULT),
        ({"score": None}, Reason.NO_SCORE),
        ({"group": None}, Reason.NO_GROUP),
    ],
)
def test_an_execution_that_is_not_trained(how: dict[str, Any], reason: Reason) -> None:
    run = Forest()
    for name in ("e_1", "e_2"):
        run.execution(name, group="g", score=1.0).call()
    run.execution("e_other", **({"group": "g", "score": 0.0} | how)).call()
    admission = admit(run)
    assert [e.execution_id for e in admission.executions] == ["e_1", "e_2"]
    assert why(admission) == {None: reason}
    assert admission.counts()["executions"] == {reason.value: 1}


def test_an_execution_without_calls_or_without_trainable_tokens() -> None:
    run, e = two()
    assert why(admit(run))[None] == Reason.NO_CALLS
    side = e.call(role="side")
    assert why(admit(run)) == {None: Reason.NO_ELIGIBLE_OUTPUT, side.id: Reason.ROLE_SIDE}
    greedy = e.call(temperature=0.0)
    assert {why(admit(run))[None], why(admit(run))[greedy.id]} == {Reason.NOTHING_TRAINABLE, Reason.GREEDY}
    # One valid score is left, so the group is dropped.
    assert why(admit(run), "e_plain") == {None: Reason.GROUP_TOO_SMALL}
    (group,) = admit(run).groups
    assert (group.reason, group.num_executions, group.num_valid) == (Reason.GROUP_TOO_SMALL, 2, 1)


def test_a_group_waits_for_its_running_members() -> None:
    """Its mean would change with every member that ends, after the others were trained on."""
    run = Forest()
    for name, score in (("e_1", 1.0), ("e_2", 0.0), ("e_other", 1.0)):
        run.execution(name, group="g", score=score, **({"end": None} if name == "e_other" else {})).call()
    admission = admit(run)
    assert admission.executions == ()
    assert admission.counts()["executions"] == {"running": 1, "group_running": 2}
    assert [group.reason for group in admission.groups] == [Reason.GROUP_RUNNING]
    assert len(admit(run, include_running=True).executions) == 3
    assert len(admit(run, need_score=False).executions) == 2


def test_running_executions_can_be_asked_for() -> None:
    run, e = two(end=None)
    e.call()
    assert len(admit(run, include_running=True).executions) == 2


def test_roles_come_before_size_and_j_max_cuts_the_rest() -> None:
    run, e = two()
    sub = e.call(role="sub_agent", output=90)
    summary = e.call(role="main_summary", output=10)
    small = e.call(output=3)
    large = e.call(output=5)
    admission = admit(run, j_max=3)
    (other,) = (x for x in admission.executions if x.execution_id == "e_other")
    leaves = [other.tree.node_id[t.leaf] for t in other.trajectories]
    assert leaves == [large.output, small.output, summary.output]
    assert why(admission) == {sub.output: Reason.BEYOND_J_MAX}
    only_sub = admit(run, role_order=["sub_agent"], need_score=False)
    assert [t.role for t in only_sub.executions[0].trajectories] == ["sub_agent"]
    assert why(only_sub)[summary.output] == Reason.ROLE_NOT_WANTED


def test_most_unowned_tokens_first_is_counted_anew_after_each_choice() -> None:
    run, e = two()
    shared = e.call(output=10)
    first = e.call(after=shared, output=5)
    second = e.call(after=shared, output=4)
    alone = e.call(output=6)
    (other,) = (x for x in admit(run).executions if x.execution_id == "e_other")
    leaves = [other.tree.node_id[t.leaf] for t in other.trajectories]
    assert leaves == [first.output, alone.output, second.output]
    assert [t.num_owned for t in other.trajectories] == [15, 6, 4]


def test_an_execution_cut_in_mid_call_keeps_its_main_trajectory_up_to_the_last_good_output() -> None:
    run, e = two(end="overall_timeout")
    last = e.call(after=e.call())
    e.call(after=last, status="aborted", output=2, delivery=None)
    (other,) = (x for x in admit(run).executions if x.execution_id == "e_other")
    assert [other.tree.node_id[t.leaf] for t in other.trajectories] == [last.output]


def test_rewards() -> None:
    run, e = two(score=None)
    e.call()
    e.score(0.25, partial=True)
    latest = e.score(0.5)
    e.score(None, status="failed", detail="crashed")
    style = e.score(0.1, evaluator="style", version="2")
    run.rows["scores"].append(run.rows["scores"].pop(0))
    with pytest.raises(ConfigError, match="the runs hold check, style; set evaluators"):
        admit(run)
    (plain, other) = sorted(admit(run, evaluators={"check": 1.0}).executions, key=lambda x: -(x.reward or 0))
    assert (other.reward, other.score_ids, other.partial) == (0.5, (latest.score_id,), False)
    both = admit(run, evaluators={"check": 2.0, "style@2": -1.0})
    assert why(both, "e_plain") == {None: Reason.NO_SCORE}
    run.rows["executions"] = [x for x in run.rows["executions"] if x.execution_id != "e_plain"]
    both = admit(run, evaluators={"check": 2.0, "style@2": -1.0})
    assert both.groups[0].mean == pytest.approx(0.9)
    assert plain.execution_id == "e_plain"
    assert style.evaluator_version == "2"
    assert why(admit(run, evaluators={"style@3": 1.0}))[None] == Reason.NO_SCORE


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"j_max": 0}, "wanted j_max of at least 1, got 0"),
        ({"count": "twice"}, "wanted count once or per_row"),
        ({"scale": "max"}, "wanted scale std or none"),
        ({"role_order": ["side"]}, "wanted role_order from main"),
        ({"evaluators": {}}, "wanted evaluators with finite weights"),
        ({"evaluators": {"check": float("nan")}}, "check=nan"),
    ],
)
def test_settings_that_cannot_be_meant(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        admit(two()[0], **wrong)


def test_a_group_may_have_an_empty_name() -> None:
    run = Forest()
    for value in (0.0, 1.0):
        run.execution(group="", score=value).call()
    run.execution(group=None, score=1.0).call()
    found = admit(run)
    assert [(g.group_id, g.num_executions, g.num_valid) for g in found.groups] == [("", 2, 2)]
    assert len(found.executions) == 2


def test_two_runs_do_not_share_groups() -> None:
    runs = []
    for number in (1, 2):
        run = Forest()
        for value in (0.0, float(number)):
            run.execution(group="g", score=value).call()
        runs.append(run)
    assert [g.mean for g in admit(runs).groups] == [0.5, 1.0]
