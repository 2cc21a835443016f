"""The official client libraries read our bytes over real HTTP: streamed and not, calls, errors, usage."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from gyre_proxy.message import Usage
from tests.support.wire_server import Script, serving

NODE = f"n_{1:020x}"
CALLS = (
    '<tool_call>\n{"name": "stat_bay", "arguments": {"bay": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "move", "arguments": {"crate": "é \\" 🚚", "to": 2.5}}\n</tool_call>'
)
TEXT = f"<think>\nLook first.\n</think>\n\nChecking ✅\u2028now.\n\n{CALLS} Done?"
TOOLS = [{"name": "stat_bay", "input_schema": {"type": "object", "properties": {}}}]


@pytest.fixture
def script() -> Script:
    return Script(text=TEXT)


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script) as base:
        yield base


@pytest.fixture
def messages(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        yield client


ASK = {"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": "Go."}]}


def streamed_message(client: anthropic.Anthropic) -> anthropic.types.Message:
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        return stream.get_final_message()


def test_anthropic_client_reads_a_stream_and_its_batch_twin(messages: anthropic.Anthropic) -> None:
    streamed = streamed_message(messages)
    assert [block.type for block in streamed.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    thinking, text, first, second, last = streamed.content
    assert (thinking.thinking, thinking.signature) == ("Look first.", NODE)
    assert (text.text, last.text) == ("Checking ✅\u2028now.", "Done?")
    assert (first.id, first.name, first.input) == (f"toolu_{NODE}_0", "stat_bay", {"bay": 1})
    assert (second.id, second.name, second.input) == (f"toolu_{NODE}_1", "move", {"crate": 'é " 🚚', "to": 2.5})
    assert streamed.stop_reason == "tool_use"
    usage = streamed.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (10, 20, 8)
    whole = messages.messages.create(**ASK)
    assert [contents(block, f"n_{2:020x}") for block in whole.content] == [contents(b, NODE) for b in streamed.content]
    assert (whole.stop_reason, whole.usage) == (streamed.stop_reason, streamed.usage)


def contents(block: Any, node: str) -> str:
    """A block but for the node it names and for what the client library adds to a stream."""
    return str(block.model_dump_json(exclude={"parsed_output"})).replace(node, "NODE")


def test_anthropic_client_sends_the_reply_back_as_it_was(messages: anthropic.Anthropic, script: Script) -> None:
    reply = streamed_message(messages)
    results = [
        {"type": "tool_result", "tool_use_id": b.id, "content": "1"} for b in reply.content if b.type == "tool_use"
    ]
    history = [*ASK["messages"], {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    script.text = "Fine."
    assert messages.messages.create(**{**ASK, "messages": history}).stop_reason == "end_turn"
    _, turn, first, second = script.seen[-1].messages
    assert (turn.node_hint, turn.reasoning, turn.content) == (NODE, "Look first.", "Checking ✅\u2028now.Done?")
    assert [call.arguments for call in turn.tool_calls] == [{"bay": 1}, {"crate": 'é " 🚚', "to": 2.5}]
    assert [first.tool_call_id, second.tool_call_id] == [call.id for call in turn.tool_calls]


@pytest.mark.parametrize(
    ("finish", "sequence", "reason"),
    [
        ("stop", None, "end_turn"),
        ("length", None, "max_tokens"),
        ("stop", "</b>", "stop_sequence"),
        ("refusal", None, "refusal"),
    ],
)
def test_anthropic_stop_reasons(
    messages: anthropic.Anthropic, script: Script, finish: str, sequence: str | None, reason: str
) -> None:
    script.text, script.finish, script.stop_sequence = "Some text", finish, sequence
    for message in (streamed_message(messages), messages.messages.create(**ASK)):
        assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_anthropic_client_reads_a_reply_of_nothing(messages: anthropic.Anthropic, script: Script) -> None:
    script.text = ""
    assert streamed_message(messages).content == messages.messages.create(**ASK).content == []


def test_anthropic_client_raises_on_an_error_inside_the_stream(messages: anthropic.Anthropic, script: Script) -> None:
    script.fail_after = 20
    with pytest.raises(anthropic.APIStatusError, match="the engine went away"):
        streamed_message(messages)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("prompt_too_long", anthropic.BadRequestError),
        ("authentication", anthropic.AuthenticationError),
        ("not_found", anthropic.NotFoundError),
        ("rate_limit", anthropic.RateLimitError),
        ("internal", anthropic.InternalServerError),
        ("overloaded", anthropic.InternalServerError),
    ],
)
def test_anthropic_client_knows_our_errors(
    messages: anthropic.Anthropic, script: Script, kind: str, error: type[anthropic.APIStatusError]
) -> None:
    script.error = (kind, "prompt is too long: 9 tokens > 8 maximum")
    with pytest.raises(error, match="prompt is too long") as caught:
        messages.messages.create(**ASK)
    assert caught.value.body["error"]["type"].endswith("_error")


def test_chat_client_reads_a_stream_and_its_batch_twin(chat: openai.OpenAI) -> None:
    with chat.chat.completions.stream(**ASK, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    whole = chat.chat.completions.create(**ASK)
    for number, completion in enumerate((streamed, whole), 1):
        (choice,) = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Checking ✅\u2028now.Done?"
        assert choice.message.reasoning_content == "Look first."
        calls = choice.message.tool_calls
        assert [call.id for call in calls] == [f"call_n_{number:020x}_{i}" for i in range(2)]
        assert [call.function.name for call in calls] == ["stat_bay", "move"]
        assert calls[0].function.arguments == '{"bay":1}'
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (30, 8, 38)
        assert usage.prompt_tokens_details.cached_tokens == 20


def test_chat_usage_comes_only_when_asked_for(chat: openai.OpenAI) -> None:
    assert all(chunk.usage is None for chunk in chat.chat.completions.create(**ASK, stream=True))
    asked = chat.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage.total_tokens for chunk in asked if chunk.usage is not None] == [38]


@pytest.mark.parametrize(("finish", "reason"), [("stop", "stop"), ("length", "length"), ("refusal", "content_filter")])
def test_chat_finish_reasons(chat: openai.OpenAI, script: Script, finish: str, reason: str) -> None:
    script.text, script.finish = "Some text", finish
    script.usage = Usage(prompt_tokens=1, output_tokens=2)
    chunks = list(chat.chat.completions.create(**ASK, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [reason]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Some text"
    assert chat.chat.completions.create(**ASK).choices[0].finish_reason == reason


def test_chat_client_raises_on_an_error_inside_the_stream(chat: openai.OpenAI, script: Script) -> None:
    script.fail_after = 20
    with pytest.raises(openai.APIError, match="the engine went away"):
        list(chat.chat.completions.create(**ASK, stream=True))


def test_chat_client_knows_our_errors(chat: openai.OpenAI, script: Script) -> None:
    with pytest.raises(openai.BadRequestError, match="n: must be 1") as refused:
        chat.chat.completions.create(**ASK, n=2)
    assert refused.value.param == "n"
    script.error = ("prompt_too_long", "too long")
    with pytest.raises(openai.BadRequestError) as caught:
        chat.chat.completions.create(**ASK)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    script.error = ("rate_limit", "slow down")
    with pytest.raises(openai.RateLimitError):
        chat.chat.completions.create(**ASK)
