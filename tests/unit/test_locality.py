"""Templates that look at the history before a turn are found out, at the start or by the checks on the way."""

import logging

import pytest

from gyre_data.schema import Extension
from gyre_proxy.late_system import SystemForm
from gyre_proxy.locality import Locality
from tests.support.driver import Driver, assistant, said, user
from tests.support.public_templates import public_template
from tests.support.qwen3 import qwen3_template
from tests.support.toy_template import TEMPLATES, ToyTemplate


class Remembering(ToyTemplate):
    """Writes before the generation prompt how often the conversation has `word`."""

    word = ""
    role = "system"

    def render(self, messages, tools, add_generation_prompt):
        text = super().render(messages, tools, add_generation_prompt)
        count = sum(message.role == self.role and self.word in message.content for message in messages)
        return text.replace("<|im_start|>assistant\n", f"[{count}]<|im_start|>assistant\n") if count else text


class RemembersWord(Remembering):
    word, role = "abracadabra", "user"


class ReadsTools(ToyTemplate):
    def render(self, messages, tools, add_generation_prompt):
        text = super().render(messages, (), add_generation_prompt)
        return text + "".join(tool["function"]["name"] for tool in tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_look_at_the_turn_only_are_local(name: str) -> None:
    found = Locality(ToyTemplate(name))
    assert (found.proved, found.reads_tools) == (True, False)


def test_qwen3_is_local() -> None:
    found = Locality(qwen3_template())
    assert (found.proved, found.reads_tools) == (True, False)


def test_a_template_that_looks_further_back_is_not() -> None:
    assert not Locality(Remembering()).proved


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("Qwen-Qwen3-0.6B", True),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", False),
        ("upstage-Solar-Open-100B", False),
    ],
)
def test_public_templates_that_look_at_earlier_calls_are_found_out(name: str, local: bool) -> None:
    assert Locality(public_template(name)).proved is local


def test_tools_are_given_when_they_matter() -> None:
    found, tools = Locality(ReadsTools()), ({"type": "function", "function": {"name": "f"}},)
    assert (found.proved, found.reads_tools) == (True, True)
    assert found.stand_in(tools)[1] == tools
    assert Locality(ToyTemplate()).stand_in(tools)[1] != tools
    assert Locality(ToyTemplate()).stand_in(())[1] == ()


def conversation(template, locality: Locality | None, num_turns: int) -> Driver:
    driver = Driver(template, locality=locality)
    chat = [user("abracadabra")]
    for number in range(num_turns):
        driver.call(chat, template.encode(f"{number}<|im_end|>").ids, said(str(number)))
        chat += [assistant(str(number)), user(f"more {number}")]
    driver.check()
    return driver


def test_a_failed_check_ends_the_stand_ins(caplog: pytest.LogCaptureFixture) -> None:
    template = RemembersWord()
    locality = Locality(template)
    assert locality.proved, "the trials do not know the word"
    with caplog.at_level(logging.ERROR):
        driver = conversation(template, locality, 200)
    assert not locality.proved
    assert len(caplog.records) == 1
    short = [p for p in driver.plans[1:] if "[1]" not in template.decode(p.prompt_ids[-40:])]
    assert f"; {len(short)} extensions since the last check" in caplog.records[0].message
    assert 0 < len(short) < 199
    assert all(plan.extension is Extension.BRIDGE for plan in driver.plans[1:]), "nothing that was sampled is lost"


def test_local_or_not_the_tokens_are_the_same() -> None:
    one, two = (conversation(qwen3_template(), local, 6) for local in (Locality(qwen3_template()), None))
    assert [p.prompt_ids.tolist() for p in one.plans] == [p.prompt_ids.tolist() for p in two.plans]


def test_only_what_is_new_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ToyTemplate()
    rendered: list[int] = []
    render = ToyTemplate.render

    def counted(self, messages, tools, add_generation_prompt):
        rendered.append(len(messages))
        return render(self, messages, tools, add_generation_prompt)

    locality = Locality(template)
    monkeypatch.setattr(Locality, "due", lambda self, chain: False)
    monkeypatch.setattr("gyre_proxy.history.system_form", lambda template: SystemForm.IN_PLACE)
    monkeypatch.setattr(ToyTemplate, "render", counted)
    conversation(template, locality, 30)
    assert max(rendered) == 3, "a stand-in, the turn, and one new message"


def test_a_turn_that_cannot_be_extended_is_passed_over() -> None:
    """What was sampled before it keeps its ids; only what comes after is rendered again."""
    template = ToyTemplate()
    driver = Driver(template)
    first, second = [97, 301, 257], template.encode("two<|endoftext|>x<|im_end|>").ids
    driver.call([user("u")], first, said("abc"))
    driver.call([user("u"), assistant("abc"), user("v")], second, said("two"))
    chat = [user("u"), assistant("abc"), user("v"), assistant("two"), user("w")]
    plan = driver.call(chat, [98, 257], said("b"))
    assert plan.fork_check.startswith("V2")
    assert (plan.extension, plan.branch_reason) == (Extension.FORK, "template")
    assert driver.calls[0].output_node in plan.node_ids
    assert driver.calls[1].output_node not in plan.node_ids
    assert [token for token in plan.prompt_ids.tolist() if token == 301] == [301], "as it was sampled"
    assert template.decode(plan.prompt_ids) == template.render(chat, (), True)
    copy = next(node for node in driver.nodes if node.copy_of == driver.calls[1].output_node)
    assert copy.author == "client"
    driver.check()
