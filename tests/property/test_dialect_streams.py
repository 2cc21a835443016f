"""A streamed reply says what its batch twin says, for any reply and any cut of its texts."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_proxy.dialects import ReplyContext, load
from gyre_proxy.message import Reasoning, Reply, ReplyEvent, Text, ToolCall, Usage
from gyre_proxy.parse import fold
from tests.support.wire_fold import fold_anthropic, fold_chat, fold_responses

NODE = "n_0123456789abcdef0123"
WIRES: list[tuple[str, Callable[[bytes], dict[str, Any]]]] = [
    ("anthropic", fold_anthropic),
    ("openai_chat", fold_chat),
    ("openai_responses", fold_responses),
]
LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=4)
CALLS = st.builds(
    ToolCall, name=st.text(min_size=1, max_size=4), arguments=st.dictionaries(st.text(max_size=3), LEAVES)
)
EVENTS = st.lists(
    st.one_of(
        st.builds(Text, text=st.text(min_size=1, max_size=8), malformed_call=st.booleans()),
        st.builds(Reasoning, text=st.text(min_size=1, max_size=8)),
        CALLS,
    ),
    max_size=8,
)
USAGES = st.builds(
    lambda cached, fresh, out: Usage(prompt_tokens=cached + fresh, cached_tokens=cached, output_tokens=out),
    *[st.integers(0, 10**6)] * 3,
)


def context(**changes: Any) -> ReplyContext:
    fields = {"call_id": "c_1", "node_id": NODE, "model": "m", "created": 7, "prompt_tokens": 9, "include_usage": True}
    return ReplyContext(**{**fields, **changes})


def encoded(wire: str, call: ReplyContext, events: Iterable[ReplyEvent], finish: str, usage: Usage) -> bytes:
    encoder = load(wire).stream(call)
    parts = [encoder.start(), encoder.keep_alive()]
    for event in events:
        parts += [encoder.event(event), encoder.keep_alive()]
    return b"".join([*parts, encoder.finish(finish, usage)])


def cut(event: ReplyEvent, size: int) -> list[ReplyEvent]:
    if isinstance(event, ToolCall):
        return [event]
    pieces = [event.text[i : i + size] for i in range(0, len(event.text), size)]
    if isinstance(event, Reasoning):
        return [Reasoning(text=piece) for piece in ["", *pieces]]
    return [Text(text=piece, malformed_call=event.malformed_call) for piece in ["", *pieces]]


@pytest.mark.parametrize(("wire", "folded"), WIRES)
@settings(max_examples=120, deadline=None)
@given(events=EVENTS, size=st.integers(1, 4), finish=st.sampled_from(["stop", "length", "refusal"]), usage=USAGES)
def test_stream_is_the_batch(
    wire: str, folded: Callable[..., dict[str, Any]], events: list[ReplyEvent], size: int, finish: str, usage: Usage
) -> None:
    pieces = [piece for event in events for piece in cut(event, size)]
    streamed = folded(encoded(wire, context(), pieces, finish, usage))
    whole = json.loads(load(wire).batch(context(), Reply(events=fold(events), finish=finish), usage))
    assert streamed == whole


@pytest.mark.parametrize(("wire", "folded"), WIRES)
@settings(max_examples=60, deadline=None)
@given(events=EVENTS)
def test_an_echoed_reply_is_read_as_it_was_sent(
    wire: str, folded: Callable[..., dict[str, Any]], events: list[ReplyEvent]
) -> None:
    usage = Usage(prompt_tokens=9, output_tokens=1)
    message = folded(encoded(wire, context(), events, "stop", usage))
    if wire == "openai_chat":
        message = message["choices"][0]["message"]
    turn = {key: message[key] for key in ("role", "content", "tool_calls", "reasoning_content") if key in message}
    turns = message["output"] if wire == "openai_responses" else [turn]
    history = [{"role": "user", "content": "q"}, *turns, {"role": "user", "content": "r"}]
    body = {"model": "m", "input" if wire == "openai_responses" else "messages": history}
    sent = Reply(events=fold(events), finish="stop").message()
    messages = load(wire).parse(json.dumps(body).encode(), {}).messages
    if not turns:
        assert [message.role for message in messages] == ["user", "user"]
        return
    echoed = messages[1]
    assert (echoed.content, echoed.reasoning) == (sent.content, sent.reasoning)
    assert [(c.name, c.arguments) for c in echoed.tool_calls] == [(c.name, c.arguments) for c in sent.tool_calls]
    assert len({call.id for call in echoed.tool_calls}) == len(sent.tool_calls)
    named = bool(sent.tool_calls) or (wire == "anthropic" and sent.reasoning is not None) or wire == "openai_responses"
    assert echoed.node_hint == (NODE if named else None)
