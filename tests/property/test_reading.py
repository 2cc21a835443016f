"""What is read from a body does not depend on the bodies that were read before it."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_proxy.dialects import WIRES, load
from gyre_proxy.dialects.base import BadRequest
from gyre_proxy.dialects.reading import Reader
from gyre_proxy.message import Request
from gyre_proxy.same_turn import message_json

NODES = [f"n_{i:020x}" for i in range(4)]
TEXT = st.sampled_from(["", "a", "two\nlines", "é 🤖", 'q"u', "<|im_end|>", "1.0"])


def anthropic(rng: random.Random, text: str) -> list[dict]:
    kind, name = rng.choice(["user", "user", "call", "said", "system", "blocks", "ref"]), f"toolu_{rng.choice(NODES)}_0"
    mark = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.3 else {}
    if kind == "user":
        return [{"role": "user", "content": text}]
    if kind == "system":
        return [{"role": "system", "content": [{"type": "text", "text": text, **mark}]}]
    if kind == "blocks":
        return [{"role": "user", "content": [{"type": "text", "text": text, **mark}, {"type": "odd", "x": [1, 1.0]}]}]
    if kind == "said":
        return [{"role": "assistant", "content": [{"type": "text", "text": text}]}]
    content = [{"type": "tool_reference", "tool_name": "t"}] if kind == "ref" else text
    call = {"type": "tool_use", "id": name, "name": "t", "input": {"a": rng.choice([1, 1.0, True])}}
    answer = {"type": "tool_result", "tool_use_id": name, "content": content, **mark}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]


def openai_chat(rng: random.Random, text: str) -> list[dict]:
    name = f"call_{rng.choice(NODES)}_0"
    call = {"id": name, "type": "function", "function": {"name": "t", "arguments": '{"a": 1}'}}
    turn = {"role": "assistant", "content": text, "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": name, "content": text}
    return rng.choice([[turn, answer], [{"role": rng.choice(["user", "system", "assistant"]), "content": text}]])


def openai_responses(rng: random.Random, text: str) -> list[dict]:
    name = f"call_{rng.choice(NODES)}_0"
    call = {"type": "function_call", "call_id": name, "name": "t", "arguments": '{"a": 1}'}
    turn = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, call]
    answer = {"type": "function_call_output", "call_id": name, "output": text}
    return rng.choice([[*turn, answer], [{"role": rng.choice(["user", "developer", "assistant"]), "content": text}]])


MAKE = {"anthropic": anthropic, "openai_chat": openai_chat, "openai_responses": openai_responses}


def body_of(wire: str, items: list[dict], number: int, *, odd_order: bool = False, spaced: bool = False) -> bytes:
    function = {"name": "t", "description": f"d{number // 3}", "parameters": {}}
    fields = {"model": "m", "max_tokens": 5 + number}
    if wire == "openai_responses":
        fields = {"model": "m", "input": items, "tools": [{"type": "function", **function}]}
    elif wire == "openai_chat":
        fields |= {"messages": items, "tools": [{"type": "function", "function": function}]}
    else:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: {number}"}
        tools = [{"name": "t", "description": f"d{number // 3}", "input_schema": {}}]
        fields |= {"messages": items, "tools": tools, "system": [{"type": "text", "text": "s"}, billing]}
    fields = dict(reversed(fields.items())) if odd_order else fields
    return json.dumps(fields, separators=(", ", ": ") if spaced else (",", ":")).encode()


def told(request: Request) -> tuple:
    messages = [(message_json(message), message.node_hint) for message in request.messages]
    return messages, request.tools, request.sampling, request.stream, [part.data for part in request.body]


def outcome(wire: str, body: bytes, reader: Reader | None):
    try:
        return told(load(wire).parse(body, {}, reader))
    except BadRequest as refused:
        return str(refused), refused.param


def without_billing(wire: str, said: tuple) -> tuple:
    """The leading system message keeps what stood beside it the first time."""
    return (said[0][1:], *said[1:]) if wire == "anthropic" and isinstance(said[0], list) else said


@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.lists(TEXT, min_size=2, max_size=10), seed=st.integers(0, 2**32))
def test_a_reader_reads_what_a_fresh_one_reads(wire: str, texts: list[str], seed: int) -> None:
    rng, reader = random.Random(seed), Reader()
    chats: list[list[dict]] = [[]]
    for number, text in enumerate(texts):
        chat = list(rng.choice(chats[-2:]))
        if chat and rng.random() < 0.15:
            chat = chat[: rng.randrange(len(chat))]
        if chat and rng.random() < 0.15:
            chat[rng.randrange(len(chat))] = MAKE[wire](rng, "changed")[0]
        chat += MAKE[wire](rng, text)
        chats.append(chat)
        end = {"role": "user", "content": "end"}
        odd, spaced = rng.random() < 0.1, rng.random() < 0.1
        body = body_of(wire, [*chat, end], number, odd_order=odd, spaced=spaced)
        if rng.random() < 0.1:
            body = body.replace(b"},{", rng.choice([b"}{", b"},,{", b"}] , [{"]), 1)
        fresh, known = outcome(wire, body, None), outcome(wire, body, reader)
        assert without_billing(wire, known) == without_billing(wire, fresh)
        if isinstance(fresh[0], list):
            assert b"".join(known[-1]) == body


@pytest.mark.parametrize("end", [b"]}", b",]}", b" , ]}", b'{"role":"user"}]}', b',{"role":"user","content":"b"}', b""])
def test_a_known_beginning_excuses_nothing(end: bytes) -> None:
    head = b'{"model":"m","messages":[{"role":"user","content":"a"}'
    reader = Reader()
    outcome("openai_chat", head + b"]}", reader)
    assert outcome("openai_chat", head + end, reader) == outcome("openai_chat", head + end, None)


@pytest.mark.parametrize("wire", WIRES)
def test_messages_that_come_again_are_the_same_objects(wire: str) -> None:
    rng, reader = random.Random(1), Reader()
    chat = [item for i in range(12) for item in MAKE[wire](rng, f"text {i}")]
    chat = [item for item in chat if item.get("role") not in ("system", "developer")]
    more = {"role": "user", "content": "more"}
    one = load(wire).parse(body_of(wire, [*chat, more], 0), {}, reader)
    two = load(wire).parse(body_of(wire, [*chat, {**more, "content": "else"}, more], 1), {}, reader)
    kept = one.messages[:-1]
    assert len(kept) > 5
    assert all(old is new for old, new in zip(kept, two.messages, strict=False))
    assert two.tools is one.tools
    shared = {id(part) for part in one.body} & {id(part) for part in two.body}
    assert len(shared) >= len(chat)
