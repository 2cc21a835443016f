"""Random turns through both wires and back: any mix of known rewrites is the same turn, any other value a fork."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gyre_data.schema import BranchReason, Extension
from gyre_proxy.dialects import ReplyContext, load
from gyre_proxy.history import PromptPlan
from gyre_proxy.message import Reasoning, Reply, Text, ToolCall, Usage
from gyre_proxy.roles import AgentLabel
from tests.support.driver import Driver, user
from tests.support.toy_template import ToyTemplate

END = 257
USER = {"role": "user", "content": "q"}
AGAIN = {"role": "user", "content": "on"}
some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = (
    st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([5e3, -0.0])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | words | st.just("a  \nb\t\n c "),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=5,
)
calls = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=arguments),
    st.sampled_from(["Edit", "Write", "Bash"]),
    st.dictionaries(st.sampled_from(["new_string", "content", "file", "n"]), values, max_size=4),
)


@st.composite
def replies(draw: Callable) -> Reply:
    """Reasoning, text, calls and text again, each or none; never nothing that a client could send back."""
    thought, first, last = draw(words), draw(words), draw(words)
    made = draw(st.lists(calls, max_size=3))
    assume(first.strip() or last.strip() or made)
    told = [Reasoning(text=thought), Text(text=first), *made, Text(text=last)]
    return Reply(events=tuple(one for one in told if isinstance(one, ToolCall) or one.text), finish="stop")


def as_double(value: Any) -> Any:
    """A value as a reader with doubles for numbers writes it again."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) > 2**53:
        value = float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e19:
        return int(value)
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    return [as_double(item) for item in value] if isinstance(value, list) else value


def shuffled(value: Any, random: Random) -> Any:
    if isinstance(value, dict):
        keys = random.sample(list(value), len(value))
        return {key: shuffled(value[key], random) for key in keys}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


# ------------------------------------------------------------------ Claude Code's rewrites of its blocks


def inputs(change: Callable[[dict, Random], dict]) -> Callable[[list, Random], list]:
    def rewrite(blocks: list, random: Random) -> list:
        return [change(block, random) if block["type"] == "tool_use" else block for block in blocks]

    return rewrite


def with_default(block: dict, random: Random) -> dict:
    return {**block, "input": {"replace_all": False, **block["input"]}} if block["name"] == "Edit" else block


def without_line_blanks(block: dict, random: Random) -> dict:
    place = {"Edit": "new_string", "Write": "content"}.get(block["name"])
    text = block["input"].get(place)
    if not isinstance(text, str):
        return block
    return {**block, "input": {**block["input"], place: "\n".join(line.rstrip() for line in text.split("\n"))}}


def other_signature(blocks: list, random: Random) -> list:
    kept = random.choice(["", "EqoB"])
    return [{**block, "signature": kept} if block["type"] == "thinking" else block for block in blocks]


CLAUDE_CODE: list[Callable[[list, Random], list]] = [
    inputs(lambda block, random: {**block, "input": shuffled(block["input"], random)}),
    inputs(lambda block, random: {**block, "input": as_double(block["input"])}),
    inputs(with_default),
    inputs(without_line_blanks),
    lambda blocks, random: sorted(blocks, key=lambda block: block["type"] == "tool_use"),
    lambda blocks, random: [block for block in blocks if block["type"] != "thinking"],
    lambda blocks, random: [block for block in blocks if block["type"] != "text" or block["text"].strip()],
    lambda blocks, random: [{**block, "cache_control": {"type": "ephemeral"}} for block in blocks],
    other_signature,
]

# ------------------------------------------------------------------ rewrites of chat messages


def arguments(change: Callable[[Any, Random], Any], **form: Any) -> Callable[[dict, Random], dict]:
    """The arguments parsed, changed, and written again."""

    def rewrite(message: dict, random: Random) -> dict:
        written = [
            {**call, "function": {**call["function"], "arguments": json.dumps(change(given, random), **form)}}
            for call in message.get("tool_calls", ())
            for given in [json.loads(call["function"]["arguments"])]
        ]
        return {**message, **({"tool_calls": written} if written else {})}

    return rewrite


def parts(message: dict, random: Random) -> dict:
    text = message["content"]
    return {**message, "content": [{"type": "text", "text": text}] if isinstance(text, str) else text}


CHAT: list[Callable[[dict, Random], dict]] = [
    arguments(lambda given, random: given, separators=(",", ":"), ensure_ascii=False),
    arguments(lambda given, random: given, indent=2, sort_keys=True),
    arguments(shuffled),
    arguments(lambda given, random: as_double(given)),
    lambda message, random: {key: item for key, item in message.items() if key != "reasoning_content"},
    lambda message, random: {**message, "content": message["content"] or None},
    lambda message, random: {**message, "refusal": None, "annotations": []},
    parts,
]


# ------------------------------------------------------------------ a turn, sampled, sent and echoed


class Told:
    """One turn that was sampled and sent; `plan` is the next request of its client."""

    def __init__(self, wire: str, client: str | None, reply: Reply, random: Random) -> None:
        self.dialect, self.label = load(wire), AgentLabel(client=client)
        self.driver = Driver(ToyTemplate())
        output = [*(random.randrange(97, 123) for _ in range(9)), END]
        self.driver.call([user("q")], output, reply, self.label)
        call = ReplyContext(call_id="c", node_id=self.driver.output_node, model="m", created=1, prompt_tokens=1)
        self.sent = json.loads(self.dialect.batch(call, reply, Usage(prompt_tokens=1, output_tokens=10)))

    def plan(self, echo: dict[str, Any]) -> PromptPlan:
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "r"}
            for block in (echo["content"] if isinstance(echo["content"], list) else ())
            if block["type"] == "tool_use"
        ]
        answers = [{"role": "tool", "tool_call_id": c["id"], "content": "r"} for c in echo.get("tool_calls", ())]
        following = [{"role": "user", "content": results}] if results else answers or [AGAIN]
        body = {"model": "m", "max_tokens": 9, "messages": [USER, echo, *following]}
        return self.driver.history.plan(self.dialect.parse(json.dumps(body).encode(), {}), self.label)

    def check_same(self, plan: PromptPlan) -> None:
        whole = self.driver.path_ids(self.driver.output_node)
        assert plan.extension in (Extension.BRIDGE, Extension.REPAIR), plan.echo_difference
        assert np.array_equal(plan.prompt_ids[: len(whole)], whole)
        assert (plan.fork_check, plan.echo_difference) == (None, None)

    def check_fork(self, plan: PromptPlan, told: str | None) -> None:
        assert (plan.extension, plan.branch_reason) == (Extension.FORK, BranchReason.CONTEXT_REWRITE)
        assert (plan.fork_check, plan.echo_difference) == (None, told)


@some
@given(
    reply=replies(), random=st.randoms(use_true_random=False), chosen=st.sets(st.sampled_from(range(len(CLAUDE_CODE))))
)
def test_claude_code_sends_the_same_turn_back(reply: Reply, random: Random, chosen: set[int]) -> None:
    told = Told("anthropic", "claude-code", reply, random)
    blocks = told.sent["content"]
    for number in random.sample(sorted(chosen), len(chosen)):
        blocks = CLAUDE_CODE[number](blocks, random)
    assume(blocks)
    told.check_same(told.plan({"role": "assistant", "content": blocks}))


@some
@given(reply=replies(), random=st.randoms(use_true_random=False), chosen=st.sets(st.sampled_from(range(len(CHAT)))))
def test_chat_clients_send_the_same_turn_back(reply: Reply, random: Random, chosen: set[int]) -> None:
    told = Told("openai_chat", None, reply, random)
    message = told.sent["choices"][0]["message"]
    for number in random.sample(sorted(chosen), len(chosen)):
        message = CHAT[number](message, random)
    told.check_same(told.plan(message))


def changed(blocks: list[dict], random: Random) -> tuple[list[dict], str]:
    """The blocks of a turn with another value in one place, and what is told of it."""
    ways = [([*blocks, {"type": "text", "text": "x"}], "text")]
    for at, block in enumerate(blocks):
        before, after = blocks[:at], blocks[at + 1 :]
        if block["type"] == "thinking":
            ways.append(([*before, {**block, "thinking": block["thinking"] + "x"}, *after], "reasoning"))
        if block["type"] != "tool_use":
            continue
        ways.append(([*before, *after], "number of calls"))
        ways.append(([*before, {**block, "name": "Read"}, *after], "tool name"))
        ways.append(([*before, {**block, "input": {**block["input"], "added": True}}, *after], "arguments"))
        for key, value in block["input"].items():
            other = {**block["input"], key: json.dumps(value) + "x"}
            ways.append(([*before, {**block, "input": other}, *after], "arguments"))
    return random.choice(ways)


@some
@given(reply=replies(), random=st.randoms(use_true_random=False))
def test_another_value_is_another_turn(reply: Reply, random: Random) -> None:
    told = Told("anthropic", "claude-code", reply, random)
    blocks, what = changed(told.sent["content"], random)
    assume(blocks)
    named = any(block.get("signature") or block["type"] == "tool_use" for block in blocks)
    told.check_fork(told.plan({"role": "assistant", "content": blocks}), what if named else None)


def test_a_call_that_does_not_parse_is_text_both_ways() -> None:
    """So no client gets to mend, wrap or rename it."""
    reply = Reply(events=(Text(text='<tool_call>{"name": "Bash", "argu', malformed_call=True),), finish="length")
    told = Told("openai_chat", None, reply, Random(1))
    assert not told.sent["choices"][0]["message"].get("tool_calls")
    told.check_same(told.plan(told.sent["choices"][0]["message"]))


@pytest.mark.parametrize("client", ["claude-code", None])
def test_a_blank_turn_with_calls_comes_back_without_its_blanks(client: str | None) -> None:
    reply = Reply(events=(Text(text=" \n"), ToolCall(name="Bash", arguments={})), finish="stop")
    told = Told("anthropic", client, reply, Random(1))
    told.check_same(told.plan({"role": "assistant", "content": told.sent["content"][1:]}))
