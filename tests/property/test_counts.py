"""Counting by columns gives what counting row by row gives."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data.counts import TreeCounts, count_run
from gyre_data.schema import AgentRole, Author, BranchReason, CallStatus, DeliveryState
from gyre_data.types import VersionSpan
from tests.support.forest import Forest, forests
from tests.support.slow_counts import slow_counts

CALL_CHANGES: tuple[dict[str, Any], ...] = (
    {"fork_check": "V4: not closed", "tokens_lost": 7},
    {"fork_check": "V2", "branch_reason": BranchReason.REWIND},
    {"echo_difference": "arguments", "branch_reason": BranchReason.CONTEXT_REWRITE},
    {"branch_reason": BranchReason.COMPACTION},
    {"branch_reason": BranchReason.COMPACTION, "agent_role": AgentRole.MAIN_SUMMARY},
    {"agent_role": AgentRole.UNKNOWN_VALUE},
    {"status": CallStatus.UNKNOWN_VALUE},
    {"output_node": None},
    {"temperature": None},
    {"temperature": float("nan")},
    {"top_k": 5},
    {"top_p": None, "top_k": None, "constrained": None, "prompt_tokens": None},
    {"constrained": True},
    {"upstream": "https://api.example"},
)
NODE_CHANGES: tuple[dict[str, Any], ...] = (
    {"author": Author.PROVIDER},
    {"author": Author.TEMPLATE},
    {"author": Author.UNKNOWN_VALUE},
    {"policy_versions": None},
    {"logprobs": "infinite"},
    {"policy_versions": "two"},
    {"copy_of": "another"},
    {"copy_of": "another"},
)


def flat(counts: TreeCounts) -> Counter[Any]:
    out: Counter[Any] = Counter()
    for name in (field.name for field in fields(counts)):
        value = getattr(counts, name)
        if isinstance(value, Counter):
            out.update({(name, key): number for key, number in value.items()})
        else:
            out[name] = sum(value) if isinstance(value, tuple) else value
    return out


@st.composite
def odd_forests(draw: st.DrawFn) -> Forest:
    """Random runs in which rows were changed to what happens seldom."""
    run = draw(forests(max_executions=3))
    calls, nodes = run.rows["calls"], run.rows["nodes"]
    for _ in range(draw(st.integers(0, 6)) if calls else 0):
        at = draw(st.integers(0, len(calls) - 1))
        other = draw(st.sampled_from(calls))
        more = draw(
            st.sampled_from((*CALL_CHANGES, {"continues_from": other.call_id}, {"spawned_by_node": other.output_node}))
        )
        calls[at] = replace(calls[at], **more)
    for _ in range(draw(st.integers(0, 4)) if nodes else 0):
        at = draw(st.integers(0, len(nodes) - 1))
        node, more = nodes[at], dict(draw(st.sampled_from(NODE_CHANGES)))
        if more.get("logprobs") and node.logprobs is not None:
            more["logprobs"] = np.full(len(node.token_ids), -np.inf, np.float32)
        elif more.get("policy_versions") and node.policy_versions is not None and len(node.token_ids) > 1:
            spans = (
                VersionSpan(policy_id="a", n=1, start=0, end=1),
                VersionSpan(policy_id="b:c", n=2, start=1, end=len(node.token_ids)),
            )
            more["policy_versions"] = spans
        elif "copy_of" in more or more.get("logprobs") or more.get("policy_versions"):
            more = {"copy_of": draw(st.sampled_from(nodes)).node_id}
        nodes[at] = replace(node, **more)
    for row in draw(st.lists(st.sampled_from(run.rows["deliveries"]), max_size=3)) if run.rows["deliveries"] else ():
        run.rows["deliveries"].append(replace(row, state=draw(st.sampled_from(list(DeliveryState)))))
    return run


@settings(max_examples=80, deadline=None)
@given(odd_forests(), st.sampled_from([1, 2, 5, None]))
def test_columns_count_what_rows_say(run: Forest, j_max: int | None) -> None:
    found, wanted = flat(count_run(run, j_max=j_max)), slow_counts(run, j_max)
    assert {name: found[name] - wanted[name] for name in {*found, *wanted} if found[name] != wanted[name]} == {}


def test_counted_tokens_stand_for_ids_that_are_not_known() -> None:
    run = Forest()
    e = run.execution()
    e.call(after=e.call(new=[("user", 5)]), new=[("tool", 3)])
    none = np.empty(0, np.int32)
    nodes = run.rows["nodes"]
    nodes[0] = replace(nodes[0], counted_tokens=5, token_ids=none)
    assert flat(count_run(run)) == slow_counts(run, 5)
    assert count_run(run).not_trained == {"redacted": 2}


def test_nodes_of_lost_calls_are_not_counted_and_the_order_of_rows_does_not_matter() -> None:
    run = Forest()
    e = run.execution()
    lost = e.call(after=e.call(new=[("user", 5)]), new=[("tool", 7)])
    run.rows["calls"] = [row for row in run.rows["calls"] if row.call_id != lost.id]
    for one in (run, run.shuffled(1)):
        assert flat(count_run(one)) == slow_counts(one, 5)
