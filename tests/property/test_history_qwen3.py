"""The same properties on the real Qwen3 template, with two independent programs as oracles."""

import os
from functools import lru_cache
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_data.schema import Extension
from gyre_proxy.message import Message
from tests.support.driver import Driver, system, user
from tests.support.harness import Harness, Model
from tests.support.qwen3 import qwen3_folder, qwen3_template

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


@lru_cache(maxsize=1)
def tokenizer(folder):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def grown(random: Random, num_calls: int, tools=TOOLS) -> Harness:
    """A conversation that only grows."""
    driver = Driver(qwen3_template())
    plan_call = driver.plan
    driver.plan = lambda chat, label=None, **kwargs: plan_call(chat, label, tools=tools)
    harness = Harness(driver, Model(driver.template, random, "<|im_end|>", split=0.1), random)
    chat = harness.start()
    for _ in range(num_calls):
        chats.append(chat)
        chat = harness.sample("extend", chat)
    return harness


chats: list[list[Message]] = []


@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(1, 4), tools=st.sampled_from([(), TOOLS]))
def test_rendering_equals_transformers(random: Random, num_calls: int, tools) -> None:
    template, reference = qwen3_template(), tokenizer(qwen3_folder())
    chats.clear()
    grown(random, num_calls, tools)
    for chat in chats:
        extra = [*chat, system("a late one"), user("<tool_response>x</tool_response>")]
        for messages, generation in ((chat, True), (chat, False), (extra, True)):
            shown = [message.for_template() for message in messages]
            text = reference.apply_chat_template(
                shown, tools=list(tools) or None, tokenize=False, add_generation_prompt=generation
            )
            assert template.render(messages, tools, generation) == text
            assert template.encode(text).ids.tolist() == reference.encode(text, add_special_tokens=False)


@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 5))
def test_extension_equals_the_hand_written_renderer(random: Random, num_calls: int) -> None:
    from renderers import Qwen3RendererConfig, create_renderer

    renderer = create_renderer(tokenizer(qwen3_folder()), Qwen3RendererConfig(thinking_retention="all"))
    chats.clear()
    driver = grown(random, num_calls).driver
    driver.check()
    outputs = {node.node_id: node.token_ids.tolist() for node in driver.nodes}
    for i, plan in enumerate(driver.plans[1:]):
        assert plan.extension in (Extension.BRIDGE, Extension.REPAIR)
        new = [message.for_template() for message in chats[i + 1][len(chats[i]) + 1 :]]
        bridged = renderer.bridge_to_next_turn(
            driver.plans[i].prompt_ids.tolist(), outputs[driver.calls[i].output_node], new, tools=list(TOOLS)
        )
        assert bridged is not None
        assert plan.prompt_ids.tolist() == list(bridged.token_ids)


@pytest.mark.parametrize("thinking", ["keep", "fork"])
@few
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 6))
def test_the_record_is_exact(thinking: str, random: Random, num_calls: int) -> None:
    driver = Driver(qwen3_template(), thinking=thinking)
    harness = Harness(driver, Model(driver.template, random, "<|im_end|>", split=0.1), random)
    harness.run(num_calls)
    driver.check()
    chat = harness.start()
    kept = driver.plan(chat)
    driver.history = driver.restored()
    assert np.array_equal(driver.plan(chat).prompt_ids, kept.prompt_ids)
    for plan in driver.plans:
        assert plan.fork_check is None, "the checks hold on this template"
