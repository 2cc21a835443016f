"""OpenAI Responses, inbound: flat items become turns, odd shapes have a rule, what cannot be honoured is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from gyre_proxy.dialects import BadRequest, load
from gyre_proxy.dialects.openai_responses import _REFUSED
from gyre_proxy.message import Message, Request, Sampling, ToolCall
from gyre_proxy.same_turn import canonical_message

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
NODE, OTHER = "n_0123456789abcdef0123", "n_ffffffffffffffffffff"
USER = {"role": "user", "content": "q"}
CODEX = {"originator": "codex_exec"}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}


def parse(sent: Any, headers: dict[str, str] | None = None, **fields: Any) -> Request:
    return load("openai_responses").parse(json.dumps({"model": "m", "input": sent, **fields}).encode(), headers or {})


def thought(node: str, text: str = "hm", index: int = 0) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "id": f"rs_{node}_{index}",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": node,
    }


def said(node: str, text: str, index: int = 1) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_{node}_{index}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": '{"a": 1}', **fields}


def result(call_id: str, output: Any = "1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_p10_adjacent_assistant_items_are_one_turn() -> None:
    case = json.loads((CASES / "P10.json").read_text())
    request = load("openai_responses").parse(json.dumps(case["input"]["request"]).encode(), {})
    told = []
    for message in request.messages:
        plain = {"role": message.role, "content": message.content}
        if message.reasoning:
            plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
        if message.tool_call_id:
            plain["tool_call_id"] = message.tool_call_id
        told.append(plain)
    assert told == case["expected"]["chat_messages"]


def test_p11_a_string_and_system_texts() -> None:
    case = json.loads((CASES / "P11.json").read_text())
    first, second, third = (
        load("openai_responses").parse(json.dumps(body).encode(), {}).messages for body in case["input"]["requests"]
    )
    assert first == parse([{"role": "user", "content": "Count bay 6."}]).messages
    assert [(m.role, m.content) for m in second] == [("system", "Be brief.\nMetric units."), ("user", "Count bay 6.")]
    assert [(m.role, m.content) for m in third] == [("user", "Count bay 6."), ("system", "Metric units.")]


def test_items_without_type_id_or_status_are_those_with_them() -> None:
    bare = parse([USER, {"role": "assistant", "content": "t"}, USER]).messages
    part = {"type": "output_text", "text": "t", "annotations": []}
    full = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [part]}
    asked = {"type": "message", "id": "x", "role": "user", "content": [{"type": "input_text", "text": "q"}]}
    assert parse([asked, full, asked]).messages == bare


def test_a_turn_names_its_node_by_any_of_its_items() -> None:
    turn = [thought(NODE), said(NODE, "t"), called(f"call_{NODE}_0", id=f"fc_{NODE}_2")]
    _, message, answer = parse([USER, *turn, result(f"call_{NODE}_0", [{"type": "input_text", "text": "1"}])]).messages
    assert message == Message(
        role="assistant",
        content="t",
        reasoning="hm",
        tool_calls=(ToolCall(name="f", arguments={"a": 1}, id=f"call_{NODE}_0"),),
        node_hint=NODE,
    )
    assert answer == Message(role="tool", content="1", tool_call_id=f"call_{NODE}_0")
    for item in turn:
        assert parse([USER, item, USER]).messages[1].node_hint == NODE
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": NODE}
    assert parse([USER, hidden, {"role": "assistant", "content": "t"}, USER]).messages[1].node_hint == NODE


def test_results_between_the_calls_of_one_turn_do_not_split_it() -> None:
    one, two = f"call_{NODE}_0", f"call_{NODE}_1"
    messages = parse([USER, called(one), result(one), called(two), result(two)]).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in messages[1].tool_calls] == [one, two]
    apart = parse([USER, called("a"), result("a"), called("b"), result("b")]).messages
    assert [message.role for message in apart] == ["user", "assistant", "tool", "assistant", "tool"]


def test_what_is_left_of_a_reply_that_broke_off_is_no_turn() -> None:
    asked = parse([USER]).messages
    assert parse([USER, thought(NODE)]).messages == asked
    assert parse([USER, thought(NODE), said(NODE, "t")]).messages == asked
    turn = [thought(OTHER), called(f"call_{OTHER}_0")]
    after = [*turn, result(f"call_{OTHER}_0")]
    assert parse([USER, thought(NODE), thought(NODE, index=3), *after]).messages == parse([USER, *after]).messages
    assert parse([USER, thought(NODE), USER]).messages[1].reasoning == "hm"


def test_items_that_were_sent_twice_count_once() -> None:
    turn = [thought(NODE), called(f"call_{NODE}_0")]
    after = [*turn, result(f"call_{NODE}_0")]
    assert parse([USER, thought(NODE), *after]).messages == parse([USER, *after]).messages


def test_a_grouped_tool_has_one_name_in_prompt_and_history() -> None:
    group = {"type": "namespace", "name": "g", "tools": [TOOL]}
    request = parse([USER, called("c", namespace="g"), result("c")], tools=[TOOL, group])
    assert [tool["function"]["name"] for tool in request.tools] == ["f", "g.f"]
    assert request.namespaces == {"g.f": "g"}
    assert request.messages[1].tool_calls[0].name == "g.f"


def test_tools_are_as_on_the_other_wires() -> None:
    chat = {"type": "function", "function": {key: TOOL[key] for key in ("name", "description", "parameters")}}
    body = {"model": "m", "messages": [USER], "tools": [chat]}
    assert parse("q", tools=[TOOL]).tools == load("openai_chat").parse(json.dumps(body).encode(), {}).tools
    assert parse("q", tools=[TOOL], tool_choice="none").tools == ()
    assert parse("q", tools=[{**TOOL, "defer_loading": True}]).tools == ()


def test_only_codex_may_offer_a_search_that_nobody_runs() -> None:
    search = {"type": "web_search", "external_web_access": True}
    request = parse("q", CODEX, tools=[TOOL, search])
    assert [tool["function"]["name"] for tool in request.tools] == ["f"]
    assert [tool["type"] for tool in request.echo["tools"]] == ["function"]
    with pytest.raises(BadRequest, match=r"tools\.0: only function tools .*'web_search'"):
        parse("q", tools=[search])
    with pytest.raises(BadRequest, match="tool_choice"):
        parse("q", CODEX, tools=[search], tool_choice={"type": "web_search"})


def test_items_and_parts_that_nobody_knows_are_shown_as_they_are() -> None:
    strange = {"type": "weather_report", "sky": "grey"}
    shown, asked = parse([strange, {"role": "user", "content": [strange]}]).messages
    assert (shown.role, shown.content) == ("user", '{"type":"weather_report","sky":"grey"}')
    assert (asked.content, asked.raw) == (shown.content, {"blocks": [strange]})


def test_unknown_fields_are_kept_and_change_nothing() -> None:
    assert parse([{**USER, "extra": 1}]).messages[0].raw == {"fields": {"extra": 1}}
    assert canonical_message(parse([{**USER, "extra": 1}]).messages[0]) == canonical_message(parse([USER]).messages[0])
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}]}
    sent = parse([USER, {**foreign, "encrypted_content": "gAAA"}, USER]).messages[1]
    assert (sent.reasoning, sent.node_hint) == ("s", None)
    assert sent.raw == {"blocks": [{"type": "reasoning", "encrypted_content": "gAAA"}]}


def test_sampling_is_read_and_neutral_settings_pass() -> None:
    request = parse(
        "q",
        max_output_tokens=7, temperature=0.5, top_p=0.9, stop="x", stream=True, store=True, background=False,
        truncation="disabled", previous_response_id=None, include=["reasoning.encrypted_content"],
        reasoning={"effort": "high", "summary": "auto"}, text={"format": {"type": "text"}, "verbosity": "low"},
        parallel_tool_calls=False, tools=[], tool_choice="auto", prompt_cache_key="k", client_metadata={"a": "b"},
    )  # fmt: skip
    assert request.sampling == Sampling(max_tokens=7, temperature=0.5, top_p=0.9, stop=("x",))
    assert request.stream
    assert request.echo["reasoning"] == {"effort": "high", "summary": "auto"}
    assert b"".join(part.data for part in request.body).startswith(b'{"model": "m", "input": "q"')


def test_every_refused_field_is_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "responses.md").read_text()
    assert [field for field in _REFUSED if f"`{field}`" not in page] == []


def test_a_schema_holds_the_reply() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert json.loads(parse("q", text={"format": wanted}).sampling.json_schema or "") == schema
    assert parse("q", text={"format": {"type": "json_object"}}).sampling.json_schema == '{"type":"object"}'
    assert parse("q", text={"format": wanted}, tools=[TOOL], tool_choice="none").sampling.json_schema
    assert parse("q", text={"verbosity": "low"}).sampling.json_schema is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"generate": False}, "generate"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text.format"),
        ({"stop": [""]}, "stop"),
        ({"input_ids": [1]}, "input_ids"),
        ({"input": [USER, called("c", id="a"), called("c", id="b"), result("c")]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools.0.type"),
        ({"tools": [{"type": "local_shell"}]}, "tools.0.type"),
        ({"tools": [{"type": "namespace", "name": "g", "tools": [{"type": "x"}]}]}, "tools.0.tools.0.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input.0"),
        ({"input": [{"type": "additional_tools", "role": "developer", "tools": [TOOL]}, USER]}, "input.0"),
        ({"input": [USER, {"type": "custom_tool_call", "call_id": "c", "name": "x", "input": "y"}]}, "input.1"),
        ({"input": [USER, {"type": "function_call", "name": "f"}]}, "input.1.call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [USER, called("c"), result("c", [{"type": "input_image", "image_url": "x"}])]}, "input.2.output.0"),
        ({"input": [USER, called("c"), result("c"), result("c")]}, "input"),
        ({"input": [USER, {"role": "assistant", "content": "The answer is"}]}, "input"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**{"sent": "q", **{("sent" if name == "input" else name): value for name, value in fields.items()}})
    assert caught.value.param == param
    assert str(caught.value).startswith(param.removesuffix(".type"))
