"""Streams of hosted APIs become messages: the recorded form holds no wire events, and nothing is lost on the way."""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gyre_proxy.observe.bodies import Secrets, UndecodableError, decoded
from gyre_proxy.observe.events import StreamEnd, read_events
from gyre_proxy.observe.wires import anthropic, openai_chat, openai_responses
from tests.support.provider import anthropic_stream, chat_stream, responses_stream, sse

CASES = Path(__file__).parents[1] / "data" / "cases"
TEXT = {"type": "text", "text": "Grüße 😀, bay 12."}
CALL = {"type": "tool_use", "id": "toolu_a", "name": "stat_bay", "input": {"bay": 12, "deep": [1.5, None]}}


def test_case_s10_a_recorded_stream_is_a_message() -> None:
    events, odd = read_events((CASES / "S10.sse").read_bytes())
    wanted = json.loads((CASES / "S10.json").read_text())["expected"]["message"]
    said = anthropic.streamed(events)
    assert said.form == wanted
    assert (said.whole, said.error, said.odd, odd) == (True, None, [], [])
    assert said.message is not None
    assert [call.arguments for call in said.message.tool_calls] == [{"bay": 12}, {}]


@pytest.mark.parametrize("cut", ["\n", "\r\n", "\r"])
def test_any_line_ending_and_spacing_of_events_is_read(cut: str) -> None:
    lines = [":comment", "event: a", 'data:{"n":1}', "", "", 'data: {"n":', "data: 2}", "", "data: [DONE]", "", ""]
    text = cut.join(lines)
    assert read_events(text.encode()) == ([{"n": 1}, {"n": 2}], [])


STREAMS: dict[str, list[Any]] = {
    "anthropic": anthropic_stream(TEXT, CALL),
    "chat": chat_stream("Hello", ("call_a", "stat_bay", '{"bay": 12}')),
    "responses": responses_stream({"type": "message", "role": "assistant", "content": [TEXT]}),
}


@pytest.mark.parametrize("name", list(STREAMS))
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_the_end_of_a_stream_is_seen_when_its_last_event_is_whole_and_not_before(name: str, size: int) -> None:
    body = b"".join(sse(*STREAMS[name]))
    end, kept = StreamEnd(), bytearray()
    for at in range(0, len(body), size):
        before = len(kept)
        kept += body[at : at + size]
        if end.reached(kept):
            assert before < len(body.rstrip(b"\n")) + 2 <= len(kept)
            return
    raise AssertionError("the end was not seen")


def test_text_that_speaks_of_an_end_is_none() -> None:
    text = {"type": "text", "text": "event: message_stop\n\ndata: [DONE]\n\n"}
    body = b"".join(sse(*anthropic_stream(text)[:-1]))
    assert not StreamEnd().reached(bytearray(body))


def test_a_cut_stream_keeps_what_came() -> None:
    said = anthropic.streamed(anthropic_stream(TEXT, CALL)[:9])
    assert not said.whole
    assert said.message is not None
    assert said.message.content == TEXT["text"]
    assert said.message.tool_calls[0].arguments == '{"b'
    said = openai_responses.streamed(responses_stream({"type": "function_call", "call_id": "c", "name": "f"})[:-1])
    assert not said.whole
    assert said.message is not None
    assert said.message.tool_calls[0].name == "f"
    assert not openai_chat.streamed(chat_stream("Hello")[:2]).whole


def test_unknown_events_blocks_and_deltas_are_kept() -> None:
    new = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    events = [
        *anthropic_stream(TEXT)[:-2],
        {"type": "content_block_start", "index": 1, "content_block": new},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "new_delta", "x": 1}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {"url": "u"}}},
        {"type": "new_event", "y": 2},
        *anthropic_stream(TEXT)[-2:],
    ]
    said = anthropic.streamed(events)
    assert said.whole
    raw = json.dumps(said.message.raw if said.message else None)
    for kept in ('"new_delta"', '"new_event"', '"server_tool_use"', '"citation'):
        assert kept in raw
    assert said.odd == ["1 events of unknown type are kept with the message"]


def test_an_error_event_is_the_error() -> None:
    error = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    assert anthropic.streamed([*anthropic_stream(TEXT)[:4], error]).error == "overloaded_error: Overloaded"
    failed = {"type": "response.failed", "response": {"status": "failed", "error": {"code": "x", "message": "y"}}}
    assert openai_responses.streamed([failed]).error == "x: y"
    assert openai_chat.streamed([{"error": {"code": 429, "message": "slow"}}]).error == "429: slow"


def test_usage_adds_what_later_events_say() -> None:
    said = anthropic.streamed(anthropic_stream(TEXT))
    assert said.usage == {
        "input_tokens": 9,
        "cache_read_input_tokens": 100,
        "cache_creation_input_tokens": 20,
        "output_tokens": 7,
    }
    assert (openai_chat.streamed(chat_stream("Hi")).usage or {})["completion_tokens"] == 6
    assert (openai_responses.streamed(responses_stream()).usage or {})["output_tokens"] == 6


def test_a_length_limit_is_told_apart() -> None:
    assert anthropic.reply({"content": [], "stop_reason": "max_tokens"}).at_limit
    assert openai_chat.reply({"choices": [{"message": {}, "finish_reason": "length"}]}).at_limit
    cut = {"output": [], "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    assert openai_responses.reply(cut).at_limit


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw deflate", "br", "zstd", "identity", "gzip, zstd"])
def test_bodies_are_decoded_and_a_cut_one_gives_its_begin(encoding: str) -> None:
    import pyarrow as pa

    plain = json.dumps([str(n) for n in range(5000)]).encode()
    raw = zlib.compressobj(wbits=-15)
    packed = {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "raw deflate": raw.compress(plain) + raw.flush(),
        "br": pa.Codec("brotli").compress(plain, asbytes=True),
        "zstd": zstandard.compress(plain),
        "identity": plain,
        "gzip, zstd": zstandard.compress(gzip.compress(plain)),
    }[encoding]
    name = encoding.removeprefix("raw ")
    assert decoded(packed, name, 1 << 20) == plain
    assert plain.startswith(decoded(packed[: len(packed) // 2], name, 1 << 20)[:100])
    assert len(decoded(packed, name, 1000)) <= (1000 if encoding != "identity" else len(plain))


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "br", "new"])
def test_a_damaged_or_unknown_encoding_is_said(encoding: str) -> None:
    with pytest.raises(UndecodableError):
        decoded(b"\x00\x01\x02 not packed at all", encoding, 1 << 20)


def test_credentials_are_known_by_the_names_of_their_headers() -> None:
    headers = {"authorization": "Bearer secret-one", "x-api-key": "secret-two", "cookie": "a=1; b=secret-three"}
    headers |= {"user-agent": "agent/1.0.0", "chatgpt-account-id": "secret-four", "content-length": "12345678"}
    secrets = Secrets(headers, "api_key=secret-five&beta=truetruetrue")
    text = b"secret-one secret-two secret-three secret-four secret-five agent/1.0.0 12345678 truetruetrue"
    assert secrets.removed(text) == b" ".join([b"[credential]"] * 5) + b" agent/1.0.0 12345678 truetruetrue"
    assert secrets.removed(b"Bearer secret-one") == b"[credential]"
