"""Every family: any cut of the text gives the same events, and a rendered reply is read back as it was."""

from collections.abc import Mapping
from os.path import commonprefix
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_proxy.families import FAMILY_NAMES
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.parse import ReplyParser, fold, parse_reply
from gyre_proxy.reply_format import choose_family
from tests.support.public_templates import public_template
from tests.support.reply_texts import TOOLS, pieces

PREFIXES = ["", "<|start|>assistant", "<|im_start|>assistant\n<think>\n", "<|assistant|></think>", "<think></think>"]

RENDERED = {
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "Spark2.5": "glm",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_dsml",
    "deepseek-ai-DeepSeek-V4": "deepseek_dsml",
    "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": "harmony",
}
# What a template does not write of a turn, or not in the place where the model writes it.
NO_TEXT_WITH_CALLS = ("openai-gpt-oss-120b",)
ONE_CALL = ("openai-gpt-oss-120b",)
REASONING = ("GLM-4.6", "GLM-4.7-Flash", "Spark2.5", "Qwen-Qwen3-0.6B", "Qwen3.5-4B", "openai-gpt-oss-120b")
OPENERS = ("<|im_start|>assistant", "<|assistant|>", "<|Bot|>", "<｜Assistant｜>", "<|im_middle|>")
STOPS = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|end|>")


@pytest.mark.parametrize("name", FAMILY_NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_stream_of_any_cut_is_the_batch(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(pieces(name)), st.text(max_size=3)), max_size=12)))
    prefix = data.draw(st.sampled_from(PREFIXES))
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), label="cuts"))
    parser = ReplyParser(name, prefix, TOOLS)
    cuts = [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    events = [event for piece in cuts for event in parser.feed(piece)] + parser.finish()
    whole = parse_reply(text, "stop", name, prefix, TOOLS)
    assert fold(events) == whole.events
    assert parser.finish() == []
    one_by_one = ReplyParser(name, prefix, TOOLS)
    assert fold([e for c in text for e in one_by_one.feed(c)] + one_by_one.finish()) == whole.events


WORDS = st.sampled_from(["", "7", "true", "null", "None", "x </parameter> y", "{}", "two\nlines", "é🚚", "<b>", '"q"'])
NUMBERS = st.lists(st.one_of(st.integers(-9, 9), st.sampled_from([0.5, -2.25])), max_size=3)
NOTES = st.one_of(st.none(), st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from([1, "s", None]), max_size=2))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "crate": WORDS,
        "bay": st.integers(-(2**53), 2**53),
        "gently": st.booleans(),
        "weights": NUMBERS,
        "note": NOTES,
    },
)
TEXT = st.sampled_from(["", "Done.", "First a look.\n\nThen `x < 3`."])


@pytest.mark.parametrize("template_name", RENDERED)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(reasoning=TEXT, text=TEXT, calls=st.lists(ARGUMENTS, max_size=2))
def test_a_rendered_reply_is_read_back(
    template_name: str, reasoning: str, text: str, calls: list[Mapping[str, Any]]
) -> None:
    template = public_template(template_name)
    calls = calls[:1] if template_name in ONE_CALL else calls
    text = "" if template_name in NO_TEXT_WITH_CALLS and calls else text
    reasoning = reasoning if template_name in REASONING else ""
    tool_calls = tuple(
        ToolCall(name="move", arguments=arguments, id=f"call_000{i}") for i, arguments in enumerate(calls)
    )
    user = Message(role="user", content="Go.")
    turn = Message(role="assistant", content=text, reasoning=reasoning or None, tool_calls=tool_calls)
    shown = written(template.render([user, turn], TOOLS, False), template.render([user], TOOLS, False))
    reply = parse_reply(shown, "stop", RENDERED[template_name], "", TOOLS)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("move", arguments) for arguments in calls]
    assert reply.text.strip() == text
    assert reply.reasoning == reasoning


def written(whole: str, before: str) -> str:
    """What the model writes of the last turn in `whole`: without its opener, and think blocks closed by the prompt."""
    shown = whole[len(commonprefix([whole, before])) :]  # noqa: RUF071 - texts, not paths
    for opener in OPENERS:
        shown = shown.rpartition(opener)[2]
    for stop in STOPS:
        shown = shown.rstrip("\n").removesuffix(stop)
    return shown.removeprefix("</think>")


@pytest.mark.parametrize("template_name", RENDERED)
def test_the_template_names_its_family(template_name: str) -> None:
    assert choose_family("auto", public_template(template_name)) == RENDERED[template_name]
