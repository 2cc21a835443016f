"""Chat files become executions: a conversation a line, or a tree where lines say that they belong together."""

from pathlib import Path

from gyre_data import open as open_run
from gyre_data.execution import executions
from gyre_data.schema import AgentRole, BranchReason
from tests.support.importing import conversation, imported, only_execution, said, write_lines

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be good."}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def reply(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def test_each_line_is_an_execution_of_its_own(tmp_path: Path) -> None:
    lines = [
        {"messages": [SYSTEM, user("go"), reply("one"), user("more"), reply("two")], "tools": [TOOL], "source": "x"},
        {"messages": [user("go"), reply("one")], "task_id": "t1"},
        "not json",
        {"messages": [user("go"), reply("one")], "task_id": "t1"},
        {"prompt": "go"},
        {"messages": [user("nobody answers")]},
    ]
    done = imported(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "run")
    assert [session.num_calls for session in done.sessions] == [2, 1, 1, 0]
    assert [session.damaged for session in done.sessions][1:] == [(), (), ()], "said once"
    assert done.sessions[0].damaged[0].startswith("a.jsonl:3: ")
    assert done.sessions[0].not_understood == {"without messages": 1}
    assert done.sessions[3].num_unanswered == 1
    known = list(executions(open_run(tmp_path / "run")).values())
    assert sorted(info.task_id or "" for info in known) == ["", "", "t1", "t1"]
    assert all(one.execution_id for one in imported(tmp_path / "a.jsonl", tmp_path / "run").skipped)


def test_lines_of_one_execution_are_one_tree(tmp_path: Path) -> None:
    """What they have in common is there once; a message of weight 0 is context; agents may be named."""
    begin = [SYSTEM, user("go"), reply("one")]
    lines = [
        {"execution_id": "e", "tools": [TOOL], "messages": [*begin, user("left"), reply("two")]},
        {"execution_id": "other", "messages": [user("x"), reply("y")]},
        {"execution_id": "e", "tools": [TOOL], "messages": [*begin, user("right"), reply("three")]},
        {"execution_id": "e", "tools": [TOOL], "messages": [*begin, user("left"), reply("two")]},
        {"execution_id": "e", "messages": [user("so far: one"), reply("one", weight=0), user("on"), reply("four")]},
        {"execution_id": "e", "messages": [user("look"), reply("seen")], "agent_role": "sub_agent", "agent_id": "a1"},
    ]
    done = imported(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "run")
    assert [session.num_calls for session in done.sessions] == [5, 1]
    imported(
        write_lines(tmp_path / "b.jsonl", [line for line in lines if line["execution_id"] == "e"]), tmp_path / "one"
    )
    execution = only_execution(tmp_path / "one")
    calls = said(execution)
    assert list(calls) == ["one", "two", "three", "four", "seen"]
    assert calls["three"].branch_reason is BranchReason.REWIND
    assert (calls["seen"].agent_role, calls["seen"].agent_id) == (AgentRole.SUB_AGENT, "a1")
    tree = execution.tree
    copies = [tree.copy_of_N[i] for i in range(len(tree)) if tree.copy_of_N[i]]
    assert copies == [calls["one"].output_node]
    assert calls["one"].tools_blob == calls["two"].tools_blob is not None
    assert conversation(execution, calls["four"].prompt_node) == [
        ("user", "so far: one"),
        ("assistant", "one"),
        ("user", "on"),
    ]


def test_times_are_not_invented(tmp_path: Path) -> None:
    """Calls begin in the order of the file at the file's time; when they ended is not known."""
    lines = [{"messages": [user("go"), reply("one"), user("more"), reply("two")]}]
    imported(write_lines(tmp_path / "a.jsonl", lines), tmp_path / "run")
    first, second = only_execution(tmp_path / "run").tree.calls
    assert first.started_at < second.started_at
    assert (first.ended_at, second.ended_at) == (None, None)
    assert abs(first.started_at.timestamp() - (tmp_path / "a.jsonl").stat().st_mtime) < 1e-5


def test_a_conversation_that_begins_with_the_model(tmp_path: Path) -> None:
    imported(
        write_lines(tmp_path / "a.jsonl", [{"messages": [reply("hello"), user("go"), reply("one")]}]), tmp_path / "run"
    )
    first, second = only_execution(tmp_path / "run").tree.calls
    assert (first.prompt_node, first.prompt_tokens) == (None, 0)
    assert second.continues_from == first.call_id
