"""System messages after the beginning: what a template takes is found out once, and a history still only grows."""

import numpy as np
import pytest

from gyre_data.schema import Extension
from gyre_proxy.late_system import Placer, SystemForm, system_form
from gyre_proxy.message import Message, ToolCall
from tests.support.driver import Driver, assistant, result, said, system, user
from tests.support.late_templates import ByTurns, Hoisting, Refusing
from tests.support.public_templates import public_template
from tests.support.qwen3 import qwen3_template
from tests.support.toy_template import ToyTemplate

FORMS = {
    ToyTemplate: SystemForm.IN_PLACE,
    Refusing: SystemForm.USER_TURN,
    Hoisting: SystemForm.USER_TURN,
    ByTurns: SystemForm.JOINED,
}
SEEN = "<system-reminder>\nlate\n</system-reminder>"


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_a_template_takes_is_found_out(kind) -> None:
    assert system_form(kind()) is FORMS[kind]


def test_qwen3_takes_them_as_they_stand() -> None:
    assert system_form(qwen3_template()) is SystemForm.IN_PLACE


def test_a_late_message_is_user_text_that_says_where_it_comes_from() -> None:
    chat = (system("a"), system("b"), user("q"), system("late"), assistant("x"), result("r"), system("late"), user("w"))
    assert Placer(SystemForm.IN_PLACE)(chat) == chat
    sent = Placer(SystemForm.USER_TURN)(chat)
    assert [m.role for m in sent] == ["system", "user", "user", "assistant", "tool", "user", "user"]
    assert (sent[0].content, sent[2].content, sent[2].raw) == ("a\nb", SEEN, {"sent_as": "system"})
    joined = Placer(SystemForm.JOINED)(chat)
    assert [m.content for m in joined] == ["a\nb", f"q\n{SEEN}", "x", f"r\n{SEEN}", "w"]
    assert [m.role for m in joined] == ["system", "user", "assistant", "tool", "user"]


@pytest.mark.parametrize("form", [SystemForm.USER_TURN, SystemForm.JOINED])
def test_the_same_messages_are_the_same_objects(form: SystemForm) -> None:
    chat = [system("a"), system("b"), user("q"), system("late"), assistant("x"), user("v"), system("late"), user("w")]
    place = Placer(form)
    one, two = place(chat), place([*chat[:-1], user("w")])
    assert all(before is after for before, after in zip(one[:-1], two[:-1], strict=True))
    assert one == two
    assert place(chat)[-1] is one[-1]


def test_what_was_made_is_not_kept_for_ever() -> None:
    place = Placer(SystemForm.USER_TURN)
    for _ in range(1100):
        place([user("q"), system("late")])
    assert len(place._made) == 1024


def test_what_is_not_text_stays_in_a_joined_message() -> None:
    odd = Message(role="user", content="q", raw={"blocks": [{"type": "odd"}]})
    (joined,) = Placer(SystemForm.JOINED)([odd, system("late")])
    assert joined.raw == {"blocks": [odd.raw, {"sent_as": "system"}]}


@pytest.mark.parametrize("kind", FORMS)
def test_reminders_never_change_what_was_rendered(kind) -> None:
    driver = Driver(kind())
    chat = [system("s"), user("Start."), system("late 900")]
    for turn in range(4):
        driver.call(chat, [97 + turn, 257], said(chr(97 + turn)))
        chat = [*chat, assistant(chr(97 + turn)), user("Next."), system(f"late {turn}")]
    for before, after in zip(driver.calls, driver.plans[1:], strict=False):
        whole = driver.path_ids(before.output_node)
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
        assert (after.extension, after.fork_check) == (Extension.BRIDGE, None)
    assert driver.template.decode(driver.plans[-1].prompt_ids).count("late 1") == 1
    driver.check()


PUBLIC = {
    "GLM-4.6": SystemForm.IN_PLACE,
    "MiniMax-M2": SystemForm.USER_TURN,
    "Mistral-Small-3.2-24B-Instruct-2506": SystemForm.JOINED,
    "Qwen3-Coder": SystemForm.IN_PLACE,
    "Qwen3.5-4B": SystemForm.USER_TURN,
    "deepseek-ai-DeepSeek-V3.1": SystemForm.USER_TURN,
    "meta-llama-Llama-3.3-70B-Instruct": SystemForm.IN_PLACE,
    "moonshotai-Kimi-K2": SystemForm.IN_PLACE,
    "openai-gpt-oss-120b": SystemForm.USER_TURN,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates_show_reminders_where_they_stand(name: str) -> None:
    template = public_template(name)
    form = system_form(template)
    assert form is PUBLIC[name]
    use = assistant("", ToolCall(name="stat_bay", arguments={"bay": 1}, id="call_0"))
    chat = [system("first"), user("Start."), system("second"), use, result("17"), system("third")]
    shorter, longer = (template.render(Placer(form)(chat[:size]), (), False) for size in (3, 6))
    assert longer.startswith(shorter.rstrip())
    places = [longer.find(word) for word in ("first", "Start.", "second", "17", "third")]
    assert places == sorted(places)
    assert [longer.count(word) for word in ("first", "second", "third")] == [1, 1, 1]
