"""Ids of tool calls in the form that a template takes: found out from the template, alike for a call and its result."""

from collections.abc import Sequence

import pytest

from gyre_proxy.call_ids import IdStyle, id_style, with_ids
from gyre_proxy.message import Message, ToolCall
from tests.support.driver import assistant, result, user
from tests.support.public_templates import public_template

CALLS = (ToolCall(name="look", arguments={}, id="toolu_n_1_0"), ToolCall(name="move", arguments={}, id="toolu_n_1_1"))
CHAT = [user("a"), assistant("", *CALLS), result("x", "toolu_n_1_1"), result("y", "toolu_n_1_0"), result("z", "other")]


def ids(messages: Sequence[Message]) -> tuple[list[str | None], list[str | None]]:
    return [call.id for message in messages for call in message.tool_calls], [m.tool_call_id for m in messages[2:]]


def test_nine_letters_and_digits() -> None:
    calls, results = ids(with_ids(CHAT, IdStyle.NINE))
    assert results[:2] == calls[::-1]
    assert len({*calls, *results}) == 3
    assert all(len(name or "") == 9 and str(name).isalnum() for name in [*calls, *results])
    assert ids(with_ids(with_ids(CHAT, IdStyle.NINE), IdStyle.NINE)) == (calls, results)


def test_named_by_function_and_place() -> None:
    calls, results = ids(with_ids(CHAT, IdStyle.NAMED))
    assert calls == ["functions.look:0", "functions.move:1"]
    assert results == ["functions.move:1", "functions.look:0", "other"]


def test_others_are_as_sent() -> None:
    assert with_ids(CHAT, IdStyle.AS_SENT) is CHAT


def test_style_is_found_out() -> None:
    def refuses(messages: Sequence[Message]) -> str | None:
        return None if any(len(name or "") != 9 for names in ids(messages) for name in names) else "ok"

    assert id_style(refuses) is IdStyle.NINE
    assert id_style(lambda messages: None) is IdStyle.AS_SENT
    assert id_style(lambda messages: str(ids(messages))) is IdStyle.AS_SENT
    assert id_style(lambda messages: f"functions.gyre_probe:0 {ids(messages)}") is IdStyle.NAMED


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("mistralai-Mistral-Nemo-Instruct-2407", '"call_id": "aa81bfa2b"'),
        ("moonshotai-Kimi-K2", "## Return of functions.move:1"),
        ("Qwen-Qwen3-0.6B", "<tool_response>\nx\n</tool_response>"),
    ],
)
def test_public_templates_take_the_ids_of_any_client(name: str, shown: str) -> None:
    assert shown in public_template(name).render(CHAT[:4], (), True)
