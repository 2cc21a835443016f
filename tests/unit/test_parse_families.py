"""What each family takes for a call, for reasoning and for text; what arguments mean between tags."""

from typing import Any

import pytest

from gyre_data.errors import ConfigError
from gyre_proxy.families import FAMILY_NAMES, family
from gyre_proxy.message import Reasoning, Text, ToolCall
from gyre_proxy.parse import Detokenizer, ReplyParser, fold, hidden_ids, parse_reply
from gyre_proxy.reply_format import choose_family
from tests.support.reply_texts import CALLS, TOOLS
from tests.support.toy_template import ToyTemplate

MOVE = ToolCall(name="move", arguments={"crate": "7", "bay": 1})
ON_THE_WAY = {"harmony": ("<|channel|>final<|message|>", "<|end|>")}


def events(name: str, text: str, prefix: str = "") -> list:
    return list(parse_reply(text, "stop", name, prefix, TOOLS).events)


def spoken(name: str, text: str) -> str:
    before, after = ON_THE_WAY.get(name, ("", ""))
    return before + text + after


@pytest.mark.parametrize("name", CALLS)
def test_text_around_a_call_is_kept(name: str) -> None:
    text = spoken(name, "One.") + CALLS[name] + CALLS[name] + spoken(name, "Two.")
    assert events(name, text) == [Text(text="One."), MOVE, MOVE, Text(text="Two.")]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_goes_out_whole_with_its_close_marker(name: str) -> None:
    parser = ReplyParser(name, tools=TOOLS)
    got = [parser.feed(character) for character in CALLS[name]]
    assert got == [[]] * (len(got) - 1) + [[MOVE]]


@pytest.mark.parametrize("name", CALLS)
def test_a_cut_off_call_is_text_verbatim(name: str) -> None:
    for size in range(CALLS[name].index("move") + 3, len(CALLS[name])):
        text = CALLS[name][:size]
        assert events(name, text) == [Text(text=text, malformed_call=True)]


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_is_text_verbatim(name: str) -> None:
    broken = {
        "qwen3_coder": CALLS[name].replace("<function=move>", "move"),
        "glm": CALLS[name].replace("<arg_value>1", "1"),
    }
    text = broken.get(name, CALLS[name].replace("1}", "1").replace(' string="false"', ""))
    assert text != CALLS[name]
    reply = parse_reply(text, "stop", name, tools=TOOLS)
    assert reply.text == text
    assert not reply.tool_calls


@pytest.mark.parametrize("name", [n for n in FAMILY_NAMES if n != "harmony"])
def test_reasoning_may_be_opened_by_the_prompt(name: str) -> None:
    opener = family(name).turn_opener
    assert events(name, "hm</think>\n\nHi", opener + "<think>\n") == [Reasoning(text="hm"), Text(text="Hi")]
    assert events(name, "<think>hm</think>Hi", opener) == [Reasoning(text="hm"), Text(text="Hi")]
    assert events(name, "hm", opener + "<think>") == [Reasoning(text="hm")]


def test_groups_of_calls_have_silent_marks() -> None:
    kimi = CALLS["kimi"]
    text = f"Go. <|tool_calls_section_begin|>{kimi}{kimi}<|tool_calls_section_end|> Gone."
    assert events("kimi", text) == [Text(text="Go."), MOVE, MOVE, Text(text="Gone.")]
    deepseek = CALLS["deepseek"]
    text = f"<｜tool▁calls▁begin｜>{deepseek}\n{deepseek}<｜tool▁calls▁end｜>"
    assert events("deepseek", text) == [MOVE, MOVE]
    dsml = CALLS["deepseek_dsml"]
    assert events("deepseek_dsml", f"\n\n<｜DSML｜function_calls>\n{dsml}\n</｜DSML｜function_calls>") == [MOVE]


def test_deepseek_v3_fences_its_arguments() -> None:
    body = 'function<｜tool▁sep｜>move\n```json\n{"crate": "7", "bay": 1}\n```'
    assert events("deepseek", f"<｜tool▁call▁begin｜>{body}<｜tool▁call▁end｜>") == [MOVE]


def test_kimi_call_without_a_name_is_text() -> None:
    text = "<|tool_call_begin|>3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert events("kimi", text) == [Text(text=text, malformed_call=True)]


HARMONY_CALL = 'to=functions.move<|channel|>commentary json<|message|>{"crate": "7", "bay": 1}<|call|>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant " + HARMONY_CALL, [Reasoning(text="hm"), MOVE]),
        (" " + HARMONY_CALL, [MOVE]),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
         [Reasoning(text="a"), Text(text="b")]),
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|> b\n<|return|>",
         [Text(text="a\n\n b\n")]),
        ("<|channel|>analysis<|message|>cut <|ret", [Reasoning(text="cut <|ret")]),
        ("<|channel|>final<|message|>a<|end|><|start|>assistant<|chan", [Text(text="a")]),
        ("no channel at all", [Text(text="no channel at all")]),
        ("<|channel|>final<|message|>a<|start|>assistant<|channel|>final<|message|>b", [Text(text="a\n\nb")]),
    ],
)  # fmt: skip
def test_harmony_parts(text: str, expected: list) -> None:
    assert events("harmony", text, "<|start|>assistant") == expected


def test_harmony_call_that_no_call_mark_closes_is_text() -> None:
    text = CALLS["harmony"].replace("<|call|>", "<|end|>")
    assert events("harmony", text) == [Text(text=text, malformed_call=True)]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "1", "1"),
        ({"type": "integer"}, "1", 1),
        ({"type": "integer"}, " 1 ", 1),
        ({"type": "integer"}, "1.5", "1.5"),
        ({"type": "integer"}, "one", "one"),
        ({"type": "integer"}, "123456789012345678901234567890", "123456789012345678901234567890"),
        ({"type": "number"}, "1", 1),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "0", "0"),
        ({"type": "object"}, '{"a": [1, null]}', {"a": [1, None]}),
        ({"type": "array"}, "{}", "{}"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {}]}, "1", "1"),
        ({"$ref": "#/$defs/count"}, "1", 1),
        ({"$ref": "#/$defs/loop"}, "1", "1"),
        ({}, "1", "1"),
        (None, "1", "1"),
    ],
)
def test_arguments_between_tags_mean_what_the_schema_allows(schema: Any, text: str, value: object) -> None:
    parameters = {
        "properties": {} if schema is None else {"a": schema},
        "$defs": {"count": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    coder = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    glm = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    for name, reply in (("qwen3_coder", coder), ("glm", glm)):
        (call,) = parse_reply(reply, "stop", name, tools=tools).tool_calls
        assert call.arguments == {"a": value}
        assert type(call.arguments["a"]) is type(value)


def test_a_value_may_hold_its_own_closing_tag() -> None:
    value = "a</parameter>\nb</function>"
    text = f"<tool_call>\n<function=move>\n<parameter=crate>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert events("qwen3_coder", text) == [ToolCall(name="move", arguments={"crate": value})]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_marks_that_are_special_tokens_are_shown_and_no_others(name: str) -> None:
    marks = sorted(family(name).markers)
    vocabulary = [*marks, "<|im_end|>", "<|user|>"]

    class Marks:
        def decode(self, ids: list[int]) -> str:
            return "".join(vocabulary[i] for i in ids)

    special = {text: i for i, text in enumerate(vocabulary)}
    shown = Detokenizer(Marks(), hidden_ids(special, name)).feed(range(len(vocabulary)))
    assert shown == "".join(marks)


def test_auto_reads_the_family_off_the_template() -> None:
    assert choose_family("auto", ToyTemplate()) == "hermes"
    assert choose_family("kimi", ToyTemplate()) == "kimi"


class Odd(ToyTemplate):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call = call

    def render(self, messages, tools, add_generation_prompt):
        shown = "tools" * bool(tools and self.call)
        return shown + "".join(self.call if message.tool_calls else message.content for message in messages)


def test_auto_refuses_a_format_that_it_cannot_read() -> None:
    with pytest.raises(ConfigError, match=r"writes .*gyre_probe.*--parser, one of hermes, .*plain"):
        choose_family("auto", Odd("[CALL]gyre_probe()"))
    with pytest.raises(ConfigError, match=r"shows no calls.*--parser"):
        choose_family("auto", Odd("..."))
    assert choose_family("auto", Odd("")) == "plain"
    assert fold(ReplyParser("plain").feed(CALLS["hermes"])) == (Text(text=CALLS["hermes"]),)
