"""Same turn or another: the known rewrites of clients, and what is never forgiven."""

import pytest

from gyre_proxy.message import Message, ToolCall
from gyre_proxy.same_turn import canonical_hash, difference, echoed_as_sent, message_from_json, message_json, same_turn
from tests.support.driver import assistant, user


def edit(**arguments) -> Message:
    return assistant("ok", ToolCall(name="Edit", arguments=arguments))


SENT = edit(file="a", new_string="x  \ny", count=5000.0)


@pytest.mark.parametrize(
    ("echoed", "client", "same"),
    [
        (SENT, None, True),
        (edit(count=5000, new_string="x  \ny", file="a"), None, True),
        (edit(file="a", new_string="x  \ny", count=5001), None, False),
        (edit(file="a", new_string="x  \ny", count="5000"), None, False),
        (edit(file="a", new_string="x\ny", count=5000), None, False),
        (edit(file="a", new_string="x\ny", count=5000), "claude-code", True),
        (edit(file="a ", new_string="x  \ny", count=5000), "claude-code", False),
        (edit(file="a", new_string=" x\ny", count=5000), "claude-code", False),
        (edit(file="a", new_string="x  \ny", count=5000, replace_all=False), None, False),
        (edit(file="a", new_string="x  \ny", count=5000, replace_all=False), "claude-code", True),
        (edit(file="a", new_string="x  \ny", count=5000, replace_all=True), "claude-code", False),
        (edit(new_string="x  \ny", count=5000.0), "claude-code", False),
        (assistant("ok"), None, False),
        (assistant(" ok\n", *SENT.tool_calls), None, True),
        (assistant("o k", *SENT.tool_calls), None, False),
        (assistant("ok", *SENT.tool_calls, *SENT.tool_calls), None, False),
        (assistant("ok", ToolCall(name="Write", arguments=SENT.tool_calls[0].arguments)), None, False),
        (assistant("ok", *SENT.tool_calls, reasoning="made up"), None, False),
        (Message(role="user", content="ok", tool_calls=SENT.tool_calls), None, False),
    ],
)
def test_same_turn(echoed: Message, client: str | None, same: bool) -> None:
    assert same_turn(SENT, echoed, client) is same


@pytest.mark.parametrize(
    ("one", "two", "same"), [(True, 1, False), (0, False, False), (1.0, 1, True), (None, "", False)]
)
def test_values_of_other_types_are_other_values(one, two, same: bool) -> None:
    assert same_turn(edit(x=one), edit(x=two), "claude-code") is same


def test_reasoning_may_be_dropped_or_trimmed_only() -> None:
    sent = assistant("a", reasoning="\nbecause\n")
    assert same_turn(sent, assistant("a"), None)
    assert same_turn(sent, assistant("a", reasoning="because"), None)
    assert not same_turn(sent, assistant("a", reasoning="for"), None)


BIG = 12345678901234567890


@pytest.mark.parametrize(
    ("sent", "echoed", "same"),
    [
        ({"n": BIG}, {"n": 12345678901234567000}, True),
        ({"n": {"deep": [BIG]}}, {"n": {"deep": [12345678901234567000]}}, True),
        ({"n": BIG}, {"n": 12345678901234590000}, False),
        ({"n": 2**53 + 1}, {"n": 2**53 - 1}, False),
        ({"n": 1e16}, {"n": 10**16}, True),
        ({"n": True}, {"n": 1}, False),
        ({"a": "b"}, "[1]", False),
    ],
)
def test_numbers_are_the_doubles_that_clients_read(sent, echoed, same: bool) -> None:
    one, two = (assistant("", ToolCall(name="a", arguments=arguments)) for arguments in (sent, echoed))
    assert same_turn(one, two, None) is same


def test_a_renamed_tool_is_the_same_call_only_with_its_name() -> None:
    sent = assistant("", ToolCall(name="Bash", arguments={"command": "ls"}))
    lost = assistant("", ToolCall(name="invalid", arguments={"tool": "Bash", "error": "no such tool"}))
    lower = assistant("", ToolCall(name="bash", arguments={"command": "ls"}))
    other = assistant("", ToolCall(name="invalid", arguments={"tool": "Write", "error": "no such tool"}))
    assert same_turn(sent, lost, "opencode")
    assert same_turn(sent, lower, "opencode")
    assert not same_turn(sent, other, "opencode")
    assert not same_turn(sent, lost, "pi")
    assert not same_turn(sent, lower, "pi")


@pytest.mark.parametrize(
    ("echoed", "told"),
    [
        (SENT, None),
        (user("ok"), "role"),
        (assistant("no", *SENT.tool_calls), "text"),
        (assistant("ok", *SENT.tool_calls, reasoning="other"), "reasoning"),
        (Message(role="assistant", content="ok", tool_calls=SENT.tool_calls, raw={"type": "image"}), "blocks"),
        (assistant("ok"), "number of calls"),
        (assistant("ok", ToolCall(name="Write", arguments={})), "tool name"),
        (edit(file="b", new_string="x  \ny", count=5000), "arguments"),
    ],
)
def test_what_differs_is_said(echoed: Message, told: str | None) -> None:
    assert difference(SENT, echoed, None) == told


def test_arguments_that_are_text_are_read_first() -> None:
    sent = assistant("", ToolCall(name="a", arguments={"x": 1, "y": 2}))
    assert same_turn(sent, assistant("", ToolCall(name="a", arguments='{"y":2,"x":1}')), None)
    assert not same_turn(sent, assistant("", ToolCall(name="a", arguments='{"y":2,"x":')), None)


def test_as_sent_means_the_same_bytes() -> None:
    sent = assistant("a ", ToolCall(name="a", arguments={"x": 1.0, "y": 2}, id="one"))
    assert echoed_as_sent(sent, assistant("a ", ToolCall(name="a", arguments={"x": 1.0, "y": 2}, id="two")))
    assert not echoed_as_sent(sent, assistant("a", sent.tool_calls[0]))
    assert not echoed_as_sent(sent, assistant("a ", ToolCall(name="a", arguments={"y": 2, "x": 1.0})))
    assert not echoed_as_sent(sent, assistant("a ", ToolCall(name="a", arguments={"x": 1, "y": 2})))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        (user("a"), user("a "), False),
        (assistant("a"), assistant(" a\n"), True),
        (user("caf\u00e9"), user("cafe\u0301"), False),
        (assistant("None"), assistant(""), False),
        (user("a"), Message(role="user", content="a", raw={"blocks": [{"type": "image", "data": "AA"}]}), False),
        (user("a"), Message(role="user", content="a", raw={"blocks": [{"type": "text", "x": 1}]}), True),
        (
            Message(role="tool", content="a", tool_call_id="1"),
            Message(role="tool", content="a", tool_call_id="2"),
            False,
        ),
        (assistant("a", reasoning="r"), assistant("a"), False),
        (assistant("a", reasoning="r"), assistant("a", reasoning=" r\n"), True),
        (assistant("a", reasoning=" "), assistant("a"), True),
    ],
)
def test_canonical_hash(one: Message, two: Message, same: bool) -> None:
    assert (canonical_hash(one) == canonical_hash(two)) is same


def test_json_keeps_order_and_number_form() -> None:
    call = ToolCall(name="a", arguments={"z": 1.0, "a": {"d": 1, "b": 2}}, id="i")
    message = Message(role="assistant", content="c", reasoning="r", tool_calls=(call,), raw={"blocks": []})
    again = message_from_json(message_json(message))
    assert again == message
    assert list(again.tool_calls[0].arguments) == ["z", "a"]
    assert isinstance(again.tool_calls[0].arguments["z"], float)
    assert message_from_json(message_json(user("x"))) == user("x")
