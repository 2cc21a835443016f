"""A path as a conversation and as tokens: what the views, exports and reports are made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as Folder

import numpy as np
import pytest
from hypothesis import given, settings

from gyre_data.admission import admit
from gyre_data.errors import DataError
from gyre_data.execution import Execution
from gyre_data.schema import Author
from tests.support.forest import ExecutionBuilder, Forest, Made, forests

CALLS = [{"name": "Bash", "arguments": {"command": "ls"}}, {"name": "Read", "arguments": {"path": "a.py"}}]


def two_turns(wire: str = "openai_chat") -> tuple[Forest, ExecutionBuilder, Made, Made]:
    """A turn with two tool calls, both answered in the next prompt, the later one first."""
    run = Forest()
    e = run.execution("e_0123456789ab", group="g")
    a = e.call(new=[("system", 5), ("user", 3)], output=4, wire=wire)
    b = e.call(after=a, new=[("tool", 6), ("tool", 2), ("user", 1)], output=2, wire=wire, version=("run", 1))
    return run, e, a, b


def prompts(e: ExecutionBuilder) -> list[str]:
    return [node.node_id for node in e.nodes.values() if node.kind == "prompt"]


def test_a_path_is_named_by_a_node_or_a_call_or_its_number() -> None:
    run, _e, a, b = two_turns()
    e = Execution.load(run, "0123")
    for call, number in ((a, "c1"), (b, "c2")):
        assert {e.path(name).leaf for name in (call.id, number)} == {e.path(call.output).leaf}
    with pytest.raises(DataError, match="got 'c3'"):
        e.path("c3")


def test_a_path_is_its_messages_with_their_spans_and_calls() -> None:
    run, _e, a, b = two_turns()
    path = Execution.load(run, "0123").main
    told = [(m.role, m.start, m.end, m.sampled, m.call_id) for m in path.conversation]
    assert told == [
        ("system", 0, 5, False, a.id),
        ("user", 5, 8, False, a.id),
        ("assistant", 10, 14, True, a.id),
        ("tool", 14, 20, False, b.id),
        ("tool", 20, 22, False, b.id),
        ("user", 22, 23, False, b.id),
        ("assistant", 25, 27, True, b.id),
    ]
    assert [path.tree.node_id[m.node] for m in path.conversation if m.sampled] == [a.output, b.output]
    calls = [(c.number, c.call.call_id, c.begin, c.start, c.end) for c in path.calls]
    assert calls == [(1, a.id, 0, 10, 14), (2, b.id, 14, 25, 27)]
    assert len(path) == 27
    assert path.call is not None
    assert path.call.call_id == b.id
    assert path.node_id == b.output
    with pytest.raises(DataError, match=r"gyre_data\.open"):
        path.messages()
    assert path.tools() == []


@pytest.mark.parametrize("wire", ["openai_chat", "anthropic"])
@pytest.mark.parametrize("thought", [{}, {"reasoning": "hm", "content": "I look."}])
def test_a_tool_result_names_the_call_it_answers(tmp_path: Folder, wire: str, thought: dict[str, str]) -> None:
    run, e, a, _b = two_turns(wire)
    shift = len(thought) if wire == "anthropic" else 0  # Anthropic numbers blocks, the others calls
    prefix = "toolu" if wire == "anthropic" else "call"
    e.say(a.output, {"role": "assistant", "content": "", "tool_calls": CALLS, **thought})
    tools = [node for node in prompts(e) if e.nodes[node].message_role == "tool"]
    e.say(tools[0], {"role": "tool", "content": "1", "tool_call_id": f"{prefix}_{a.output}_{1 + shift}"})
    e.say(tools[1], {"role": "tool", "content": "2", "tool_call_id": f"{prefix}_{a.output}_{shift}"})
    path = run.write(tmp_path / "r")["0123"].main
    answers = [(m.value["content"], m.answers) for m in path.conversation if m.role == "tool"]
    assert [(text, found and (found.message, found.number, found.name)) for text, found in answers] == [
        ("1", (2, 1, "Read")),
        ("2", (2, 0, "Bash")),
    ]
    assert [m["role"] for m in path.messages()] == ["assistant", "tool", "tool"]
    assert len(path.conversation) == 7


def test_ids_of_the_client_and_unknown_ones(tmp_path: Folder) -> None:
    run, e, a, _b = two_turns()
    e.say(a.output, {"role": "assistant", "content": "", "tool_calls": [{**CALLS[0], "id": "x1"}, CALLS[1]]})
    tools = [node for node in prompts(e) if e.nodes[node].message_role == "tool"]
    e.say(tools[0], {"role": "tool", "content": "1", "tool_call_id": "x1"})
    e.say(tools[1], {"role": "tool", "content": "2", "tool_call_id": f"call_{a.output}_9"}, {"role": "user"})
    path = run.write(tmp_path / "r")["0123"].main
    found = [m.answers for m in path.conversation if m.role == "tool"]
    assert [(x.number, x.name) for x in found if x is not None] == [(0, "Bash"), (None, None)]
    shared = [(m.role, m.start, m.end) for m in path.conversation if m.node == path.conversation[4].node]
    assert shared == [("tool", 20, 22), ("user", 20, 22)]


def test_a_message_that_is_not_there_is_named(tmp_path: Folder) -> None:
    run, e, a, _b = two_turns()
    e.say(a.output, {"role": "assistant", "content": "hello"})
    run.rows["blobs"].clear()
    opened = run.write(tmp_path / "r")
    with pytest.raises(DataError, match="run does not hold all of"):
        opened["0123"].main.messages()
    assert [m.value for m in opened["0123"].main.conversation] == [None] * 7
    assert list(opened.sql("select node_id, content from messages")) == [(a.output, None)]


def test_a_copy_of_a_turn_stands_for_the_turn(tmp_path: Folder) -> None:
    run, e, a, _b = two_turns()
    e.say(a.output, {"role": "assistant", "content": "", "tool_calls": CALLS})
    e.call(new=[("user", 2), ("assistant", 4, {"copy_of": a.output}), ("tool", 3)], output=1)
    copied, result = prompts(e)[-2:]
    e.say(copied, {"role": "assistant", "content": "", "tool_calls": CALLS})
    e.say(result, {"role": "tool", "content": "1", "tool_call_id": f"call_{a.output}_1"})
    last = run.write(tmp_path / "r")["0123"].main.conversation[2]
    assert last.answers is not None
    assert (last.answers.message, last.answers.name) == (1, "Read")


def test_tokens_of_a_path() -> None:
    run, e, a, b = two_turns()
    run.execution("e_ffff", group="g", score=0.0).call()
    e.score(1.0)
    path = Execution.load(run, "0123").main
    assert path.token_ids.tolist() == [t for node in path.nodes for t in path.tree.ids(int(node)).tolist()]
    assert np.flatnonzero(path.sampled_T).tolist() == [10, 11, 12, 13, 25, 26]
    assert np.flatnonzero(~np.isnan(path.logprobs)).tolist() == [10, 11, 12, 13, 25, 26]
    assert path.logprobs[25:].tolist() == e.nodes[b.output].logprobs.tolist()  # type: ignore[union-attr]
    assert [(str(v.policy_id), v.n, v.start, v.end) for v in path.versions] == [("base", 0, 10, 14), ("run", 1, 25, 27)]
    admission = admit(run)
    assert path.owner_T(admission).tolist() == [-1] * 10 + [0] * 4 + [-1] * 11 + [0] * 2
    assert np.array_equal(path.loss_mask_T(admission), path.sampled_T)
    assert not path.loss_mask_T(admit(run, only=["e_ffff"])).any()
    assert (
        Execution.load(run, "0123").path(a.id).node_id == a.output == Execution.load(run, "0123").path(a.output).node_id
    )


def test_side_by_side_nodes_are_one_view_of_the_file(tmp_path: Folder) -> None:
    run, e, a, b = two_turns()
    c = e.call(after=a, new=[("user", 5)], output=3)
    opened = run.write(tmp_path / "r")
    straight, fork = opened["0123"].path(b.output), opened["0123"].path(c.output)
    for path in (straight, fork):
        assert path.token_ids.tolist() == path.tree.path_ids(path.leaf).tolist()
        assert path.token_ids.dtype == np.int32
        assert not path.token_ids.flags.writeable
    assert np.shares_memory(straight.token_ids, straight.tree.ids(0))
    assert not np.shares_memory(fork.token_ids, fork.tree.ids(0))
    assert (straight.shared_with(fork).nodes, straight.shared_with(fork).tokens) == (4, 14)
    assert straight.shared_with(straight).tokens == len(straight)
    other = run.execution("e_9999")
    other.call(new=[("system", 5)])
    assert Execution.load(run, "9999").main.shared_with(straight).nodes == 0


def test_counted_tokens_have_positions_and_no_ids() -> None:
    run, e, _a, b = two_turns()
    bare = replace(
        e.nodes[b.output],
        token_ids=np.empty(0, np.int32), logprobs=None, policy_versions=None, counted_tokens=7, author=Author.PROVIDER,
    )  # fmt: skip
    run.rows["nodes"] = [bare if row.node_id == b.output else row for row in run.rows["nodes"]]
    path = Execution.load(run, "0123").main
    assert (len(path), path.conversation[-1].end, int(path.sampled_T.sum())) == (32, 32, 4 + 7)
    for use in (lambda: path.token_ids, lambda: path.logprobs):
        with pytest.raises(DataError, match="use its messages"):
            use()


@settings(max_examples=60, deadline=None)
@given(forests())
def test_paths_are_the_candidates_and_spans_tile_them(run: Forest) -> None:
    for execution_id in {row.execution_id for row in run.rows["calls"]}:
        e = Execution.load(run, execution_id)
        for path in e.paths():
            assert path.call is not None
            assert len(path.token_ids) == len(path) == len(path.logprobs)
            ends = [0, *(c.end for c in path.calls)]
            assert [c.begin for c in path.calls] == ends[:-1]
            assert ends[-1] == len(path)
            sampled = [(m.start, m.end) for m in path.conversation if m.sampled]
            assert sampled == [(c.start, c.end) for c in path.calls]
            assert int(path.sampled_T.sum()) == sum(b - a for a, b in sampled)
            for other in e.paths():
                shared = path.shared_with(other)
                assert path.token_ids[: shared.tokens].tolist() == other.token_ids[: shared.tokens].tolist()
