"""Log-probs for a client: whatever was sampled, their texts joined are the visible text, token by token."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_proxy.message import Text
from gyre_proxy.parse import Detokenizer, ReplyParser, hidden_ids
from gyre_proxy.reply_text import ReplyText
from tests.support.toy_tokenizer import SPECIAL, ToyTokenizer

HIDDEN = hidden_ids(SPECIAL)
CALL = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
TEXTS = ("<think>", "</think>", CALL, "<tool_call>{", "</tool_call>", "<", "<<", "<th", " \n", "é😀", "ab12", "##")
pieces = st.lists(st.integers(0, 255), max_size=2) | st.sampled_from(TEXTS).map(ToyTokenizer().encode) | st.just([257])
ids = st.lists(pieces, max_size=8)


def fresh(stops=("##",)) -> ReplyText:
    return ReplyText(Detokenizer(ToyTokenizer(), HIDDEN), ReplyParser(), stops)


@settings(max_examples=200, deadline=None)
@given(ids=ids)
def test_the_tokens_of_the_visible_text(ids: list[list[int]]) -> None:
    sampled = np.array([token for part in ids for token in part], np.int32)
    logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    text = fresh()
    events = [*text.feed(sampled), *text.finish()]
    told = fresh().visible(sampled, logprobs)
    assert "".join(token.text for token in told) == "".join(e.text for e in events if isinstance(e, Text))
    places = [-int(token.logprob) - 1 for token in told]
    assert places == sorted(set(places)), "in the order sampled, none twice"
    for token, place in zip(told, places, strict=True):
        piece = ToyTokenizer().decode([int(sampled[place])])
        assert token.text in piece or "\ufffd" in piece or not token.text.isascii()


def test_a_character_of_several_tokens_is_told_with_the_last() -> None:
    sampled = np.array([*"a😀".encode(), 35, 35, 98], np.int32)
    told = fresh().visible(sampled, np.arange(8, dtype=np.float32))
    assert [(token.text, token.logprob) for token in told] == [("a", 0), ("", 1), ("", 2), ("", 3), ("😀", 4)]


def test_the_bracket_before_a_bracket_is_its_own() -> None:
    sampled = np.array([60, 60, 120, 257], np.int32)
    told = fresh().visible(sampled, np.arange(4, dtype=np.float32))
    assert [(token.text, token.logprob) for token in told] == [("<", 0), ("<", 1), ("x", 2)]
