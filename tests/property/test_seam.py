"""New contents that stand in a rendering as they are need no marks: what is found without them is what marks find."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_proxy import extend
from gyre_proxy.extend import CannotExtend, seam
from gyre_proxy.message import Message, ToolCall
from gyre_proxy.template import RenderError
from tests.support.public_templates import public_template, templates_folder
from tests.support.toy_template import TEMPLATES, ToyTemplate

PIECES = ("bay 12 is fine", "bay", "<tool_response>", "</think>", "\n", " ", '"quoted" & {json}', "é", "|", "ok")


def some_content(random: Random) -> str:
    text = "".join(random.choice(PIECES) + random.choice(("", " ")) for _ in range(random.randint(2, 16)))
    return text if random.random() < 0.1 else f"{text.strip()} {random.randint(0, 99)}"


def conversation(random: Random) -> tuple[list[Message], int]:
    """Messages, and the place of the turn that new ones follow."""
    calls = tuple(ToolCall(name="look", arguments={"a": i}, id=f"call_{i}") for i in range(random.randint(0, 2)))
    turn = Message(role="assistant", content=random.choice(("", some_content(random))), tool_calls=calls)
    new = [Message(role="tool", content=some_content(random), tool_call_id=call.id, name="look") for call in calls]
    if not new or random.random() < 0.3:
        new.append(Message(role="user", content=some_content(random)))
    if random.random() < 0.3:
        new.insert(random.randint(0, len(new)), Message(role="system", content=some_content(random)))
    if random.random() < 0.2:
        new.append(Message(role="user", content=new[0].content))  # the same words twice
    start = Message(role="user", content=random.choice((some_content(random), new[0].content)))
    return [start, turn, *new], 1


def found(template, messages, at):
    def render(them):
        try:
            return template.render(them, (), True)
        except RenderError as refusal:
            raise CannotExtend(f"V3: {refusal}") from refusal

    try:
        return seam(render, messages, at)
    except CannotExtend as check:
        return str(check)[:2]


def check(template, random: Random, times: int) -> int:
    """Compare both ways; how often no marks were needed."""
    plain, quick = [0], extend._verbatim

    def counted(new, head, after):
        spans = quick(new, head, after)
        plain[0] += spans is not None
        return spans

    for _ in range(times):
        messages, at = conversation(random)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(extend, "_verbatim", counted)
            one = found(template, messages, at)
            patched.setattr(extend, "_verbatim", lambda *_: None)
            other = found(template, messages, at)
        assert one == other, messages
    return plain[0]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_toy_templates(name, random):
    check(ToyTemplate(name), random, 1)


def test_marks_are_seldom_needed():
    assert check(ToyTemplate("chatml"), Random(3), 60) > 10


def test_public_templates():
    for path in sorted(templates_folder().glob("*.jinja"))[::9]:
        check(public_template(path.stem), Random(path.stem), 20)
