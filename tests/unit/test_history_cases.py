"""The outside cases about tokens and trees, against the toy tokenizer: expected ids exactly."""

import json
from pathlib import Path

import pytest

from gyre_data.schema import AgentRole, Author, BranchReason, Extension, NodeKind
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.roles import AgentLabel
from tests.support.driver import Driver, assistant, said, user
from tests.support.toy_template import ToyTemplate

CASES = Path(__file__).parents[1] / "data" / "cases"


def case(name: str) -> dict:
    return json.loads((CASES / f"{name}.json").read_text(encoding="utf-8"))


def message(sent: dict) -> Message:
    calls = tuple(
        ToolCall(name=call["function"]["name"], arguments=call["function"]["arguments"], id=call.get("id"))
        for call in sent.get("tool_calls") or ()
    )
    return Message(
        role=sent["role"],
        content=sent.get("content") or "",
        reasoning=sent.get("reasoning_content"),
        tool_calls=calls,
        tool_call_id=sent.get("tool_call_id"),
    )


def messages(sent: list) -> list[Message]:
    return [message(one) for one in sent]


def reply(script: dict) -> tuple[list[int], str]:
    ids = [token for delta in script["deltas"] for token in delta["ids"]]
    return ids, "".join(delta["text"] for delta in script["deltas"])


def test_t01_sampled_ids_are_not_made_again_from_text() -> None:
    given, wanted = case("T01")["input"], case("T01")["expected"]
    driver = Driver(ToyTemplate("chatml"))
    ids, text = reply(given["engine_script"][0])
    first = driver.call(messages(given["turn_1"]), ids, said(text))
    second = driver.call(messages(given["turn_2"]), *((lambda r: (r[0], said(r[1])))(reply(given["engine_script"][1]))))
    assert second.prompt_ids.tolist() == wanted["prompt_ids_turn_2"]
    assert (first.extension, second.extension) == (Extension.ROOT, Extension.BRIDGE)
    assert second.branch_reason is None
    driver.check()
    trained = [n.token_ids.tolist() for n in driver.nodes if n.author is Author.POLICY]
    assert trained[0] == wanted["loss_mask_on"]


def test_t03_a_cut_reply_is_closed_by_a_template_node() -> None:
    given, wanted = case("T03")["input"], case("T03")["expected"]
    driver = Driver(ToyTemplate("chatml"))
    ids, text = reply(given["engine_script"][0])
    driver.call(messages(given["turn_1"]), ids, said(text, finish="length"))
    ids, text = reply(given["engine_script"][1])
    second = driver.call(messages(given["turn_2"]), ids, said(text))
    assert second.prompt_ids.tolist() == wanted["prompt_ids_turn_2"]
    driver.check()
    close = [n for n in driver.nodes if n.token_ids.tolist() == [257]]
    assert [(n.author, n.logprobs, n.kind) for n in close] == [(Author.TEMPLATE, None, NodeKind.PROMPT)]


def test_t05_results_of_parallel_calls_share_a_turn() -> None:
    given, wanted = case("T05")["input"], case("T05")["expected"]
    chat = messages(given["messages"])
    root = Driver(ToyTemplate("chatml_group")).plan(chat)
    assert root.prompt_ids.tolist() == wanted["ids_whole"]

    driver = Driver(ToyTemplate("chatml_group"))
    start = driver.plan(chat[:1]).prompt_ids
    close = wanted["ids_whole"].index(257, len(start))
    sampled = wanted["ids_whole"][len(start) : close + 1]
    driver.call(chat[:1], sampled, said("", *chat[1].tool_calls))
    extended = driver.call(chat, [121, 257], said("y"))
    assert extended.extension is Extension.BRIDGE
    assert extended.prompt_ids.tolist() == wanted["ids_whole"]
    roles = [n.message_role for n in driver.nodes if n.author is Author.CLIENT]
    assert roles == ["user", "tool", "tool"]
    driver.check()


def test_t12_assistant_text_of_the_client_is_context() -> None:
    given, wanted = case("T12")["input"], case("T12")["expected"]
    driver = Driver(ToyTemplate("chatml"))
    for step in given["steps"]:
        ids, text = reply(step["engine"])
        plan = driver.call(messages(step["send"]), ids, said(text))
    driver.check()
    template = driver.template
    sampled = [template.decode(n.token_ids) for n in driver.nodes if n.author is Author.POLICY]
    context = [template.decode(n.token_ids) for n in driver.nodes if n.author is Author.CLIENT]
    assert sampled == wanted["trained_texts"]
    assert all(any(text in one for one in context) for text in wanted["not_trained"])
    assert (plan.extension, plan.branch_reason, plan.fork_check) == (
        Extension.FORK,
        BranchReason.CONTEXT_REWRITE,
        None,
    )
    assert plan.agent_role is AgentRole.MAIN


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("thinking", ["keep", "fork"])
def test_t02_reasoning_that_the_template_drops(thinking: str, dropped: bool) -> None:
    given, wanted = case("T02")["input"], case("T02")["expected"]
    driver = Driver(ToyTemplate(given["template"]), thinking=thinking)
    driver.call(messages(given["turn_1"]), given["reply_1_ids"], said("a1", reasoning="long thought"))
    chat = messages(given["turn_2"])
    if dropped:  # the client keeps no reasoning; what the policy sampled had some all the same
        chat[1] = assistant("a1")
    second = driver.call(chat, [121, 257], said("y"))
    driver.check()
    if thinking == "keep":
        start = wanted["append"]["turn_2_prompt_starts_with"]
        assert second.prompt_ids.tolist()[: len(start)] == start
        assert second.extension is (Extension.REPAIR if dropped else Extension.BRIDGE)
        return
    assert second.prompt_ids.tolist() == wanted["re_render"]["turn_2_prompt_ids"]
    assert (second.extension, second.branch_reason) == (Extension.FORK, BranchReason.TEMPLATE)
    assert second.fork_check is None, "following the template is a policy, not a failure"
    shared = [n for n in second.node_ids if n in driver.plans[0].node_ids]
    assert list(driver.plans[0].node_ids) == shared, "the prompt of turn 1 is shared"
    copy = driver.rows()[second.node_ids[len(shared)]]
    assert (copy.author, copy.copy_of) == (Author.CLIENT, driver.calls[0].output_node)


@pytest.mark.parametrize("named", [False, True])
def test_t09_two_siblings_with_the_same_text(named: bool) -> None:
    steps = case("T09")["input"]["steps"]
    driver = Driver(ToyTemplate("chatml"))
    for step in steps[:2]:
        ids, text = reply(step["engine"])
        plan = driver.call(messages(step["send"]), ids, said(text))
    assert (plan.extension, plan.branch_reason) == (Extension.RETRY, BranchReason.RETRY)
    assert driver.plans[0].node_ids == plan.node_ids
    third = messages(steps[2]["send"])
    if named:
        third[1] = assistant("abc", hint=driver.calls[0].output_node)
    attached = driver.plan(third)
    assert driver.calls[0 if named else 1].output_node in attached.node_ids
    driver.check()


def test_t11_sub_agents_with_one_prompt() -> None:
    driver = Driver(ToyTemplate("chatml"))
    for step in case("T11")["input"]["steps"]:
        main = step["agent"] == "main"
        label = AgentLabel(
            role=AgentRole.MAIN if main else AgentRole.SUB_AGENT,
            source="header",
            agent_id=None if main else step["agent"],
        )
        ids, text = reply(step["engine"])
        chat = [Message(role="system", content=step["system"]), *messages(step["send"])]
        driver.call(chat, ids, said(text), label)
    driver.check()
    roots = [n for n in driver.nodes if n.parent_id is None]
    parents = {n.parent_id for n in driver.nodes}
    leaves = [n for n in driver.nodes if n.node_id not in parents]
    assert (len(roots), len(leaves)) == (2, 3)
    s1, s2 = driver.plans[1], driver.plans[2]
    assert s1.node_ids == s2.node_ids
    assert [plan.branch_reason for plan in driver.plans] == [
        None,
        BranchReason.SUB_AGENT,
        BranchReason.SUB_AGENT,
        None,
        None,
    ]


def test_t16_no_end_token_after_a_tool_turn() -> None:
    given, wanted = case("T16")["input"], case("T16")["expected"]
    chat = messages(given["sequence"])
    driver = Driver(ToyTemplate("glm"))
    driver.call(chat[:1], [98, 262], said("b"))
    assert driver.plan(chat).prompt_ids.tolist() == wanted["ids"]
    assert Driver(ToyTemplate("glm")).plan(chat).prompt_ids.tolist() == wanted["ids"]


def test_p17_other_spelling_is_the_same_turn_another_value_is_not() -> None:
    given, wanted = case("P17")["input"], case("P17")["expected"]
    ids, _ = reply(given["engine_script"][0])
    assert ids == wanted["captured_output_ids_1"]
    call = ToolCall(name="move", arguments={"crate": "R-9", "to": 3})
    extensions = []
    for variant in given["turn_2_variants"]:
        driver = Driver(ToyTemplate("chatml"))
        driver.call(messages(given["turn_1"]), ids, said("", call), tools=given["tools"])
        echoed = [
            {**one, "tool_calls": [dict(c, function=parsed(c["function"])) for c in one.get("tool_calls", ())]}
            for one in variant
        ]
        plan = driver.plan(messages(echoed), tools=given["tools"])
        extensions.append(plan.extension)
        kept = driver.calls[0].output_node in plan.node_ids
        assert kept == (variant is not given["turn_2_variants"][3])
    assert extensions == [Extension.BRIDGE, Extension.REPAIR, Extension.BRIDGE, Extension.FORK]


def parsed(function: dict) -> dict:
    return {"name": function["name"], "arguments": json.loads(function["arguments"])}


def test_reasoning_that_was_cut_is_closed_too() -> None:
    driver = Driver(ToyTemplate("chatml"))
    driver.call([user("u")], [258, 97, 98], said("", reasoning="ab", finish="length"))
    plan = driver.call([user("u"), assistant(""), user("v")], [121, 257], said("y"))
    start = driver.path_ids(driver.calls[0].output_node).tolist()
    assert plan.prompt_ids.tolist()[len(start) :][:3] == [259, 257, 10]
    driver.check()
    driver.call([user("w")], [258, 97, 259, 98], said("b", reasoning="a", finish="length"))
    plan = driver.plan([user("w"), assistant("b"), user("v")])
    start = driver.path_ids(driver.output_node).tolist()
    assert plan.prompt_ids.tolist()[len(start) :][:2] == [257, 10]


def test_siblings_with_the_same_text_have_histories_of_their_own() -> None:
    driver = Driver(ToyTemplate("chatml"))
    for ids in ([97, 301, 257], [302, 257]):
        driver.call([user("x")], ids, said("abc"))
    nodes = [call.output_node for call in driver.calls]
    plans = [driver.call([user("x"), assistant("abc", hint=node), user("y")], [122, 257], said("z")) for node in nodes]
    assert [nodes[i] in plan.node_ids for i, plan in enumerate(plans)] == [True, True]
    assert [plan.extension for plan in plans] == [Extension.BRIDGE, Extension.BRIDGE]
    deeper = [user("x"), assistant("abc"), user("y"), assistant("z", hint=driver.calls[2].output_node), user("w")]
    assert nodes[0] in driver.plan(deeper).node_ids, "the deeper turn decides which sibling came before it"
    driver.check()


def test_a_sampled_turn_counts_more_than_a_longer_recorded_reading() -> None:
    driver = Driver(ToyTemplate("chatml"))
    chat = [user("x"), assistant("hello"), user("y")]
    driver.call(chat, [97, 257], said("a"))  # the client wrote hello, before the policy did
    driver.call(chat[:1], driver.template.encode("hello<|im_end|>").ids, said("hello"))
    assert driver.output_node in driver.plan(chat).node_ids
    again = driver.plan([*chat, assistant("a"), user("w")])
    assert driver.calls[0].output_node in again.node_ids
