"""What must hold of every history, whatever the harness does: on toy templates, and on the real Qwen3."""

from collections import Counter
from copy import copy
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_data.schema import Author, Extension, NodeKind
from gyre_proxy.history import PromptPlan
from gyre_proxy.locality import Locality
from gyre_proxy.matching import Matcher
from tests.support.driver import Driver
from tests.support.harness import Harness, Model
from tests.support.toy_template import TEMPLATES, ToyTemplate

GLM_STOPS = {"tool": "<|observation|>", "user": "<|user|>"}
quick = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def recorded(template, thinking: str, random: Random, num_calls: int, *, stop: str, stops=None) -> Harness:
    driver = Driver(template, thinking=thinking)
    harness = Harness(driver, Model(template, random, stop), random, stops=stops or {})
    harness.run(num_calls)
    return harness


def toy(name: str, thinking: str, random: Random, num_calls: int) -> Harness:
    stops = GLM_STOPS if name == "glm" else {}
    return recorded(ToyTemplate(name), thinking, random, num_calls, stop="<|im_end|>", stops=stops)


def gist(plan: PromptPlan) -> tuple:
    """A plan without the ids of nodes that do not exist yet."""
    new = {draft.node_id for draft in plan.new_nodes}
    drafts = [(d.kind, d.author, d.role, d.copy_of, d.chain, d.token_ids.tolist(), d.messages) for d in plan.new_nodes]
    told = (plan.extension, plan.branch_reason, plan.fork_check, plan.continues_from, plan.agent_role, plan.role_source)
    where = (plan.first_difference_message, plan.first_difference_token, plan.tokens_lost, plan.chain)
    conversation = None if plan.conversation.startswith("new:") else plan.conversation
    path = [node for node in plan.node_ids if node not in new]
    return plan.prompt_ids.tolist(), path, drafts, told, where, conversation, plan.identity


def check_sampled_once(driver: Driver) -> None:
    outputs = [node for node in driver.nodes if node.kind is NodeKind.OUTPUT]
    assert len(outputs) == sum(call.output_node is not None for call in driver.calls)
    assert all(count == 1 for count in Counter(node.node_id for node in outputs).values())
    for node in driver.nodes:
        if node.copy_of is not None:
            assert node.author is Author.CLIENT, "a copy is context, whatever it repeats"


@pytest.mark.parametrize("thinking", ["keep", "fork"])
@pytest.mark.parametrize("name", TEMPLATES)
@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 9))
def test_the_record_is_exact(name: str, thinking: str, random: Random, num_calls: int) -> None:
    harness = toy(name, thinking, random, num_calls)
    driver = harness.driver
    driver.check()
    check_sampled_once(driver)
    for call, plan in zip(driver.calls, driver.plans, strict=True):
        if plan.extension not in (Extension.BRIDGE, Extension.REPAIR):
            continue
        whole = driver.path_ids(next(c.output_node for c in driver.calls if c.call_id == call.continues_from))
        assert np.array_equal(plan.prompt_ids[: len(whole)], whole), "an extension keeps prompt and output as they were"


@pytest.mark.parametrize("name", TEMPLATES)
@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 8))
def test_a_conversation_that_only_grows_is_one_path(name: str, random: Random, num_calls: int) -> None:
    driver = Driver(ToyTemplate(name))
    stops = GLM_STOPS if name == "glm" else {}
    harness = Harness(driver, Model(driver.template, random, "<|im_end|>"), random, stops=stops)
    chat = harness.start()
    for _ in range(num_calls):
        chat = harness.sample("extend", chat)
    driver.check()
    for before, after in zip(driver.calls, driver.plans[1:], strict=False):
        assert after.extension in (Extension.BRIDGE, Extension.REPAIR)
        assert (after.branch_reason, after.fork_check, after.continues_from) == (None, None, before.call_id)
        whole = driver.path_ids(before.output_node)
        assert np.array_equal(after.prompt_ids[: len(whole)], whole)
    parents = Counter(node.parent_id for node in driver.nodes)
    assert all(count == 1 for count in parents.values())


@pytest.mark.parametrize("thinking", ["keep", "fork"])
@pytest.mark.parametrize("name", TEMPLATES)
@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(1, 7))
def test_a_restored_history_plans_the_same(name: str, thinking: str, random: Random, num_calls: int) -> None:
    template = ToyTemplate(name)
    driver = Driver(template, thinking=thinking)
    stops = GLM_STOPS if name == "glm" else {}
    harness = Harness(driver, Model(template, random, "<|im_end|>"), random, stops=stops)
    asked: list = []
    plan_call = driver.plan
    driver.plan = lambda chat, label=None, **kwargs: asked.append(chat) or plan_call(chat, label, **kwargs)
    harness.run(num_calls)
    restored = driver.restored()
    kept = driver.history
    for chat in [*asked, asked[-1][:-1] or asked[0], [*asked[-1], *asked[0]]]:
        driver.history = kept
        one = plan_call(chat)
        driver.history = restored
        assert gist(plan_call(chat)) == gist(one)


@pytest.mark.parametrize("name", ["chatml", "glm"])
@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(4, 16))
def test_a_resumed_walk_says_what_one_from_the_front_says(name: str, random: Random, num_calls: int) -> None:
    compare_walks(name, random, num_calls)


def test_long_conversations_resume_their_walks():
    assert compare_walks("chatml", Random(7), 16) > 4


def compare_walks(name: str, random: Random, num_calls: int) -> int:
    """Run a conversation, each walk also from the front; how many were resumed."""
    resumed, match = [0], Matcher.match

    def both(self, messages, start, client):
        front = copy(self)
        front._resumes = []
        wanted = match(front, messages, start, client)
        resumed[0] += any(one.begins(messages, start, client) for one in self._resumes)
        got = match(self, messages, start, client)
        assert (got.chain, got.turns, got.digest) == (wanted.chain, wanted.turns, wanted.digest)
        return got

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Matcher, "match", both)
        harness = toy(name, "keep", random, num_calls)
    harness.driver.check()
    return resumed[0]


@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(1, 6))
def test_a_reserved_prompt_is_known(random: Random, num_calls: int) -> None:
    harness = toy("chatml", "keep", random, num_calls)
    driver = harness.driver
    chat = harness.start()
    one, two = driver.plan([*chat, *harness.start()]), driver.plan(chat)
    for plan in (one, two):
        driver.history.reserve(plan)
    third = driver.plan(chat)
    assert not third.new_nodes
    assert third.node_ids == two.node_ids


def rendered_short(template, random: Random, num_calls: int, thinking: str = "keep") -> tuple[Harness, Locality]:
    """A run in which every extension that may be is rendered after a stand-in, each of them checked."""
    locality = Locality(template)
    driver = Driver(template, thinking=thinking, locality=locality)
    stops = GLM_STOPS if getattr(template, "name", "") == "glm" else {}
    harness = Harness(driver, Model(template, random, "<|im_end|>"), random, stops=stops)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Locality, "due", lambda self, chain: True)
        harness.run(num_calls)
    return harness, locality


@pytest.mark.parametrize("name", TEMPLATES)
@quick
@given(random=st.randoms(use_true_random=False), num_calls=st.integers(2, 9))
def test_a_stand_in_gives_the_tokens_of_the_whole_history(name: str, random: Random, num_calls: int) -> None:
    _, locality = rendered_short(ToyTemplate(name), random, num_calls)
    assert locality.proved
