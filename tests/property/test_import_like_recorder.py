"""An importer's calls make the tree that the recorder makes of the same requests and replies in observe mode."""

import hashlib
import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data.convert.builder import TreeBuilder
from gyre_data.convert.calls import Opening, SourceCall, grown
from gyre_data.convert.messages import canonical, identity, without_reasoning
from gyre_data.counting import ByteCounter
from gyre_data.schema import AgentRole
from gyre_data.types import Call, Node
from gyre_proxy.message import Message, Request, ToolCall
from gyre_proxy.message import canonical as proxy_canonical
from gyre_proxy.observe.history import ObservedHistory
from gyre_proxy.plan import PromptPlan
from gyre_proxy.roles import AgentLabel
from gyre_proxy.same_turn import canonical_message, message_json

TOOLS = ({"type": "function", "function": {"name": "ls"}},)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.sampled_from([0.5, 2.0, -1.25]) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=3), values, max_size=2)
tool_calls = st.builds(
    ToolCall, name=st.sampled_from(["ls", "cat"]), arguments=arguments | st.just("{broken"), id=st.just("c1")
)
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.text(max_size=6),
    reasoning=st.none() | st.text(max_size=4),
    tool_calls=st.lists(tool_calls, max_size=2).map(tuple),
    tool_call_id=st.none() | st.just("c1"),
    name=st.none() | st.just("n"),
    raw=st.none() | st.just({"blocks": [{"type": "image", "data": "x"}, {"type": "text", "text": "t"}]}),
)


def stored(message: Message) -> dict:
    return json.loads(message_json(message))


@settings(max_examples=30, deadline=None)
@given(messages, values)
def test_messages_are_told_apart_by_the_same_rule(message: Message, value: object) -> None:
    assert identity(stored(message)) == canonical_message(message)
    assert canonical(value) == proxy_canonical(value)
    bare = Message(role="assistant", content="a", reasoning="b")
    assert without_reasoning(stored(bare)) == canonical_message(Message(role="assistant", content="a"))


def traffic(random: Random, num_calls: int) -> list[tuple[list[Message], Message]]:
    """Requests and replies of one agent: it goes on, asks again, goes back, edits, and begins anew with a kept tail.

    Every reply is another one: which of two equal replies a request goes on from, its words do not tell.
    """
    made: list[tuple[list[Message], Message]] = []
    chat = [Message(role="system", content="s"), Message(role="user", content="go")]
    for number in range(num_calls):
        call = (ToolCall(name="ls", arguments={"n": number % 3}, id=f"c{number}"),) if random.random() < 0.5 else ()
        reply = Message(role="assistant", content=f"said {number}", reasoning="hm", tool_calls=call)
        made.append((chat, reply))
        match random.choice(("on", "on", "on", "retry", "back", "edit", "anew")):
            case "retry":
                continue
            case "back":
                chat = list(random.choice(made)[0])
                chat = [*chat[:-1], Message(role="user", content=random.choice(["x", "y"]))]
            case "edit":
                at = random.randrange(1, len(chat))
                chat = [*chat[:at], Message(role=chat[at].role, content="edited"), *chat[at + 1 :]]
            case "anew":
                echo = Message(role="assistant", content=reply.content, tool_calls=reply.tool_calls)
                chat = [chat[0], Message(role="user", content="so far"), echo, Message(role="user", content="on")]
            case _:
                echo = Message(role="assistant", content=f" {reply.content}", tool_calls=reply.tool_calls)
                after = (
                    Message(role="tool", content="r", tool_call_id=call[0].id)
                    if call
                    else Message(role="user", content="u")
                )
                chat = [*chat, random.choice([reply, echo]), after]
    return made


def by_recorder(made: list[tuple[list[Message], Message]]) -> tuple[list[PromptPlan], list[str], list[Node]]:
    history = ObservedHistory(ByteCounter(), execution_id="e")
    plans, outputs, nodes = [], [], list[Node]()
    for number, (chat, reply) in enumerate(made):
        request = Request(wire="anthropic", model="m", messages=tuple(chat), tools=TOOLS)
        plan = history.plan(request, AgentLabel(role=AgentRole.MAIN, source="client"))
        history.reserve(plan)
        outputs.append(f"n_{number}")
        nodes += history.record(plan, call_id=f"c_{number}", output_node_id=outputs[-1], said=reply).nodes
        plans.append(plan)
    return plans, outputs, nodes


def by_importer(made: list[tuple[list[Message], Message]]) -> tuple[list[Call], list[Node]]:
    builder = TreeBuilder("e", ByteCounter(), lambda data: hashlib.sha256(data).hexdigest())
    for number, (chat, reply) in enumerate(made):
        begin = Opening(system=(stored(chat[0]),), tools=TOOLS)
        context = grown(begin, [stored(message) for message in chat[1:]])
        builder.add(SourceCall(key=str(number), context=context, output=stored(reply), wire="anthropic", tools=TOOLS))
    rows = list(builder.rows())
    return [row for row in rows if isinstance(row, Call)], [row for row in rows if isinstance(row, Node)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 14))
def test_the_same_traffic_makes_the_same_tree(seed: int, num_calls: int) -> None:
    made = traffic(Random(seed), num_calls)
    plans, outputs, recorded = by_recorder(made)
    calls, nodes = by_importer(made)
    place = {node.node_id: i for i, node in enumerate(recorded)} | {node.node_id: i for i, node in enumerate(nodes)}

    def told(node: Node) -> tuple[object, ...]:
        return (
            place.get(node.parent_id or ""),
            place.get(node.copy_of or ""),
            place[node.root_id],
            node.start_pos,
            node.counted_tokens,
            str(node.kind),
            node.message_role,
            str(node.author),
            node.message_blobs,
        )

    assert [told(node) for node in nodes] == [told(node) for node in recorded]
    number = {f"c_{i}": i for i in range(len(made))} | {call.call_id: i for i, call in enumerate(calls)}
    for call, plan, output in zip(calls, plans, outputs, strict=True):
        extension = (
            "bridge" if plan.extension == "repair" else str(plan.extension)
        )  # how an echo was written is not told
        assert (str(call.extension), call.branch_reason) == (extension, plan.branch_reason)
        assert place[call.prompt_node or ""] == place[plan.node_ids[-1]]
        assert place[call.output_node or ""] == place[output]
        assert number.get(call.continues_from or "") == number.get(plan.continues_from or "")
        assert (call.prompt_tokens, call.tools_digest) == (len(plan.prompt_ids), plan.tools_digest)
        if plan.extension != "repair":
            assert (call.first_difference_message, call.tokens_lost) == (
                plan.first_difference_message,
                plan.tokens_lost,
            )
