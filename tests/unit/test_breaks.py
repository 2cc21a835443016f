"""Prefix breaks: the likely cause of each kind of difference, and where paths of a tree part."""

from __future__ import annotations

from typing import Any

import pytest

from gyre_data.breaks import Cause, breaks, likely_cause
from gyre_data.execution import Execution
from gyre_data.schema import BranchReason
from tests.support.forest import ExecutionBuilder, Forest, Made

Message = dict[str, Any]


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> Message:
    return said("assistant", "", tool_calls=[{"name": name, "arguments": arguments, "id": "toolu_n_0"}])


BEFORE = [
    said("system", "You are."),
    said("user", "mend it"),
    call("Read", path="a"),
    said("tool", "x" * 500),
    said("assistant", "ok"),
]


def changed(place: int, message: Message) -> list[Message]:
    return [*BEFORE[:place], message, *BEFORE[place + 1 :], said("user", "and now?")]


@pytest.mark.parametrize(
    ("new", "facts", "cause", "index"),
    [
        (changed(0, said("system", "You are not.")), {}, Cause.SYSTEM, 0),
        (changed(1, said("user", "break it")), {}, Cause.TASK, 1),
        (changed(1, said("user", "mend it\n<system-reminder>today</system-reminder>")), {}, Cause.REMINDER, 1),
        (changed(2, call("Read", path="b")), {}, Cause.ARGUMENTS, 2),
        (changed(2, call("Read", path="b")), {"echo": "arguments"}, Cause.ARGUMENTS, 2),
        (changed(2, call("Write", path="a")), {}, Cause.TURN, 2),
        (changed(3, said("tool", "[old tool result cleared]")), {}, Cause.TOOL_RESULT, 3),
        (changed(4, said("assistant", "not ok")), {}, Cause.TURN, 4),
        ([*BEFORE[:3], said("user", "stop")], {"reason": BranchReason.REWIND}, Cause.REWIND, 3),
        ([*BEFORE[:3], said("user", "stop")], {}, Cause.REWIND, 3),
        (BEFORE[:3], {}, Cause.REWIND, 3),
        ([*BEFORE[:1], *BEFORE[3:]], {}, Cause.DROPPED, 1),
        ([*BEFORE[:2], said("user", "by the way"), *BEFORE[2:]], {}, Cause.INSERTED, 2),
        ([*BEFORE[:2], said("user", "<env>monday</env>"), *BEFORE[2:]], {}, Cause.REMINDER, 2),
        ([*BEFORE, said("user", "more")], {}, Cause.TEMPLATE, None),
        ([*BEFORE, said("user", "more")], {"reason": BranchReason.TEMPLATE}, Cause.MISSING_THINKING, None),
        ([*BEFORE, said("user", "more")], {"other_tools": True}, Cause.TOOLS, None),
        ([*BEFORE, said("user", "more")], {"check": "suffix_rendered: x"}, Cause.TEMPLATE, None),
        ([*BEFORE[:1], said("user", "Summary: ...")], {"reason": BranchReason.COMPACTION}, Cause.COMPACTION, 1),
    ],
)  # fmt: skip
def test_the_cause_of_each_kind_of_difference(
    new: list[Message], facts: dict[str, Any], cause: Cause, index: int | None
) -> None:
    told = likely_cause(BEFORE, new, **facts)
    assert (told.cause, told.index) == (cause, index)
    assert told.told


def test_a_date_in_the_system_prompt_is_a_nonce() -> None:
    one = said("system", "Today is Mon Nov 2, session 0a1b2c3.")
    two = said("system", "Today is Tue Nov 3, session 9f8e7d6.")
    assert likely_cause([one], [two]).cause is Cause.SYSTEM_NONCE


@pytest.mark.parametrize(("came", "told"), [(None, "without its thinking"), ("ha", "other thinking")])
def test_thinking_that_did_not_come_back(came: str | None, told: str) -> None:
    sent, back = said("assistant", "ok", reasoning="hm"), said("assistant", "ok", reasoning=came)
    verdict = likely_cause([sent], [back, said("user", "x")])
    assert verdict.cause is Cause.MISSING_THINKING
    assert told in verdict.told


def test_a_copy_of_the_turn_is_the_turn_whatever_its_form() -> None:
    new = [*BEFORE[:2], call("Read", path="b"), *BEFORE[3:], said("user", "x")]
    assert likely_cause(BEFORE, new, same=frozenset({2})).cause is Cause.TEMPLATE


def test_no_text_is_no_guess() -> None:
    assert likely_cause([], []).cause is Cause.UNKNOWN


def made() -> tuple[Forest, ExecutionBuilder, Made, Made]:
    run = Forest()
    e = run.execution("e_0123456789ab")
    a = e.call(new=[("system", 5), ("user", 4)])
    b = e.call(after=a, new=[("tool", 6)])
    texts = {"system": "You are.", "user": "mend it", "tool": "done", "assistant": "ok"}
    for node in list(e.nodes.values()):
        if node.message_role:
            e.say(node.node_id, said(node.message_role, texts[node.message_role]))
    run.blob = {row.blob_id: row.data for row in run.rows["blobs"]}.__getitem__  # type: ignore[attr-defined]
    return run, e, a, b


def test_a_break_is_placed_in_messages_and_tokens() -> None:
    run, e, _a, b = made()
    system = next(node.node_id for node in e.nodes.values() if node.message_role == "system")
    fork = {"extension": "fork", "branch_reason": "context_rewrite"}
    c = e.call(after=system, new=[("user", 7)], **fork)
    user = next(node.node_id for node in e.nodes.values() if node.call_id == c.id and node.message_role == "user")
    e.say(user, said("user", "mend THAT"))
    run.blob = {row.blob_id: row.data for row in run.rows["blobs"]}.__getitem__  # type: ignore[attr-defined]
    (found,) = breaks(Execution.load(run, "0123"))
    assert (found.number, found.old_number, found.old_call_id) == (3, 2, b.id)
    assert (found.cause, found.message, found.token) == (Cause.TASK, 1, 5)
    assert found.tokens_lost == 4 + 2 + 4 + 6 + 2 + 4
    assert (found.old.text, found.new.text) == ("mend it", "mend THAT")
    assert (len(found.old.ids_before), len(found.new.ids_after)) == (0, 8)


def test_what_is_no_break() -> None:
    run, e, a, b = made()
    e.retry(b)
    e.call(after=b, new=[("tool", 3)])
    e.call(new=[("system", 3)], role="sub_agent", agent_id="x", branch_reason="sub_agent", spawned_by_node=a.output)
    for _ in range(2):
        e.call(new=[("user", 3)], role="unknown")
    assert breaks(Execution.load(run, "0123")) == []
    e.call(new=[("user", 3)], role="unknown", fork_check="ids_differ: x")
    (found,) = breaks(Execution.load(run, "0123"))
    assert (found.cause, found.check) == (Cause.TEMPLATE, "ids_differ: x")
