"""The pieces of a body are the body, whatever its spacing; messages keep their piece when the history grows."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_proxy.dialects.pieces import body_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), max_size=5)
REST = st.dictionaries(st.sampled_from(["system", "tools", "input", "model", "é"]) | st.text(max_size=3), VALUES)
BLANKS = ["", " ", "\n\t", "  \r\n"]


def spaced(value: object, rng: random.Random) -> str:
    """JSON text with blanks wherever JSON allows them, and escapes or not."""
    blank = lambda: rng.choice(BLANKS)  # noqa: E731
    if isinstance(value, dict):
        items = (f"{spaced(key, rng)}{blank()}:{spaced(item, rng)}" for key, item in value.items())
        inner = ",".join(items) or blank()
        return f"{blank()}{{{inner}}}{blank()}"
    if isinstance(value, list):
        inner = ",".join(spaced(item, rng) for item in value) or blank()
        return f"{blank()}[{inner}]{blank()}"
    return blank() + json.dumps(value, ensure_ascii=rng.random() < 0.5) + blank()


@settings(max_examples=100, deadline=None)
@given(messages=MESSAGES, rest=REST, seed=st.integers(0, 2**32))
def test_pieces_joined_are_the_body(messages: list[object], rest: dict[str, object], seed: int) -> None:
    rng = random.Random(seed)
    fields = [("messages", messages), *((k, v) for k, v in rest.items() if k != "messages")]
    rng.shuffle(fields)
    body = spaced(dict(fields), rng).encode("utf-8", "surrogatepass")
    pieces = body_pieces(body)
    assert b"".join(pieces) == body
    assert all(pieces)
    values = [value for piece in pieces if (value := value_of(piece)) is not None]
    assert all(message in values for message in messages)


def value_of(piece: bytes) -> object:
    try:
        return json.loads(piece.strip(b" \t\r\n,"))
    except ValueError:
        return None


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=40))
def test_pieces_of_anything_are_the_body(body: bytes) -> None:
    assert b"".join(body_pieces(body)) == body


@pytest.mark.parametrize(
    "body", [b"[]", b'{"messages": 3}', b'{"messages": [{"a": "\\ud83d"}]}', b'{"messages": null}']
)
def test_a_body_that_cannot_be_scanned_is_one_piece(body: bytes) -> None:
    assert body_pieces(body) == (body,)


def test_an_input_item_keeps_its_piece_when_the_input_grows() -> None:
    items = [{"type": "message", "role": "user", "content": f"m{i}"} for i in range(4)]
    body = {"model": "m", "instructions": "long", "tools": [{"name": "t"}], "input": items[:2], "stream": True}
    first, second = (body_pieces(json.dumps({**body, "input": some}).encode()) for some in (items[:2], items))
    assert set(first) < set(second)
    assert b'"long"' in first
    assert body_pieces(b'{"input": "hi", "model": "m"}') == (b'{"input": ', b'"hi"', b', "model": "m"}')


def test_a_message_keeps_its_piece_when_the_history_grows() -> None:
    messages = [{"role": "user", "content": f"m{i}"} for i in range(4)]
    body = {"model": "m", "system": "long", "messages": messages[:2], "tools": [{"name": "t"}], "max_tokens": 5}
    first = body_pieces(json.dumps(body).encode())
    second = body_pieces(json.dumps({**body, "messages": messages, "max_tokens": 6}).encode())
    assert set(first) - set(second) == {b', "max_tokens": 5}'}
