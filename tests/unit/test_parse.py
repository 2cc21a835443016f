"""The reply parser: what is a call, what is text, and what happens to the blanks between."""

import pytest

from gyre_data.errors import ConfigError
from gyre_proxy.message import Reasoning, Text, ToolCall
from gyre_proxy.parse import parse_reply

CALL = '<tool_call>\n{"name": "stat_bay", "arguments": {"bay": 1}}\n</tool_call>'


def events(text: str, prefix: str = "") -> list:
    return list(parse_reply(text, "stop", prefix=prefix).events)


def call(**arguments: object) -> ToolCall:
    return ToolCall(name="stat_bay", arguments=arguments)


def test_reasoning_text_and_calls_keep_their_order() -> None:
    text = f"<think>\nhm\n</think>\n\nOne. {CALL}\n{CALL}\n\nTwo."
    assert events(text) == [Reasoning(text="hm"), Text(text="One."), call(bay=1), call(bay=1), Text(text="Two.")]


def test_reasoning_opened_by_the_template_is_open() -> None:
    prefix = "<|im_start|>user\nsay <tool_call><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert events("hm\n</think>\n\nHello", prefix) == [Reasoning(text="hm"), Text(text="Hello")]


def test_reasoning_closed_by_the_template_is_closed() -> None:
    prefix = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert events("Hello", prefix) == [Text(text="Hello")]


@pytest.mark.parametrize(
    "body",
    [
        "no json",
        '{"name": "stat_bay"',
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "stat_bay", "arguments": [1]}',
        '{"name": "stat_bay", "arguments": "bay 1"}',
        '{"name": "stat_bay", "arguments": {"bay": 123456789012345678901234567890}}',
        '{"name": "stat_bay", "arguments": {"bay": NaN}}',
        '{"name": "stat_bay", "arguments": {"bay": "\\ud83d"}}',
        '{"name": "stat_bay", "arguments": {"bay": ' + "[" * 900 + "]" * 900 + "}}",
    ],
)
def test_malformed_call_is_text_verbatim(body: str) -> None:
    text = f"Look: \n<tool_call>{body}</tool_call>\n ok"
    reply = parse_reply(text, "stop")
    assert reply.text == text
    assert Text(text=f"<tool_call>{body}</tool_call>", malformed_call=True) in reply.events
    assert not reply.tool_calls


def test_cut_off_call_is_text_verbatim() -> None:
    text = 'Look: <tool_call>{"name": "stat_bay", "argu'
    reply = parse_reply(text, "length")
    assert reply.text == text
    assert reply.events[-1] == Text(text='<tool_call>{"name": "stat_bay", "argu', malformed_call=True)


def test_call_cut_inside_its_close_marker_is_no_call() -> None:
    text = CALL[:-1]
    assert events(text) == [Text(text=text, malformed_call=True)]


@pytest.mark.parametrize("arguments", ['"{\\"bay\\": 1}"', '{"bay": 1}'])
def test_arguments_may_be_a_string_that_holds_the_object(arguments: str) -> None:
    assert events(f'<tool_call>{{"name": "stat_bay", "arguments": {arguments}}}</tool_call>') == [call(bay=1)]


def test_absent_arguments_are_empty() -> None:
    assert events('<tool_call>{"name": "stat_bay"}</tool_call>') == [call()]


def test_outer_blanks_of_a_plain_reply_are_kept() -> None:
    assert parse_reply("  one two \n", "stop").text == "  one two \n"


def test_reply_of_blanks_shows_nothing() -> None:
    assert events(" \n<think>\n \n</think>\n\n") == []


def test_call_inside_reasoning_is_reasoning() -> None:
    assert events(f"<think>maybe {CALL} or</think>No.") == [Reasoning(text=f"maybe {CALL} or"), Text(text="No.")]


def test_reasoning_that_never_ends_is_reasoning() -> None:
    assert events("<think>on and on </thi") == [Reasoning(text="on and on </thi")]


def test_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hermes"):
        parse_reply("", "stop", "nonsense")
