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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
