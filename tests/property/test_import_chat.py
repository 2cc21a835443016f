"""Conversations of one tree, written one by one, are that tree again when they are imported."""

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_data import import_sessions
from gyre_data.execution import Execution
from gyre_data.schema import NodeKind
from tests.support.importing import only_execution, write_lines

words = st.sampled_from(["", "a", "b ", "\nzß", "🤖"])
calls = st.lists(
    st.tuples(st.sampled_from(["ls", "cat"]), st.sampled_from([{}, {"x": 1.0}, {"b": [None], "a": "é"}])), max_size=2
)


@st.composite
def message(draw: st.DrawFn, after: str) -> dict[str, Any]:
    """What may follow a message of role `after`."""
    role = draw(st.sampled_from(["user", "tool"] if after == "assistant" else ["assistant", "assistant", "user"]))
    text = draw(words)
    if role == "tool":
        return {"role": role, "content": text, "tool_call_id": draw(st.sampled_from(["c1", "c2"]))}
    if role == "user":
        return {"role": role, "content": text or "go"}
    said: dict[str, Any] = {"role": role, "content": text}
    if made := draw(calls):
        said["tool_calls"] = [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for i, (name, given) in enumerate(made, 1)
        ]
    if draw(st.booleans()):
        said["reasoning_content"] = draw(st.sampled_from(["hm", "so"]))
    return said if said.keys() > {"role", "content"} else {**said, "content": text or "ok"}


@st.composite
def conversations(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Conversations that share beginnings; each ends with a reply."""
    made: list[list[dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 5))):
        begin = list(draw(st.sampled_from(made))) if made and draw(st.booleans()) else []
        begin = begin[: draw(st.integers(0, len(begin)))]
        if not begin and draw(st.booleans()):
            begin = [{"role": "system", "content": draw(st.sampled_from(["s", "t"]))}]
        for _ in range(draw(st.integers(1, 4))):
            begin.append(draw(message(begin[-1]["role"] if begin else "system")))
        if begin[-1]["role"] != "assistant":
            begin.append({"role": "assistant", "content": draw(st.sampled_from(["x", "y"]))})
        made.append(begin)
    return made


def as_chat(one: dict[str, Any]) -> dict[str, Any]:
    """A stored message in the form of chat files."""
    made = {name: one[name] for name in ("role", "content", "tool_call_id") if name in one}
    if "reasoning" in one:
        made["reasoning_content"] = one["reasoning"]
    if "tool_calls" in one:
        made["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in one["tool_calls"]
        ]
    return made


def lines_of(execution: Execution) -> list[dict[str, Any]]:
    """The conversation that ends with each leaf."""
    tree = execution.tree
    leaves = [i for i in range(len(tree)) if tree.end_N[i] == i + 1]
    paths = [execution.path(tree.node_id[i]).messages() for i in leaves]
    return [{"execution_id": "one", "messages": [as_chat(one) for one in path]} for path in paths]


def keys(path: list[dict[str, Any]]) -> tuple[str, ...]:
    """What tells messages apart: arguments are values, outer blanks of replies do not count."""
    said = []
    for one in path:
        text = one["content"].strip() if one["role"] == "assistant" else one["content"]
        made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in one.get("tool_calls", ())]
        plain = [[name, {k: int(v) if v == 1.0 else v for k, v in given.items()}] for name, given in made]
        rest = [one.get("tool_call_id"), one.get("reasoning_content")]
        said.append(json.dumps([one["role"], text, plain, rest], sort_keys=True))
    return tuple(said)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_linearised_conversations_give_back_the_tree(chats: list[list[dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "a.jsonl", [{"execution_id": "one", "messages": chat} for chat in chats])
        import_sessions(path, Path(folder) / "run")
        execution = only_execution(Path(folder) / "run")
        tree = execution.tree
        begun = {keys(chat)[: i + 1] for chat in chats for i in range(len(chat)) if chat[i]["role"] != "system"}
        systems = {keys(chat)[:1] for chat in chats if chat[0]["role"] == "system"}
        assert len(tree) == len(begun) + len(systems), "each message after the same messages is there once"
        replies = {key for key in begun if json.loads(key[-1])[0] == "assistant"}
        assert len(tree.calls) == len(replies)
        assert sum(kind == NodeKind.OUTPUT for kind in tree.kind_N) == len(replies)
        lines = lines_of(execution)
        told = {keys(line["messages"]) for line in lines}
        whole = {keys(chat) for chat in chats}
        assert told == {key for key in whole if not any(other != key and other[: len(key)] == key for other in whole)}
        again = write_lines(Path(folder) / "b.jsonl", lines)
        import_sessions(again, Path(folder) / "other")
        other = only_execution(Path(folder) / "other").tree
        assert sorted(other.node_id) == sorted(tree.node_id), "the same tree, down to its ids"
