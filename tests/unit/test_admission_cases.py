"""Published faults of other systems as tests, as far as data decides: L03 groups, L04 masks, L06 a reply under two
leaves, L10 ragged executions, L12 versions, L13 no reward is not zero."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_data.admission import admit
from gyre_data.arrays import to_batches
from gyre_data.errors import AlignmentError, ConfigError
from gyre_data.execution import Execution
from gyre_data.scores import score
from gyre_data.types import PolicyVersion, VersionSpan
from tests.support.forest import Forest

CASES = Path(__file__).parent.parent / "data" / "cases"


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    whole = json.loads((CASES / f"{name}.json").read_text())
    return whole["input"], whole["expected"]


def test_l03_statistics_are_over_executions_not_trajectories() -> None:
    given, expected = case("L03")
    run = Forest()
    for rollout in given["rollouts"]:
        e = run.execution(rollout["id"], group=given["task"], score=rollout["reward"])
        root = e.call()
        for _ in range(rollout["trajectories"]):
            e.call(after=root)
    plain = admit(run, scale="none")
    assert [len(e.trajectories) for e in plain.executions] == [r["trajectories"] for r in given["rollouts"]]
    assert plain.groups[0].mean == expected["mean"] != pytest.approx(expected["wrong_mean_over_rows"])
    assert {e.execution_id: e.advantage for e in plain.executions} == expected["advantage"]
    scaled = admit(run)
    assert scaled.groups[0].std == expected["with_std"]["std_population"]
    assert {e.execution_id: e.advantage for e in scaled.executions} == pytest.approx(
        expected["with_std"]["advantage"], abs=1e-5
    )


def test_l04_an_advantage_is_one_number_for_every_reply_of_an_execution() -> None:
    given, expected = case("L04")
    run = Forest()
    run.execution(group="g", score=0.0).call()
    e = run.execution("e_steps", group="g", score=2 * given["advantage"])
    ends = []
    for step in given["steps"]:
        first, replied = step["mask"].index(1), sum(step["mask"])
        reply = e.call(new=[("user", first)], output=replied)
        after = len(step["mask"]) - first - replied
        if after:
            e.call(after=reply, new=[("tool", after)], output=None, status="failed", delivery=None)
        tool = [node.node_id for node in e.nodes.values() if node.message_role == "tool"]
        ends.append((tool[-1] if after else reply.output, first))
    admission = admit(run, scale="none")
    (found,) = (x for x in admission.executions if x.execution_id == "e_steps")
    assert found.advantage == given["advantage"]
    rows = []
    for node, first in ends:
        mask = Execution.load(run, "e_steps").path(node).loss_mask_T(admission)
        row = np.where(mask, found.advantage, 0.0)
        rows.append(np.delete(row, [first, first + 1]).tolist())  # the generation prompt, which the case has not
    assert rows == expected["rows"] != expected["wrong_rows"]


def test_l06_both_count_modes_say_so_in_owners_and_denominator() -> None:
    given, expected = case("L06")
    size = {node["id"]: node["tokens"] for node in given["tree"]["nodes"]}
    run = Forest()
    e = run.execution("e1", group="g")
    # The generation prompts (2 tokens) belong to the prompt of the case or stand between its replies.
    a = e.call(new=[("user", size["p"] - 2)], output=size["a"])
    b = e.call(after=a, new=[], output=size["b"])
    c = e.call(after=a, new=[], output=size["c"])
    names = {a.output: "a", b.output: "b", c.output: "c"}
    advantage = {leaf: told["advantage"] for leaf, told in given["leaves"].items()}

    def coefficients(count: Any) -> tuple[dict[str, float], int]:
        (one,) = admit(run, count=count, need_score=False).executions
        total: Counter[str] = Counter()
        for t in one.trajectories:
            for i in t.owned:
                total[names[one.tree.node_id[i]]] += advantage[names[one.tree.node_id[t.leaf]]]
        return dict(total), one.num_owned

    assert coefficients("per_row") == (expected["row_view"]["coef"], expected["row_view"]["trained_row_tokens"])
    coef, num_owned = coefficients("per_row")
    assert {k: v / num_owned for k, v in coef.items()} == pytest.approx(
        expected["coef_per_token_after_division"], abs=1e-8
    )
    # Once: c has more tokens, so it comes first and owns the shared reply; 10 tokens are the denominator.
    assert coefficients("once") == ({"a": -0.5, "b": 1.0, "c": -0.5}, 10)


def test_l10_batches_are_cut_between_executions() -> None:
    given, expected = case("L10")
    run = Forest()
    for number, rows in enumerate(given["rows_per_rollout"]):
        e = run.execution(group="g", score=float(number % 2))
        root = e.call()
        for _ in range(rows):
            e.call(after=root)
    found = admit(run).executions
    size, ranks = given["mini_batch_rollouts"], given["data_parallel"]
    batches = [found[k : k + size] for k in range(0, len(found), size)]
    assert len(batches) == expected["mini_batches"]
    shares = [batch[rank::ranks] for batch in batches for rank in range(ranks)]
    leaves = [(e.execution_id, t.leaf) for share in shares for e in share for t in e.trajectories]
    assert len(leaves) == len(set(leaves)) == expected["rows"]
    for batch in batches:  # an execution weighs 1 / E however many trajectories and tokens it has
        weights = [sum(t.num_owned / e.num_owned for t in e.trajectories) / len(batch) for e in batch]
        assert weights == pytest.approx([1 / len(batch)] * len(batch))


def test_l12_every_sampled_token_has_the_version_that_served_it() -> None:
    _, expected = case("L12")
    run = Forest()
    e = run.execution()
    served = [("run", n) for n in expected["w1_version_after"]]
    last = None
    for version in served:
        last = e.call(after=last, output=2, version=version)
    assert last is not None
    path = Execution.load(run, e.execution_id).main
    assert [(v.policy_id, v.n) for v in path.versions] == served
    assert sum(v.end - v.start for v in path.versions) == int(path.sampled_T.sum())
    assert [str(PolicyVersion.parse(f"run:{n}")) for _, n in served] == [f"run:{n}" for _, n in served]
    for unlabelled in ("default", "41", ":41", "run:", "run:new"):
        with pytest.raises(ValueError, match="wanted a weight version"):
            PolicyVersion.parse(unlabelled)
    node = e.nodes[last.output]
    for wrong in ((VersionSpan(policy_id="run", n=41, start=0, end=1),), ()):
        with pytest.raises(AlignmentError, match=r"cover 0\.\.2 exactly"):
            to_batches("nodes", [replace(node, policy_versions=wrong)])


def test_l13_no_reward_is_not_reward_zero() -> None:
    given, expected = case("L13")
    run = Forest()
    writer = _Writer(run)
    for rollout in given["rollouts"]:
        e = run.execution(rollout["id"], group="g")
        e.call()
        value = float(rollout["reward"]) if rollout["reward"] is not None else None
        if value is None:
            score(writer, e, None, evaluator="check@1", status="failed", detail=rollout["evaluator"])
            continue
        if math.isfinite(value):
            score(writer, e, value, evaluator="check@1")
            continue
        with pytest.raises(ConfigError, match="not a number"):
            score(writer, e, value, evaluator="check@1")
        e.score(value)  # what an importer may still bring in is refused once more on reading
    admission = admit(run)
    assert [e.execution_id for e in admission.executions] == expected["admitted"]
    assert admission.groups[0].mean == expected["baseline"]
    held = {x.execution_id: x.detail for x in admission.excluded if x.call_id is None}
    assert set(held) == set(expected["held_back"])
    assert all(told in held[name] for name, told in expected["held_back"].items())
    assert admission.counts()["executions"] == {"evaluator_failed": 1, "not_a_number": 1}
    stored = run.table("scores")
    assert stored.filter(stored.column("execution_id").to_numpy() == "r2").column("value").to_pylist() == [None]


class _Writer:
    """Takes rows into a forest as a RunWriter takes them into a folder."""

    def __init__(self, run: Forest) -> None:
        self.run = run

    def write(self, rows: Any) -> None:
        for row in rows:
            self.run.add("scores", row)
