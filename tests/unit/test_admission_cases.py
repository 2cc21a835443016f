"""Published faults of other systems as tests: L03 groups, L06 a reply under two leaves, L13 no reward is not zero."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gyre_data.admission import admit
from gyre_data.errors import ConfigError
from gyre_data.scores import score
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
