"""Outside cases P01, P03, P07, S01, S02, S04 and S06, from the engine's ids to the bytes on the wire."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre_proxy.dialects import BadRequest, ReplyContext, load
from gyre_proxy.message import ReplyEvent, Usage
from gyre_proxy.parse import Detokenizer, ReplyParser, fold, hidden_ids, parse_reply
from tests.support.toy_tokenizer import SPECIAL, ToyTokenizer, encode
from tests.support.wire_fold import fold_anthropic, fold_chat, sse

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
CALL = ReplyContext(call_id="c", node_id="n_" + "0" * 20, model="toy", created=1, prompt_tokens=20)
FINISH = {"stop": "stop", "length": "length"}


def case(name: str) -> dict[str, Any]:
    return dict(json.loads((CASES / f"{name}.json").read_text()))


def deltas(reply: dict[str, Any]) -> list[list[int]]:
    return [delta["ids"] for delta in reply["deltas"]]


def events_of(ids: list[list[int]]) -> Iterator[ReplyEvent]:
    detokenizer, parser = Detokenizer(ToyTokenizer(), hidden_ids(SPECIAL)), ReplyParser()
    for delta in ids:
        yield from parser.feed(detokenizer.feed(delta))
    yield from parser.finish()


def stream(wire: str, reply: dict[str, Any]) -> bytes:
    encoder = load(wire).stream(CALL)
    parts = [encoder.start(), *(encoder.event(event) for event in events_of(deltas(reply)))]
    usage = Usage(prompt_tokens=20, output_tokens=sum(map(len, deltas(reply))))
    return b"".join([*parts, encoder.finish(FINISH[reply["finish"]["type"]], usage)])


def batch(wire: str, reply: dict[str, Any]) -> dict[str, Any]:
    detokenizer = Detokenizer(ToyTokenizer(), hidden_ids(SPECIAL))
    text = detokenizer.feed(token for delta in deltas(reply) for token in delta)
    usage = Usage(prompt_tokens=20, output_tokens=sum(map(len, deltas(reply))))
    whole = parse_reply(text, FINISH[reply["finish"]["type"]])
    return dict(json.loads(load(wire).batch(CALL, whole, usage)))


def blocks(message: dict[str, Any]) -> list[list[Any]]:
    return [
        ["tool_use", block["name"], block["input"]] if block["type"] == "tool_use" else [block["type"], block["text"]]
        for block in message["content"]
    ]


@pytest.mark.parametrize("name", ["P01", "P03", "S04"])
def test_streamed_blocks_are_those_expected(name: str) -> None:
    read = case(name)
    for reply in read["input"]["engine_script"]:
        # fold_anthropic asserts one start, one stop and an index of its own for each block.
        message = fold_anthropic(stream("anthropic", reply))
        assert blocks(message) == read["expected"]["content_blocks"]
        assert message["stop_reason"] == read["expected"].get("stop_reason", "tool_use")
        assert message == batch("anthropic", reply)
        chat = fold_chat(stream("openai_chat", reply))
        assert chat["choices"][0]["finish_reason"] == "tool_calls"
        assert chat["choices"] == batch("openai_chat", reply)["choices"]


def test_p03_has_no_empty_text_block() -> None:
    (reply,) = case("P03")["input"]["engine_script"]
    starts = [event for name, event in sse(stream("anthropic", reply)) if name == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["tool_use"]


def test_p07_two_results_for_one_call_are_refused() -> None:
    read = case("P07")
    with pytest.raises(BadRequest, match="tu_1") as caught:
        load("anthropic").parse(json.dumps(read["input"]["request"]).encode(), {})
    body = json.loads(load("anthropic").error(400, "invalid_request", str(caught.value)))
    assert body["type"] == read["expected"]["body"]["type"]
    assert body["error"]["type"] == read["expected"]["body"]["error"]["type"]


def test_s01_two_calls_in_one_increment() -> None:
    read = case("S01")
    for reply in read["input"]["engine_script"]:
        message = fold_chat(stream("openai_chat", reply))["choices"][0]["message"]
        calls = [
            [call["function"]["name"], json.loads(call["function"]["arguments"])] for call in message["tool_calls"]
        ]
        assert calls == read["expected"]["calls"]


def test_s02_any_chunking_gives_one_result() -> None:
    read = case("S02")
    text, expected = read["input"]["text"], read["expected"]
    whole = parse_reply(text, "stop")
    assert [[call.name, call.arguments] for call in whole.tool_calls] == expected["calls"]
    shown = [getattr(event, "text", "").strip() for event in whole.events]
    assert [part for part in shown if part] == expected["text_joined_nonblank"]
    rng = random.Random(2)
    cuts = [range(size, len(text), size) for size in read["input"]["chunk_sizes_in_characters"]]
    cuts += [sorted(rng.sample(range(1, len(text)), rng.randrange(1, 30))) for _ in range(read["input"]["random_cuts"])]
    for at in cuts:
        pieces = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
        parser = ReplyParser()
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert fold(events) == whole.events
    ids = encode(text)
    assert fold(events_of([[token] for token in ids])) == fold(events_of([ids])) == whole.events


def test_s06_a_character_in_several_tokens() -> None:
    read = case("S06")
    (reply,) = read["input"]["engine_script"]
    data = stream("anthropic", reply)
    assert "\ufffd" not in data.decode()
    assert "ufffd" not in data.decode()
    assert blocks(fold_anthropic(data)) == [["text", read["expected"]["text"]]]
    assert [token for delta in deltas(reply) for token in delta] == read["input"]["output_ids"]


def test_s06_a_character_cut_by_the_limit_is_not_shown() -> None:
    (reply,) = case("S06")["input"]["engine_script_cut"]
    message = fold_anthropic(stream("anthropic", reply))
    assert blocks(message) == [["text", "Stock ✅"]]
    assert message["stop_reason"] == "max_tokens"
    assert message == batch("anthropic", reply)
