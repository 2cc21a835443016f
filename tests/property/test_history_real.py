"""The same properties on real tokenizers with their own templates, with two independent programs as oracles.

Qwen3's template renders calls and reasoning; SmolLM2's renders contents only, so its calls cannot be continued.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_data.schema import Extension
from gyre_proxy.message import Message
from gyre_proxy.template import ChatTemplate
from tests.support.driver import Driver, said, system, user
from tests.support.harness import Harness, Model, echoed
from tests.support.qwen3 import qwen3_folder, qwen3_template
from tests.support.smollm2 import smollm2_folder, smollm2_template

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "stat_bay",
            "description": "How full a bay is: < > & ' é",
            "parameters": {"type": "object", "properties": {"bay": {"type": "integer"}}},
        },
    },
)
few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True, kw_only=True, slots=True)
class Real:
    """A tokenizer folder, its template, and whether that renders tool calls."""

    folder: Callable[[], Path]
    template: Callable[[], ChatTemplate]
    calls: bool


REAL = {
    "qwen3": Real(folder=qwen3_folder, template=qwen3_template, calls=True),
    "smollm2": Real(folder=smollm2_folder, template=smollm2_template, calls=False),
}
every = pytest.mark.parametrize("name", REAL)


@lru_cache(maxsize=2)
def tokenizer(folder):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def grown(name: str, random: Random, num_calls: int, tools=TOOLS) -> tuple[Harness, list[list[Message]]]:
    """A conversation that only grows, and what was asked in it."""
    driver, asked = Driver(REAL[name].template()), []
    plan_call = driver.plan
    driver.plan = lambda chat, label=None, **kwargs: plan_call(chat, label, tools=tools)
    model = Model(driver.template, random, "<|im_end|>", split=0.1)
    harness = Harness(driver, model, random, calls=0.6 if REAL[name].calls else 0.0)
    chat = harness.start()
    for _ in range(num_calls):
        asked.append(chat)
        chat = harness.sample("extend", chat)
    return harness, asked


@every
@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(1, 4), tools=st.sampled_from([(), TOOLS]))
def test_rendering_equals_transformers(name: str, random: Random, num_calls: int, tools) -> None:
    template, reference = REAL[name].template(), tokenizer(REAL[name].folder())
    for chat in grown(name, random, num_calls, tools)[1]:
        extra = [*chat, system("a late one"), user("<tool_response>x</tool_response>")]
        for messages, generation in ((chat, True), (chat, False), (extra, True)):
            shown = [message.for_template() for message in messages]
            text = reference.apply_chat_template(
                shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
            )
            assert template.render(messages, tools, generation) == text
            assert template.encode(text).ids.tolist() == reference.encode(text, add_special_tokens=False)


@every
@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 6))
def test_a_conversation_that_only_grows_is_one_path(name: str, random: Random, num_calls: int) -> None:
    driver = grown(name, random, num_calls)[0].driver
    driver.check()
    for before, after in zip(driver.calls, driver.plans[1:], strict=False):
        assert after.extension in (Extension.BRIDGE, Extension.REPAIR)
        whole = driver.path_ids(before.output_node)
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
    assert all(count == 1 for count in Counter(node.parent_id for node in driver.nodes).values())


@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 6))
def test_extension_equals_the_hand_written_renderer(random: Random, num_calls: int) -> None:
    """A sixth of the replies is cut, half of those with reasoning inside it: see `Model.reply`."""
    harness, asked = grown("qwen3", random, num_calls)
    driver = harness.driver
    driver.check()
    outputs = {node.node_id: node.token_ids.tolist() for node in driver.nodes}
    for i, plan in enumerate(driver.plans[1:]):
        assert plan.extension in (Extension.BRIDGE, Extension.REPAIR)
        new = [message.for_template() for message in asked[i + 1][len(asked[i]) + 1 :]]
        prompt, output = driver.plans[i].prompt_ids.tolist(), outputs[driver.calls[i].output_node]
        assert plan.prompt_ids.tolist() == bridged(prompt, output, new)


@pytest.mark.parametrize("cut", ["<think>It is", "<think>It is full.</think>It", "It is full.", ""])
def test_a_cut_turn_is_closed_as_the_hand_written_renderer_does(cut: str) -> None:
    driver = Driver(qwen3_template())
    chat = [user("Look.")]
    reasoning, _, text = cut.removeprefix("<think>").partition("</think>") if "<think>" in cut else ("", "", cut)
    reply = said(text, reasoning=reasoning or None, finish="length")
    plan = driver.call(chat, ids := qwen3_template().encode(cut or "<think>").ids.tolist(), reply)
    more = [*chat, echoed(Random(0), reply, driver.output_node, rewrite=False), user("Go on.")]
    assert driver.plan(more).prompt_ids.tolist() == bridged(
        plan.prompt_ids.tolist(), ids, [more[-1].for_template()], ()
    )


@lru_cache(maxsize=1)
def renderer():
    from renderers import Qwen3RendererConfig, create_renderer

    return create_renderer(tokenizer(qwen3_folder()), Qwen3RendererConfig(thinking_retention="all"))


def bridged(prompt: list[int], output: list[int], new: list[dict], tools=TOOLS) -> list[int]:
    """The next prompt as `renderers` makes it from the same tokens."""
    found = renderer().bridge_to_next_turn(prompt, output, new, tools=list(tools))
    assert found is not None
    return list(found.token_ids)


@pytest.mark.parametrize("thinking", ["keep", "fork"])
@every
@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 6))
def test_the_record_is_exact(name: str, thinking: str, random: Random, num_calls: int) -> None:
    driver = Driver(REAL[name].template(), thinking=thinking)
    harness = Harness(driver, Model(driver.template, random, "<|im_end|>", split=0.1), random)
    harness.run(num_calls)
    driver.check()
    chat = harness.start()
    kept = driver.plan(chat)
    driver.history = driver.restored()
    assert np.array_equal(driver.plan(chat).prompt_ids, kept.prompt_ids)
    for plan in driver.plans:
        if plan.fork_check is not None:
            assert not REAL[name].calls, "the checks hold on this template"
            assert plan.fork_check.startswith(("V3:", "V5:")), "only what is not shown cannot be continued"
