"""Roles and links that only the record can give: compactions as text, agents nobody labels, side calls."""

from dataclasses import replace

import pytest

from gyre_data.schema import AgentRole, BranchReason, Extension
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.roles import AgentLabel
from tests.support.driver import Driver, assistant, result, said, system, user
from tests.support.toy_template import ToyTemplate

SUMMED = AgentLabel(client="pi", source="shape", summary=True, evident=True)
QWEN = AgentLabel(client="qwen-code", spawner="agent")
SIDE = AgentLabel(role=AgentRole.SIDE, source="shape")
WORDS = "what was said until now"


@pytest.fixture
def driver() -> Driver:
    return Driver(ToyTemplate())


def ids(driver: Driver, text: str) -> list[int]:
    return [*driver.template.encode(text).ids.tolist(), *sorted(driver.template.stop_ids)[:1]]


def call(driver: Driver, messages: list[Message], text: str = "", *calls: ToolCall, label: AgentLabel | None = None):
    reply = said(text, *calls)
    return driver.call(messages, ids(driver, text or "x"), reply, label)


@pytest.mark.parametrize("restored", [False, True])
def test_a_compaction_as_text_is_linked_both_ways(driver: Driver, restored: bool) -> None:
    call(driver, [system("s"), user("a")], "b")
    first = call(driver, [system("sum up"), user("USER: a ASSISTANT: b")], WORDS, label=SUMMED)
    second = call(driver, [system("sum up"), user("another part of it")], WORDS + "!", label=SUMMED)
    assert [p.agent_role for p in (first, second)] == [AgentRole.MAIN_SUMMARY] * 2
    assert [p.continues_from for p in (first, second)] == ["c_0", "c_0"], "two in parallel sum up one conversation"
    if restored:
        driver.history = driver.restored()
    after = call(driver, [system("s"), user(f"<summary>{WORDS}! and {WORDS}</summary>"), user("go on")], "d")
    assert (after.agent_role, after.role_source) == (AgentRole.MAIN, "inherited")
    assert (after.branch_reason, after.continues_from) == (BranchReason.COMPACTION, "c_2")
    driver.check()


@pytest.mark.parametrize("restored", [False, True])
def test_a_client_that_leaves_a_turn_out_goes_on_with_its_conversation(driver: Driver, restored: bool) -> None:
    talk = [system("s"), user("a")]
    call(driver, talk, "no call of a tool")
    if restored:
        driver.history = driver.restored()
    on = call(driver, [*talk, user("call a tool")], "b")
    assert (on.agent_role, on.role_source, on.continues_from) == (AgentRole.MAIN, "inherited", "c_0")
    assert (on.extension, on.branch_reason) == (Extension.FORK, BranchReason.CONTEXT_REWRITE)
    if restored:
        driver.history = driver.restored()
    more = [*talk, user("call a tool"), assistant("b", hint=driver.output_node), user("c")]
    assert call(driver, more, "d").agent_role is AgentRole.MAIN
    assert call(driver, [system("s"), user("b"), user("call a tool")], "b").agent_role is AgentRole.UNKNOWN
    driver.check()


def test_a_summary_of_nothing_is_unknown(driver: Driver) -> None:
    assert call(driver, [system("sum up"), user("x")], WORDS, label=SUMMED).agent_role is AgentRole.UNKNOWN
    labelled = replace(SUMMED, role=AgentRole.MAIN_SUMMARY, agent_id="s1")
    assert call(driver, [system("sum up"), user("y")], WORDS, label=labelled).agent_role is AgentRole.UNKNOWN


def test_a_call_beside_the_task_does_not_take_the_first_place(driver: Driver) -> None:
    waiting = driver.plan([system("title"), user("a")], SIDE)
    driver.history.reserve(waiting)
    assert driver.plan([system("s"), user("a")]).agent_role is AgentRole.MAIN
    driver.commit(waiting, ids(driver, "t"), said("t"))
    assert call(driver, [system("s"), user("a")], "b").agent_role is AgentRole.MAIN
    assert driver.plan([system("s"), user("other")]).agent_role is AgentRole.UNKNOWN


def test_a_turn_that_a_side_call_followed_is_still_simply_extended(driver: Driver) -> None:
    talk = [system("s"), user("a")]
    call(driver, talk, "b")
    talk += [assistant("b", hint=driver.output_node)]
    beside = call(driver, [*talk, user("suggest")], "c", label=SIDE)
    assert (beside.extension, beside.branch_reason) == (Extension.FORK, BranchReason.CONTEXT_REWRITE)
    on = call(driver, [*talk, user("go on")], "d")
    assert (on.extension, on.branch_reason, on.continues_from) == (Extension.BRIDGE, None, "c_0")
    again = call(driver, [*talk, user("no, this")], "e")
    assert (again.extension, again.branch_reason) == (Extension.FORK, BranchReason.REWIND)
    driver.check()


@pytest.mark.parametrize("restored", [False, True])
def test_a_side_call_that_repeats_the_conversation_stays_beside_it(driver: Driver, restored: bool) -> None:
    talk = [system("s"), user("a")]
    call(driver, talk, "b")
    talk += [assistant("b", hint=driver.output_node)]
    beside = call(driver, [system("memories"), *talk[1:], user("extract")], "c", label=SIDE)
    assert (beside.agent_role, beside.continues_from) == (AgentRole.SIDE, "c_0")
    if restored:
        driver.history = driver.restored()
    on = call(driver, [*talk, user("go on")], "d")
    assert (on.agent_role, on.extension, on.branch_reason) == (AgentRole.MAIN, Extension.BRIDGE, None)
    newest = call(driver, [system("s2"), *talk[1:], user("and then")], "e")
    assert (newest.agent_role, newest.first_difference_message) == (AgentRole.MAIN, 0)


@pytest.mark.parametrize("restored", [False, True])
def test_an_agent_nobody_labels_is_found_by_the_call_that_started_it(driver: Driver, restored: bool) -> None:
    driver.label = QWEN
    starts = [ToolCall(name="agent", arguments={"prompt": "look around"}) for _ in range(2)]
    talk = [system("s"), user("a")]
    call(driver, talk, "", *starts)
    node = driver.output_node
    seed = [user("context"), assistant("Got it.")]
    one = call(driver, [system("k"), *seed, user("look around")], "b")
    assert (one.agent_role, one.role_source, one.branch_reason) == (
        AgentRole.SUB_AGENT,
        "spawn",
        BranchReason.SUB_AGENT,
    )
    assert (one.spawned_by_node, one.agent_id) == (node, one.spawned_by_tool_call)
    child = driver.output_node
    if restored:
        driver.history = driver.restored()
    two = call(driver, [system("k2"), *seed, user("look around")], "b")
    assert (two.spawned_by_node, two.agent_id != one.agent_id) == (node, True), "each call starts one agent"
    more = [system("k"), *seed, user("look around"), assistant("b", hint=child), user("and?")]
    on = call(driver, more, "c")
    assert (on.agent_role, on.agent_id, on.role_source) == (AgentRole.SUB_AGENT, one.agent_id, "inherited")
    assert on.spawned_by_tool_call == one.spawned_by_tool_call
    other = call(driver, [system("k"), *seed, user("look elsewhere")], "b")
    assert other.agent_role is AgentRole.UNKNOWN, "nobody started it"
    back = [*talk, assistant("", *starts, hint=node), result("done", "call_0"), result("done", "call_1")]
    assert call(driver, back, "d").agent_role is AgentRole.MAIN
    driver.check()
