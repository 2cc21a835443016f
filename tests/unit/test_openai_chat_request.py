"""OpenAI Chat Completions, inbound: what real clients send is understood, what cannot be honoured is refused."""

import json
from typing import Any

import pytest

from gyre_proxy.dialects import WIRES, BadRequest, ReplyContext, load
from gyre_proxy.dialects.base import ERROR_KINDS
from gyre_proxy.message import Message, Request, Sampling, ToolCall, Usage

NODE = "n_0123456789abcdef0123"
USER = {"role": "user", "content": "q"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False}}


def parse(*messages: Any, **fields: Any) -> Request:
    body = {"model": "m", "messages": list(messages) or [USER], **fields}
    return load("openai_chat").parse(json.dumps(body).encode(), {})


def called(call_id: str | None, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_roles_stand_where_they_stand() -> None:
    sent = parse({"role": "developer", "content": "s"}, USER, {"role": "system", "content": "late"})
    assert [(m.role, m.content) for m in sent.messages] == [("system", "s"), ("user", "q"), ("system", "late")]


def test_parts_and_strings_are_the_same_message() -> None:
    part = {"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}
    assert parse({"role": "user", "content": [part]}).messages == parse(USER).messages


def test_parts_of_a_user_stand_on_lines_and_parts_of_a_turn_join() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    sent = parse(*({"role": role, "content": parts} for role in ("user", "assistant", "user")))
    assert [message.content for message in sent.messages] == ["a\nb", "ab", "a\nb"]


@pytest.mark.parametrize("content", [None, "", []])
def test_absent_text_of_a_turn_is_empty(content: Any) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [called("x", '{"a": 1}')]}
    assert parse(USER, turn, USER).messages[1].content == ""


def test_turn_with_reasoning_and_calls_names_its_node() -> None:
    calls = [called(f"call_{NODE}_0", '{"a": 1}'), called("functions.f:1", "no json"), called(None, "")]
    turn = {"role": "assistant", "content": "t", "reasoning_content": "hm", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": "functions.f:1", "content": [{"type": "text", "text": "1"}]}]
    _, message, result = parse(USER, turn, *results).messages
    assert message == Message(
        role="assistant",
        content="t",
        reasoning="hm",
        tool_calls=(
            ToolCall(name="f", arguments={"a": 1}, id=f"call_{NODE}_0"),
            ToolCall(name="f", arguments="no json", id="functions.f:1"),
            ToolCall(name="f", arguments={}, id=None),
        ),
        node_hint=NODE,
    )
    assert result == Message(role="tool", content="1", tool_call_id="functions.f:1")


def test_reasoning_by_its_other_name() -> None:
    assert parse(USER, {"role": "assistant", "content": "t", "reasoning": "hm"}, USER).messages[1].reasoning == "hm"


def test_integers_beyond_64_bits_stay_as_written() -> None:
    text = '{"a": 123456789012345678901234567890}'
    turn = {"role": "assistant", "tool_calls": [called("x", text)]}
    assert parse(USER, turn, USER).messages[1].tool_calls[0].arguments == text


def test_unknown_fields_are_kept_raw() -> None:
    turn = {"role": "assistant", "content": "t", "thinking_blocks": [1], "refusal": None}
    assert parse(USER, turn, USER).messages[1].raw == {"fields": {"thinking_blocks": [1], "refusal": None}}


def test_tools_are_the_same_over_both_wires() -> None:
    block = {"name": "f", "description": "d", "input_schema": SCHEMA}
    body = {"model": "m", "messages": [USER], "tools": [block]}
    assert parse(tools=[TOOL]).tools == load("anthropic").parse(json.dumps(body).encode(), {}).tools
    assert parse(tools=[TOOL], tool_choice="none").tools == ()


def test_sampling_is_what_the_client_asked_for() -> None:
    sent = parse(temperature=0, max_tokens=5, seed=3, stop="x", stream=True, stream_options={"include_usage": True})
    assert sent.sampling == Sampling(temperature=0, max_tokens=5, seed=3, stop=("x",))
    assert sent.stream
    assert sent.include_usage
    assert parse(max_completion_tokens=7, stop=["x", "y"]).sampling == Sampling(max_tokens=7, stop=("x", "y"))


def test_a_schema_holds_the_reply() -> None:
    told = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    assert json.loads(parse(response_format=told).sampling.json_schema or "") == SCHEMA
    assert parse(response_format={"type": "json_object"}).sampling.json_schema == '{"type":"object"}'
    assert parse(response_format={"type": "text"}, tools=[TOOL]).sampling.json_schema is None
    assert parse(response_format=told, tools=[TOOL], tool_choice="none").sampling.json_schema is not None
    ordered = {"properties": {"z": {}, "a": {}}, "type": "object"}
    told = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ordered}}
    assert parse(response_format=told).sampling.json_schema == json.dumps(ordered, separators=(",", ":"))


def test_logprobs_are_asked_for() -> None:
    assert parse(logprobs=True, top_logprobs=0).logprobs
    assert not parse().logprobs


def test_a_last_assistant_message_is_history_and_not_the_beginning_of_the_reply() -> None:
    assert [message.role for message in parse(USER, {"role": "assistant", "content": "So"}).messages] == [
        "user",
        "assistant",
    ]


def test_an_unknown_part_is_shown_as_its_json() -> None:
    odd = {"type": "odd", "a": [1], "cache_control": {"type": "ephemeral"}}
    (message,) = parse({"role": "user", "content": [{"type": "text", "text": "see"}, odd]}).messages
    assert (message.content, message.raw) == ('see\n{"type":"odd","a":[1]}', {"blocks": [{"type": "odd", "a": [1]}]})
    turn = parse(USER, {"role": "assistant", "content": [odd]}, USER).messages[1]
    assert (turn.content, turn.raw) == ("", message.raw)


def test_a_result_without_an_id_is_a_result() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [called(None, "{}")]}
    assert parse(USER, call, {"role": "tool", "content": "r"}).messages[2] == Message(role="tool", content="r")


def test_settings_that_ask_for_nothing_are_accepted() -> None:
    parse(
        n=1, logprobs=False, top_logprobs=0, presence_penalty=0.0, logit_bias={}, response_format={"type": "text"},
        parallel_tool_calls=True, store=False, reasoning_effort="high", user="u", audio=None, modalities=["text"],
    )  # fmt: skip
    parse(parallel_tool_calls=False, service_tier="auto", metadata={"a": "b"}, verbosity="low")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2}, "n: "),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs: "),
        ({"temperature": "hot"}, "temperature: "),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: .*'grammar'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema.schema: .*NoneType"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format: .*no tool could be called"),
        ({"stop": ""}, "stop: "),
        ({"stop": ["x", ""]}, "stop: "),
        ({"input_ids": [1, 2, 3]}, "input_ids: "),
        ({"messages": [USER, {"role": "assistant", "content": "So", "prefix": True}]}, r"messages\.1\.prefix"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [called("x", "{}"), called("x", "{}")]}, USER]},
            "ids of their own, got two with the id 'x'",
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, r"tools\.0\.type"),
        ({"regex": "a+"}, "regex"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, r"messages\.0\.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "tool", "tool_call_id": "x", "content": "1"}] * 2}, "'x'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse(**fields)


def test_a_prompt_beyond_the_window_has_the_code_that_harnesses_know() -> None:
    dialect = load("openai_chat")
    error = json.loads(dialect.error(400, "prompt_too_long", dialect.too_long(9, 8)))["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert "8 tokens" in error["message"]
    assert "9 tokens" in error["message"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_every_kind_of_error_has_a_status_and_a_body(wire: str, kind: str) -> None:
    dialect = load(wire)
    body = json.loads(dialect.error(dialect.statuses[kind], kind, "wanted a, got b"))
    assert body["error"]["message"] == "wanted a, got b"
    assert 400 <= dialect.statuses[kind] < 600


@pytest.mark.parametrize("wire", WIRES)
def test_an_aborted_reply_cannot_end_cleanly(wire: str) -> None:
    call = ReplyContext(call_id="c", node_id=NODE, model="m", created=1, prompt_tokens=1)
    encoder = load(wire).stream(call)
    encoder.start()
    with pytest.raises(ValueError, match="abort"):
        encoder.finish("abort", Usage(prompt_tokens=1, output_tokens=1))
