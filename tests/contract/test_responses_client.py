"""The official client reads our Responses wire over real HTTP: streamed and not, calls, errors, what it sends back."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.contract.test_official_clients import NODE, TEXT
from tests.support.wire_fold import sse
from tests.support.wire_server import Script, serving

ASK: dict[str, Any] = {"model": "any", "input": "Go."}
GROUP = {
    "type": "namespace",
    "name": "agents",
    "description": "About agents.",
    "tools": [{"type": "function", "name": "spawn", "description": "Start one.", "parameters": {"type": "object"}}],
}


@pytest.fixture
def script() -> Script:
    return Script(text=TEXT)


@pytest.fixture
def client(script: Script) -> Iterator[openai.OpenAI]:
    with serving(script) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as made:
        yield made


def streamed(client: openai.OpenAI, **fields: Any) -> Response:
    with client.responses.stream(**{**ASK, **fields}) as stream:
        return stream.get_final_response()


def test_the_client_reads_a_stream_and_its_batch_twin(client: openai.OpenAI) -> None:
    first, second = streamed(client), client.responses.create(**ASK)
    for number, response in enumerate((first, second), 1):
        node = f"n_{number:020x}"
        assert [item.type for item in response.output] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "message",
        ]
        thought, text, one, two, last = response.output
        assert (thought.content[0].text, thought.encrypted_content) == ("Look first.", node)
        assert (text.content[0].text, last.content[0].text) == ("Checking ✅\u2028now.", "Done?")
        assert (one.call_id, one.name, one.arguments) == (f"call_{node}_0", "stat_bay", '{"bay":1}')
        assert (two.call_id, json.loads(two.arguments)) == (f"call_{node}_1", {"crate": 'é " 🚚', "to": 2.5})
        assert len({item.id for item in response.output}) == 5
        assert response.status == "completed"
        assert (response.output_text, response.error) == ("Checking ✅\u2028now.Done?", None)
        usage = response.usage
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (30, 8, 38)
        assert usage.input_tokens_details.cached_tokens == 20


def test_every_event_is_one_of_the_official_models(client: openai.OpenAI, script: Script) -> None:
    known = TypeAdapter(ResponseStreamEvent)
    with client.responses.with_streaming_response.create(**ASK, stream=True) as raw:
        events = sse(raw.read())
    for _, event in events:
        known.validate_python(event, strict=False)
    kinds = {kind for kind, _ in events}
    assert {"response.created", "response.in_progress", "response.completed", "response.output_item.done"} <= kinds
    whole = client.responses.with_raw_response.create(**ASK).http_response.json()
    Response.model_validate(whole)


def test_the_client_sends_the_reply_back_as_it_was(client: openai.OpenAI, script: Script) -> None:
    reply = streamed(client)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "1"}
        for item in reply.output
        if item.type == "function_call"
    ]
    script.text = "Fine."
    client.responses.create(model="any", input=[{"role": "user", "content": "Go."}, *reply.output, *results])
    _, turn, first, second = script.seen[-1].messages
    assert (turn.node_hint, turn.reasoning, turn.content) == (NODE, "Look first.", "Checking ✅\u2028now.Done?")
    assert [call.arguments for call in turn.tool_calls] == [{"bay": 1}, {"crate": 'é " 🚚', "to": 2.5}]
    assert [first.tool_call_id, second.tool_call_id] == [call.id for call in turn.tool_calls]
    assert turn.raw is None


def test_a_call_of_a_grouped_tool_names_its_group(client: openai.OpenAI, script: Script) -> None:
    script.text = '<tool_call>\n{"name": "agents.spawn", "arguments": {}}\n</tool_call>'
    for response in (streamed(client, tools=[GROUP]), client.responses.create(**ASK, tools=[GROUP])):
        (call,) = response.output
        assert (call.namespace, call.name) == ("agents", "spawn")
        assert [tool.type for tool in response.tools] == ["namespace"]
    (told,) = script.seen[-1].tools
    assert told["function"]["description"] == "About agents.\n\nStart one."
    client.responses.create(
        model="any", input=[{"role": "user", "content": "q"}, call, {"role": "user", "content": "r"}]
    )
    assert script.seen[-1].messages[1].tool_calls[0].name == "agents.spawn"


def test_a_reply_repeats_what_was_asked(client: openai.OpenAI) -> None:
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 7, "temperature": 0.5}
    for response in (streamed(client, **asked), client.responses.create(**ASK, **asked)):
        assert {name: getattr(response, name) for name in asked} == asked
        assert response.model == "any"


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("refusal", "content_filter")])
def test_a_reply_that_was_cut_is_incomplete(client: openai.OpenAI, script: Script, finish: str, reason: str) -> None:
    script.text, script.finish = "Some text", finish
    with client.responses.stream(**ASK) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    for response in (last.response, client.responses.create(**ASK)):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", reason)
        assert [item.status for item in response.output] == ["incomplete"]
        assert response.output_text == "Some text"


def test_a_reply_of_nothing(client: openai.OpenAI, script: Script) -> None:
    script.text = ""
    assert streamed(client).output == client.responses.create(**ASK).output == []


def test_the_client_raises_on_an_error_inside_the_stream(client: openai.OpenAI, script: Script) -> None:
    script.fail_after = 40
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="the engine went away"):
        seen.extend(client.responses.create(**ASK, stream=True))
    assert (seen[-1].type, seen[-1].response.error.message) == ("response.failed", "the engine went away")


def test_the_client_knows_our_errors(client: openai.OpenAI, script: Script) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id: 'resp_1' is not supported") as refused:
        client.responses.create(**ASK, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    script.error = ("prompt_too_long", "too long")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    script.error = ("rate_limit", "slow down")
    with pytest.raises(openai.RateLimitError):
        client.responses.create(**ASK)
