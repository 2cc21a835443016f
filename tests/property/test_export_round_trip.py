"""What is exported comes back as the same tree, whatever its shape."""

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

import gyre_data as gd
from gyre_data.execution import Execution
from tests.property.test_import_chat import conversations, keys, lines_of
from tests.support.importing import only_execution, write_lines


def same_tree(one: Execution, other: Execution) -> None:
    """The same conversations, and each of their messages as often."""
    assert sorted(one.tree.num_tokens_N.tolist()) == sorted(other.tree.num_tokens_N.tolist())
    assert len(one.tree.calls) == len(other.tree.calls)
    assert {keys(line["messages"]) for line in lines_of(one)} == {keys(line["messages"]) for line in lines_of(other)}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_chat_lines_give_back_the_tree(chats: list[list[dict[str, Any]]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_lines(folder / "a.jsonl", [{"execution_id": "one", "messages": chat} for chat in chats])
        gd.import_sessions([source], folder / "run")
        execution = only_execution(folder / "run")
        done = gd.export(gd.open(folder / "run"), folder / "b.jsonl", j_max=None)
        assert done.num_rows["replies"] == len(execution.tree.calls), "each is trained in one line"
        gd.import_sessions([folder / "b.jsonl"], folder / "back")
        same_tree(only_execution(folder / "back"), execution)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(conversations())
def test_atif_gives_back_the_newest_conversation(chats: list[list[dict[str, Any]]]) -> None:
    """Of a tree it holds one line; what it leaves out is counted."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_lines(folder / "a.jsonl", [{"execution_id": "one", "messages": chat} for chat in chats])
        gd.import_sessions([source], folder / "run")
        execution = only_execution(folder / "run")
        done = gd.export(gd.open(folder / "run"), folder / "atif", format="atif")
        left = sum(done.left_out.get("calls", {}).values())
        assert done.num_rows["calls"] + left == len(execution.tree.calls)
        gd.import_sessions([folder / "atif"], folder / "back")
        back = only_execution(folder / "back")
        assert len(back.tree.calls) == done.num_rows["calls"]
        if "links" not in done.left_out:
            assert [said(one) for one in back.main.messages()] == [said(one) for one in execution.main.messages()]


def said(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}
