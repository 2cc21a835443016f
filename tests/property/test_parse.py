"""Any cut of the ids or of the text gives the events of the whole; an independent parser agrees on what they are."""

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_parsing import parse_response

from gyre_proxy.message import Text, ToolCall
from gyre_proxy.parse import Detokenizer, ReplyParser, StopText, fold, hidden_ids, parse_reply
from tests.support.toy_tokenizer import SPECIAL, ToyTokenizer, decode, encode

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
GOOD = ['{"name": "f", "arguments": {"a": "<b>"}}', '\n{"name":"g"}\n', '{"arguments": {"x": [1, {}]}, "name": "h"}']
PIECES = st.sampled_from(
    [*MARKERS, *(f"<tool_call>{call}</tool_call>" for call in GOOD), *GOOD, "<", "</", "<tool", " ", "\n\n", "é🚚"]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=4)), max_size=12).map("".join)
PREFIXES = st.sampled_from(
    ["", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n", "<think>\n\n</think>\n\n", "<tool_call>\n"]
)


def cut(data: st.DataObject, whole: str) -> list[str]:
    at = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8), label="cuts"))
    return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=TEXTS, prefix=PREFIXES)
def test_stream_of_any_cut_is_the_batch(data: st.DataObject, text: str, prefix: str) -> None:
    parser = ReplyParser(prefix=prefix)
    events = [event for piece in cut(data, text) for event in parser.feed(piece)] + parser.finish()
    assert fold(events) == parse_reply(text, "stop", prefix=prefix).events
    assert parser.finish() == []


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_events_in_order_are_the_text_but_for_blanks_and_markers(text: str) -> None:
    skipped = "(?:</?think>)*?"
    events = parse_reply(text, "stop").events
    pattern = skipped
    for event in events:
        if isinstance(event, ToolCall):
            pattern += "<tool_call>(.*?)</tool_call>" + skipped
        else:
            pattern += "".join(re.escape(character) + skipped for character in dense(event.text))
    match = re.fullmatch(pattern, dense(text), re.DOTALL)
    assert match
    calls = [event.arguments for event in events if isinstance(event, ToolCall)]
    assert [json.loads(body).get("arguments", {}) for body in match.groups()] == calls


def dense(text: str) -> str:
    return re.sub("[ \t\r\n]", "", text)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_agrees_with_the_parser_of_transformers(text: str) -> None:
    reply = parse_reply(text, "stop")
    if any(isinstance(event, Text) and event.malformed_call for event in reply.events):
        return  # It has no rule for these.
    field = {"repeats": True, "join": ""}
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning": {"open": "<think>", "close": "</think>", **field},
            "calls": {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
            "content": field,
        },
    }
    theirs = parse_response(text, template, prefix="")
    assert "".join(reply.text.split()) == "".join(theirs.get("content", "").split())
    assert "".join(reply.reasoning.split()) == "".join(theirs.get("reasoning", "").split())
    calls = [(call["name"], call.get("arguments", {})) for call in theirs.get("calls", [])]
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls


@settings(max_examples=200, deadline=None)
@given(data=st.data(), text=st.text("abc", max_size=10), stops=st.lists(st.text("abc", max_size=3), max_size=3))
def test_text_ends_before_the_stop_sequence_that_is_complete_first(
    data: st.DataObject, text: str, stops: list[str]
) -> None:
    trimmer = StopText(stops)
    shown = "".join([*map(trimmer.feed, cut(data, text)), trimmer.finish()])
    ends = [end for end in range(len(text) + 1) if any(stop and text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, trimmer.hit) == (text, None)
    else:
        assert trimmer.hit in stops
        assert shown + trimmer.hit == text[: ends[0]]
    assert trimmer.finish() == ""


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ids=st.lists(st.one_of(st.integers(0, 268), st.sampled_from([226, 156, 133, 240, 159, 154]))))
def test_detokenizer_shows_whole_characters_for_any_cut(data: st.DataObject, ids: list[int]) -> None:
    hidden = hidden_ids(SPECIAL)
    whole = decode(token for token in ids if token not in hidden)
    at = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6), label="cuts"))
    detokenizer = Detokenizer(ToyTokenizer(), hidden)
    shown = "".join(detokenizer.feed(ids[a:b]) for a, b in zip([0, *at], [*at, len(ids)], strict=True))
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {"\ufffd"}
    assert len(whole) - len(shown) <= 3


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_detokenizer_shows_all_of_a_valid_text(text: str) -> None:
    detokenizer = Detokenizer(ToyTokenizer(), hidden_ids(SPECIAL))
    shown = "".join(detokenizer.feed([token]) for token in encode(text))
    assert shown == text.rstrip("\ufffd") + "\ufffd" * max(0, len(text) - len(text.rstrip("\ufffd")) - 3)


def test_detokenizer_of_many_stray_bytes_stays_quick() -> None:
    calls: list[int] = []

    class Counting(ToyTokenizer):
        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            calls.append(len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting())
    shown = "".join(detokenizer.feed([156]) for _ in range(2000))
    assert shown == "\ufffd" * 1997
    assert max(calls) < 200


def test_detokenizer_is_the_decode_stream_of_tokenizers() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|im_end|>", "<think>"]
    )
    text = "Stock ✅🚚 ok, naïve 漢字 and 👩‍👩‍👧 too. "
    tokenizer.train_from_iterator([text] * 3, trainer)

    class Whole:
        def decode(self, ids: list[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=False))

    ids = tokenizer.encode("<think>" + text * 3 + "<|im_end|>").ids
    stop = tokenizer.token_to_id("<|im_end|>")
    stream = decoders.DecodeStream(skip_special_tokens=False)
    detokenizer = Detokenizer(Whole(), {stop})
    for token in ids[:-1]:
        assert detokenizer.feed([token]) == (stream.step(tokenizer, token) or "")
    assert ids[-1] == stop
    assert detokenizer.feed([stop]) == ""
