"""Figures over whole runs: distributions, branch shapes, outages, staleness, mismatch; unknown is never zero."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from gyre_data.branch_shapes import branch_shapes
from gyre_data.distributions import SECOND_EDGES, TOKEN_EDGES, distribution, distributions
from gyre_data.errors import ConfigError
from gyre_data.execution import executions
from gyre_data.mismatch import mismatch
from gyre_data.node_rows import NodeRows
from gyre_data.outages import outages
from gyre_data.run_stats import stats
from gyre_data.scores import scores_by_execution
from gyre_data.staleness import staleness
from gyre_data.tools import by_tool
from gyre_data.tree import Tree
from gyre_data.types import LedgerRow, Step, TeacherLogprobs
from tests.support.busy_case import busy_case
from tests.support.forest import START, ExecutionBuilder, Forest
from tests.support.published_case import published_case

# --- distributions -------------------------------------------------------------------------------------------------


def test_quantiles_and_fixed_bins() -> None:
    found = distribution(np.array([0, 255, 256, 1024, 5_000_000]), "tokens", unknown=2)
    assert found.edges == TOKEN_EDGES
    assert found.histogram[:4] == (2, 1, 0, 1)
    assert (found.histogram[-1], sum(found.histogram), found.count, found.unknown) == (1, 5, 5, 2)
    assert (found["p50"], found.minimum, found.maximum) == (256, 0, 5_000_000)
    nothing = distribution(np.zeros(0), "seconds")
    assert (nothing.count, nothing["p50"], nothing.mean, nothing.maximum) == (0, None, None, None)
    assert (nothing.edges, sum(nothing.histogram)) == (SECOND_EDGES, 0)


def test_distributions_of_a_run() -> None:
    run = busy_case()
    run.rows["calls"].append(run.rows["calls"].pop(0))  # the order of rows is of no account
    found = stats(run)
    spread = found.distributions
    assert sum(spread.trajectory_tokens.histogram) == found.trees.trajectories
    assert spread.execution_tokens.count == found.executions
    assert spread.execution_tokens.mean == pytest.approx(found.trees.distinct_tokens / 3)
    assert spread.execution_calls.maximum == 17
    assert (spread.call_output_tokens.count, spread.call_output_tokens.unknown) == (18, 1)
    assert (spread.call_s["p50"], spread.call_s.count) == (0.5, 19)
    assert (spread.call_first_token_s.count, spread.call_first_token_s.unknown) == (0, 19)
    assert (spread.execution_s.count, spread.execution_s.unknown) == (2, 1)
    assert found.duration_p50_s == spread.execution_s["p50"]


def test_first_token_and_prompt_of_every_call() -> None:
    run = Forest()
    e = run.execution(group="g")
    e.call(new=[("user", 300)], first_token_at=START + timedelta(seconds=5))
    e.call(new=[("user", 600)])
    found = distributions([run, Forest()], executions(run).values(), ())
    assert (found.call_first_token_s.count, found.call_first_token_s.unknown) == (1, 1)
    assert found.call_first_token_s.maximum == pytest.approx(5 - (e.run.rows["calls"][0].started_at - START).seconds)
    assert (found.call_prompt_tokens.minimum, found.call_prompt_tokens.maximum) == (302, 602)


# --- branches ------------------------------------------------------------------------------------------------------


def test_shapes_of_branches_by_reason() -> None:
    found = {shape.reason: shape for shape in branch_shapes([busy_case(), published_case()])}
    assert found["rewind"].branches == 2
    assert (found["retry"].branches, found["retry"].without_nodes) == (5, 0)
    assert (found["false"].branches, found["false"].tokens_lost) == (1, 22)
    assert found["sub_agent"].shared_tokens.maximum == 0
    rewrite = found["context_rewrite"]
    assert (rewrite.branches, rewrite.tokens_lost) == (3, 79 + 2 * 100)
    assert branch_shapes([Forest()]) == ()


def test_a_branch_is_all_that_lies_below_its_first_own_node() -> None:
    run = Forest()
    e = run.execution(group="g")
    a = e.call(new=[("system", 50), ("user", 10)], output=4)
    fork = {"extension": "fork", "branch_reason": "rewind"}
    b = e.call(after=a, new=[("tool", 7)], output=3, **fork)
    e.call(after=b, new=[("tool", 5)], output=2)
    e.call(after=a, new=[("tool", 9)], output=1)
    (shape,) = branch_shapes([run])
    assert (shape.shared_tokens["p50"], shape.branch_tokens["p50"]) == (50 + 10 + 2 + 4, (7 + 2 + 3) + (5 + 2 + 2))
    assert shape.branch_calls["p50"] == 2


def test_sums_over_subtrees_are_the_tree_s() -> None:
    run = busy_case().shuffled(3)
    rows = NodeRows(run)
    below = rows.below(rows.num_tokens_N)
    ids = rows.column("node_id").to_pylist()
    for info in executions(run):
        tree = Tree.load(run, info)
        for i, node_id in enumerate(tree.node_id):
            at = ids.index(node_id)
            assert below[at] == tree.num_tokens_N[i : tree.end_N[i]].sum()
            assert rows.depth_N[at] == tree.depth_N[i]


@pytest.mark.parametrize("own", [True, False])
def test_an_execution_whose_nodes_go_in_a_circle_is_named_and_the_others_are_counted(own: bool) -> None:
    """Its first node hangs below its last one, or below itself."""
    run = busy_case()
    wanted = stats(run, model="Qwen/Qwen3-8B").to_json()
    e = run.execution("e_circle", group="g-circle")
    last = e.call(after=e.call(new=[("user", 1)]), branch_reason="rewind")
    first = next(i for i, row in enumerate(run.rows["nodes"]) if row.execution_id == "e_circle")
    node = run.rows["nodes"][first]
    run.rows["nodes"][first] = replace(node, parent_id=node.node_id if own else last.output)
    found = stats(run, model="Qwen/Qwen3-8B")
    (fault,) = found.trees.faults
    assert (fault.execution_id, found.trees.inconsistent) == ("e_circle", 1)
    assert "e_circle: parents run in a circle" in fault.detail
    got = found.to_json()
    for name in ("nodes", "distinct_tokens", "branch_shapes", "kept_tokens", "forks", "forecast"):
        assert got[name] == wanted[name]
    assert got["executions"] == wanted["executions"] + 1
    assert by_tool(run) == replace(by_tool(busy_case()), left_out=("e_circle",))


# --- outages -------------------------------------------------------------------------------------------------------


def test_outages_are_windows_of_failures() -> None:
    run = Forest()
    one, two, three = (run.execution(group="g") for _ in range(3))
    first = one.score(None, status="failed")
    second = two.score(None, status="failed")
    one.score(None, status="skipped")
    two.score(None, status="failed", evaluator="style")
    again = three.score(1.0)
    one.score(0.5)
    last = three.score(None, status="failed")
    check, later, style = outages(scores_by_execution(run))
    assert (check.evaluator, check.failures, check.scored_again_at) == ("check@1", 2, again.at)
    assert (check.first_failed_at, check.last_failed_at) == (first.at, second.at)
    assert (check.executions, check.excluded) == ((one.execution_id, two.execution_id), 1)
    assert (later.first_failed_at, later.scored_again_at, later.excluded) == (last.at, None, 0)
    assert (style.evaluator, style.excluded) == ("style@1", 1)
    assert outages({}) == ()


# --- staleness -----------------------------------------------------------------------------------------------------


def dispatched(
    run: Forest, group: str, policy: str | None, n: int | None, sampled: tuple[str, int]
) -> ExecutionBuilder:
    e = run.execution(group=group, dispatch_policy_id=policy, dispatch_version=n)
    e.call(new=[("user", 3)], output=10, version=sampled)
    return e


def trained(trainer: Forest, step: int, parent: tuple[str, int], consumed: list[ExecutionBuilder]) -> None:
    at = trainer.now()
    for e in consumed:
        leaf = next(call.output_node for call in e.calls.values())
        trainer.add(
            "ledger",
            LedgerRow(
                step=step, policy_id="run", data_run="runs/a", manifest=1, execution_id=e.execution_id, trajectory=0,
                leaf_node=leaf or "", owned_tokens=10, score_ids=(), at=at,
            ),
        )  # fmt: skip
    metrics = json.dumps({"mismatch_mean": 0.01 * step, "mismatch_max": 0.1 * step})
    trainer.add(
        "steps",
        Step(
            step=step, policy_id="run", n=step, parent_policy_id=parent[0], parent_n=parent[1], num_executions=1,
            trained_tokens=100 * step, metrics=metrics, at=at,
        ),
    )  # fmt: skip


def test_staleness_of_what_a_trainer_consumed() -> None:
    run, trainer = Forest(), Forest()
    a = dispatched(run, "g1", "old", 5, ("old", 5))
    b = dispatched(run, "g1", "old", 3, ("old", 4))
    c = dispatched(run, "g2", "run", 1, ("run", 2))
    other = dispatched(run, "g3", "elsewhere", 1, ("old", 9))  # old:9 is younger than the fork at old:5
    trained(trainer, 1, ("old", 5), [a, b])
    trained(trainer, 2, ("run", 1), [])
    late = dispatched(run, "g4", "old", 4, ("run", 1))  # old:4, old:5, run:1, run:2: three steps
    trained(trainer, 3, ("run", 2), [c, other, late])
    found = staleness([run], trainer=trainer)
    assert found.basis == "consumed"
    assert (found.groups, found.executions_unknown) == (3, 1)
    assert found.group_mean == pytest.approx(((0 + 2) / 2 + 1 + 3) / 3)  # step 3 sees run:2; c was dispatched at run:1
    assert found.group_max == 3
    assert (found.tokens, found.tokens_unknown) == (40, 10)
    assert found.token_mean == pytest.approx((0 + 1 + 0 + 1) / 4)
    assert (found.token_max, found.newest) == (1, None)


def test_staleness_against_the_newest_version_of_a_run() -> None:
    run = Forest()
    dispatched(run, "g1", "run", 1, ("run", 1))
    dispatched(run, "g1", "run", 2, ("run", 2))
    dispatched(run, "g2", "base", 0, ("base", 0))
    dispatched(run, "g3", None, None, ("run", 4))
    found = staleness([run])
    assert (found.basis, found.newest) == ("newest_in_run", "run:4")
    assert (found.groups, found.group_mean, found.group_max, found.executions_unknown) == (1, 2.5, 3, 2)
    assert (found.tokens, found.token_mean, found.tokens_unknown) == (30, (3 + 2 + 0) / 3, 10)
    both = staleness([run, run])
    assert (both.tokens, both.groups, both.newest) == (60, 2, "run:4")


def test_a_folder_without_steps_is_refused_as_a_trainer() -> None:
    with pytest.raises(ConfigError, match="holds no step yet; give the"):
        stats(Forest(), trainer=Forest())
    trainer = Forest()
    trained(trainer, 1, ("old", 5), [])
    found = staleness([busy_case()], trainer=trainer)
    assert (found.groups, found.executions_unknown, found.tokens, found.group_mean) == (0, 0, 0, None)


def test_staleness_without_versions_is_unknown() -> None:
    run = Forest()
    run.execution(group="g").call(version=None)
    found = staleness([run])
    assert (found.group_mean, found.group_max, found.token_mean, found.token_max) == (None,) * 4
    assert (found.executions_unknown, found.tokens_unknown, found.newest) == (1, 4, None)
    assert staleness([Forest()]).token_mean is None


# --- mismatch ------------------------------------------------------------------------------------------------------


def test_mismatch_of_a_trainer_is_weighted_by_tokens() -> None:
    run, trainer = Forest(), Forest()
    a = dispatched(run, "g1", "old", 5, ("old", 5))
    trained(trainer, 1, ("old", 5), [a])
    trained(trainer, 2, ("run", 1), [a])
    found = mismatch([run], trainer=trainer)
    assert (found.steps, found.tokens, found.maximum) == (2, 300, pytest.approx(0.2))
    assert found.mean == pytest.approx((100 * 0.01 + 200 * 0.02) / 300)
    nothing = mismatch([run])
    assert (nothing.steps, nothing.mean, nothing.maximum, nothing.teachers) == (0, None, None, ())


def test_gaps_to_teachers() -> None:
    run = Forest()
    e = run.execution(group="g")
    made = e.call(output=4, version=("run", 2))
    ours = e.nodes[made.output].logprobs
    assert ours is not None

    def teach(teacher: str, values: np.ndarray, node: str = made.output) -> None:
        row = TeacherLogprobs(node_id=node, teacher=teacher, logprobs=values.astype(np.float32), at=run.now())
        run.add("teacher_logprobs", row)

    teach("run:2", ours + 9)  # taken again below: the latest row of a node counts
    teach("run:2", ours + np.array([0.0, 0.1, -0.1, 0.2]))
    teach("big:0", ours - 1.0)
    teach("big:0", np.zeros(3), made.prompt)
    found = {gap.teacher: gap for gap in mismatch([run]).teachers}
    assert found["run:2"].mean == pytest.approx(0.1, abs=1e-6)
    assert (found["run:2"].same_version, found["run:2"].tokens) == (True, 4)
    assert found["run:2"].maximum == pytest.approx(0.2, abs=1e-6)
    assert (found["big:0"].same_version, found["big:0"].nodes_unmatched) == (False, 1)
    assert found["big:0"].p50 == pytest.approx(1.0, abs=1e-6)
