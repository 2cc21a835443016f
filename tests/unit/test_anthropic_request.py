"""Anthropic Messages, inbound: what real clients send is understood, and what cannot be honoured is refused."""

import json
import pickle
from typing import Any

import pytest

from gyre_proxy.dialects import BadRequest, load, node_of
from gyre_proxy.message import Message, Request, Sampling, ToolCall

NODE = "n_0123456789abcdef0123"
USER = {"role": "user", "content": "q"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}}


def parse(*messages: Any, **fields: Any) -> Request:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages) or [USER], **fields}
    return load("anthropic").parse(json.dumps(body).encode(), {})


def use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def result(call_id: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_string_content_is_one_text_block_and_cache_marks_say_nothing() -> None:
    plain = parse(USER, system="s")
    marked = parse(
        user(text("q", cache_control={"type": "ephemeral"})),
        system=[text("s", cache_control={"type": "ephemeral"})],
    )
    assert plain.messages == marked.messages == (Message(role="system", content="s"), Message(role="user", content="q"))


def test_blocks_of_a_message_stand_on_lines_of_their_own() -> None:
    assert parse(user(text("a"), text("b\n"), text("c"), text(""), text("d"))).messages[0].content == "a\nb\nc\nd"


def test_system_messages_stay_where_they_stand() -> None:
    late = {"role": "system", "content": "reminder"}
    sent = parse(USER, late, assistant(text("x")), USER, {"role": "system", "content": [text("reminder")]}, system="s")
    assert [m.role for m in sent.messages] == ["system", "user", "system", "assistant", "user", "system"]
    assert sent.messages[2] == sent.messages[5]


def test_billing_block_is_kept_raw_and_not_shown() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2.1.220.abc; cc_entrypoint=sdk-cli;")
    (system, _) = parse(USER, system=[billing, text("You are."), text("Do.")]).messages
    assert system.content == "You are.\nDo."
    assert system.raw == {"blocks": [billing]}
    assert [m.role for m in parse(USER, system=[billing]).messages] == ["user"]


def test_turn_with_reasoning_and_calls_names_its_node() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": NODE}
    turn = parse(USER, assistant(thinking, text("a"), use("x", a=1), text("b")), USER).messages[1]
    calls = (ToolCall(name="f", arguments={"a": 1}, id="x"),)
    assert turn == Message(role="assistant", content="ab", reasoning="hm", tool_calls=calls, node_hint=NODE)
    assert parse(USER, assistant(use(f"toolu_{NODE}_0")), user(result("x", ""))).messages[1].node_hint == NODE


def test_signature_of_another_server_is_no_hint_and_is_kept() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "EqoB"}
    turn = parse(USER, assistant(thinking, text("a")), USER).messages[1]
    assert turn.node_hint is None
    assert turn.raw == {"blocks": [{"type": "thinking", "signature": "EqoB"}]}


@pytest.mark.parametrize("other", ["n_0123", f"{NODE}x", f"toolu_{NODE}", f"xtoolu_{NODE}_1", "toolu_01A", "", None])
def test_other_ids_name_no_node(other: str | None) -> None:
    assert node_of(other) is None


def test_results_keep_their_order_and_come_before_the_text() -> None:
    sent = parse(
        USER,
        assistant(use("x"), use("y")),
        user(text("Tool loaded."), result("y", [text("2"), text("3")]), result("x", "1", is_error=True)),
    )
    assert sent.messages[2:] == (
        Message(role="tool", content="2\n3", tool_call_id="y"),
        Message(
            role="tool", content="1", tool_call_id="x", raw={"blocks": [{"type": "tool_result", "is_error": True}]}
        ),
        Message(role="user", content="Tool loaded."),
    )


def test_result_without_content_is_empty() -> None:
    block = {"type": "tool_result", "tool_use_id": "x"}
    assert parse(USER, assistant(use("x")), user(block)).messages[2].content == ""


def test_input_that_is_no_object_is_raw_text() -> None:
    turn = assistant({**use("x"), "input": [1, 2]}, {**use("y"), "input": '{"a": 1}'}, {**use("z"), "input": "{"})
    assert [call.arguments for call in parse(USER, turn, USER).messages[1].tool_calls] == ["[1,2]", {"a": 1}, "{"]


def test_two_results_for_one_call_are_refused_by_its_id() -> None:
    with pytest.raises(BadRequest, match="'x'"):
        parse(USER, assistant(use("x")), user(result("x", "1"), result("x", "2")))
    with pytest.raises(BadRequest, match="'x'"):
        parse(USER, assistant(use("x")), user(result("x", "1")), user(result("x", "1")))


def test_an_id_may_be_used_again_in_a_later_turn() -> None:
    parse(USER, assistant(use("x")), user(result("x", "1")), assistant(use("x")), user(result("x", "2")))


def test_unknown_blocks_and_fields_are_kept_raw() -> None:
    odd = {"type": "odd_block", "deep": {"a": [1]}}
    turn = {**assistant(odd, text("a", citations=None)), "stamp": 3}
    message = parse(USER, turn, USER).messages[1]
    assert message.content == "a"
    assert message.raw == {"blocks": [odd, {"type": "text", "citations": None}], "fields": {"stamp": 3}}


def test_an_unknown_block_of_a_client_is_shown_as_its_json() -> None:
    odd = {"type": "odd_block", "deep": {"a": [1]}}
    seen = '{"type":"odd_block","deep":{"a":[1]}}'
    late = {"role": "system", "content": [odd]}
    sent = parse(user(text("a"), odd), late, assistant(use("x")), user(result("x", [odd, text("b")])), system=[odd])
    assert [message.content for message in sent.messages] == [seen, f"a\n{seen}", seen, "", f"{seen}\nb"]
    assert sent.messages[1].raw == {"blocks": [odd]}


def test_empty_messages_are_empty_messages() -> None:
    sent = parse(user(), assistant(), {"role": "user", "content": ""}, {"role": "user", "content": None})
    assert [(m.role, m.content) for m in sent.messages] == [("user", ""), ("assistant", ""), ("user", ""), ("user", "")]


def test_a_schema_holds_the_reply() -> None:
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted, "effort": "low"}}, {"output_format": wanted}):
        assert json.loads(parse(**fields).sampling.json_schema or "") == schema
    assert parse(output_format=wanted, tools=[TOOL], tool_choice={"type": "none"}).sampling.json_schema


def test_pieces_of_one_turn_join_and_turns_of_their_own_do_not() -> None:
    node = f"toolu_{NODE}_"
    split = parse(USER, assistant(use(node + "0", a=1)), assistant(text("t"), use(node + "1", a=2)), USER)
    assert [m.role for m in split.messages] == ["user", "assistant", "user"]
    assert [call.id for call in split.messages[1].tool_calls] == [node + "0", node + "1"]
    text_first = parse(USER, assistant(text("t")), assistant(use(node + "0")), USER).messages
    assert (text_first[1].content, text_first[1].node_hint) == ("t", NODE)
    odd = [{"type": "odd_block", "n": n} for n in range(2)]
    with_raw = parse(USER, assistant(text("t"), odd[0]), assistant(use(node + "0"), odd[1]), USER).messages
    assert with_raw[1].raw == {"blocks": odd}
    cut = parse(USER, assistant(text("one")), assistant(text("two")), USER)
    assert [m.content for m in cut.messages] == ["q", "one", "two", "q"]


def test_deferred_tools_are_not_rendered_but_where_they_are_loaded() -> None:
    deferred = {**TOOL, "name": "g", "defer_loading": True}
    loaded = [{"type": "tool_reference", "tool_name": "g"}, {"type": "tool_reference", "tool_name": "gone"}]
    sent = parse(USER, assistant(use("x")), user(result("x", loaded)), tools=[TOOL, deferred])
    assert sent.tools == (FUNCTION,)
    first, second = sent.messages[2].content.split("\n")
    assert json.loads(first)["function"]["name"] == "g"
    assert second == "gone"
    outside = parse(user(text("Tool loaded."), *loaded), tools=[TOOL, deferred]).messages[0].content
    assert outside == f"Tool loaded.\n{first}\ngone"


def test_tools_of_choice_none_are_not_offered() -> None:
    assert parse(tools=[TOOL], tool_choice={"type": "none"}).tools == ()
    assert parse(tools=[TOOL], tool_choice={"type": "auto"}).tools == (FUNCTION,)


def test_sampling_is_what_the_client_asked_for() -> None:
    sent = parse(temperature=0, top_p=0.5, top_k=3, stop_sequences=["</b>"], stream=True, metadata={"user_id": "u"})
    assert sent.sampling == Sampling(max_tokens=9, temperature=0, top_p=0.5, top_k=3, stop=("</b>",))
    assert sent.stream
    assert sent.model == "m"


def test_the_fields_of_claude_code_are_accepted() -> None:
    parse(
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        thinking={"type": "adaptive", "display": "omitted"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        safeguards=[],
    )


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user({"type": "text"})]}, r"messages\.0\.content\.0\.text: "),
        ({"messages": [user(text("a"), IMAGE)]}, r"messages\.0\.content\.1: .*image"),
        ({"messages": [USER, assistant(use("x")), user(result("x", [IMAGE]))]}, r"messages\.2\.content\.0\.content\.0"),
        ({"messages": [user({"type": "document", "source": {}})]}, "document"),
        ({"messages": [USER, assistant(text("The answer is"))]}, "prefill"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\.0.*web_search"),
        ({"output_config": {"format": {"type": "xml"}}}, r"output_config\.format\.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, r"output_config\.format\.schema: .*NoneType"),
        ({"output_format": {"type": "json_schema", "schema": {}}, "tools": [TOOL]}, "no tool could be called"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"input_ids": [1]}, "input_ids"),
        ({"messages": [USER, assistant(use("x"), use("x")), USER]}, "ids of their own, got two with the id 'x'"),
        ({"messages": [user({"type": "search_result", "content": []})]}, "search_result"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses"),
        ({"context_management": {"edits": 5}}, "context_management"),
        ({"mcp_servers": [{"url": "http://a.example"}]}, "mcp_servers"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        parse(**fields)
    assert caught.value.param
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": NaN}', b"\xff", b"[" * 100_000, b'{"top_p": 1e999}'])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="JSON"):
        load("anthropic").parse(body, {})


def test_half_an_emoji_is_read_as_a_replacement_and_kept_in_the_pieces() -> None:
    body = rb'{"model": "m", "messages": [{"role": "user", "content": "cut \ud83d and \ud83d\ude9a"}]}'
    sent = load("anthropic").parse(body, {})
    assert sent.messages[0].content == "cut \ufffd and 🚚"
    assert b"".join(part.data for part in sent.body) == body


def test_numbers_read_the_same_beside_half_an_emoji() -> None:
    numbers = '"a": 123456789012345678901234567890, "b": 18446744073709551615, "c": 1.5'
    block = '{"type": "tool_use", "id": "x", "name": "f", "input": {%s, "text": "%s"}}'
    messages = '[{"role": "assistant", "content": [%s]}, {"role": "user", "content": "q"}]'
    bodies = ['{"model": "m", "messages": %s}' % (messages % (block % (numbers, end))) for end in ("", "\\ud83d")]
    plain, cut = ({**load("anthropic").parse(body.encode(), {}).messages[0].tool_calls[0].arguments} for body in bodies)
    assert (plain.pop("text"), cut.pop("text")) == ("", "\ufffd")
    assert plain == cut
    assert [type(value) for value in plain.values()] == [type(value) for value in cut.values()]


def test_errors_have_the_shape_of_the_wire() -> None:
    dialect = load("anthropic")
    body = json.loads(dialect.error(400, "prompt_too_long", dialect.too_long(215000, 200000)))
    assert body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 215000 tokens > 200000 maximum"},
    }
    assert dialect.statuses["overloaded"] == 529
