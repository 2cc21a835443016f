"""docs/templates.md says what the code does (all of it: tests/real); templates render as transformers renders them."""

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gyre_proxy.message import Message, ToolCall
from gyre_proxy.template import RenderError
from tests.support.public_templates import templates_folder
from tests.support.survey import PAGE, survey_tool

SAMPLE = (
    "deepseek-ai-DeepSeek-V3.1",
    "GigaChat3-10B-A1.8B",
    "GLM-4.6",
    "google-gemma-2-2b-it",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
    "poolside-Laguna-XS.2",
    "Qwen3.5-4B",
)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_page_is_true_of_a_few(name: str) -> None:
    tool = survey_tool()
    row = tool.line(tool.survey(templates_folder() / f"{name}.jinja"))
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"run tools/template_survey.py {templates_folder()}"


def test_every_template_renders_as_in_transformers() -> None:
    tool, compared = survey_tool(), 0
    for path in sorted(templates_folder().glob("*.jinja")):
        template, source = tool.load(path), path.read_text(encoding="utf-8")
        if "strftime_now" in source:
            template._compiled["default"].environment.globals["strftime_now"] = datetime.now().strftime
        for chat in chats("functions.stat_bay:0" if "Kimi" in path.stem else "abcdefghi"):
            shown = [message.for_template() for message in chat]
            for message in shown:  # another name that both give it
                if "reasoning_content" in message:
                    message["thinking"] = message["reasoning_content"]
            try:
                text = template.render(chat, tool.TOOLS, True)
            except RenderError:
                with pytest.raises(Exception):  # noqa: B017 - whatever it is, both refuse
                    theirs(shown, tool, source)
                continue
            assert text == theirs(shown, tool, source), path.stem
            compared += 1
    assert compared > 110


def theirs(shown: list[dict], tool, source: str) -> str:
    texts, _ = render_jinja_template(
        [shown], tools=list(tool.TOOLS), chat_template=source, add_generation_prompt=True, **tool.SPECIAL
    )
    return texts[0]


def chats(call_id: str) -> list[list[Message]]:
    call = ToolCall(name="stat_bay", arguments={"bay": 1, "why": "<é> & 'so'"}, id=call_id)
    start = [Message(role="system", content="Be brief."), Message(role="user", content="Hello <b>.")]
    turn = Message(role="assistant", content="", reasoning="Which?", tool_calls=(call,))
    answered = [*start, turn, Message(role="tool", content="full", tool_call_id=call_id, name="stat_bay")]
    said = Message(role="assistant", content=" It is full.\n", reasoning="So.")
    return [answered, [*answered, said, Message(role="user", content="Go on.")]]
