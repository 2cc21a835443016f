"""SWE-agent and mini-swe-agent trajectories become executions: demonstrations are context, replies are calls."""

import json
from pathlib import Path
from typing import Any

from gyre_data import open as open_run
from gyre_data.hosted import hosted
from gyre_data.schema import BranchReason
from tests.support.importing import DATA, conversation, imported, only_execution, said


def test_the_sample_of_the_real_mini_client(tmp_path: Path) -> None:
    """Three calls were made; the first reply was refused by the client and is not in its file."""
    done = imported(DATA / "mini-swe-agent", tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_nodes, done.beside) == (2, 6, {"exit": 1})
    assert done.notes == ("the source counts 3 calls; 2 replies are in it",)
    execution = only_execution(tmp_path / "run")
    assert execution.info.harness == "mini-swe-agent"
    assert execution.path(execution.tree.calls[0].output_node or "").messages()[-1]["reasoning"] == "A plan."
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert bill.calls == 2


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "agent": "main", **more}


HISTORY = [
    message("system", "Be good.", message_type="system_prompt"),
    message("user", "watch", is_demo=True),
    message("assistant", "shown", is_demo=True),
    message("user", [{"type": "text", "text": "go"}], message_type="observation"),
    message(
        "assistant",
        "I look.",
        thought="I look.",
        action="ls",
        message_type="action",
        tool_calls=[{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
    ),
    message("tool", "x", message_type="observation", tool_call_ids=["c1"]),
    message("assistant", "done", action="submit", message_type="action"),
    message("user", "bye", message_type="observation"),
]


def write(path: Path, **more: Any) -> Path:
    info = {"exit_status": "submitted", "model_stats": {"api_calls": 2}, "swe_agent_version": "1.1.0"}
    path.write_text(json.dumps({"history": HISTORY, "info": info, "environment": "e", **more}))
    return path


def test_replies_of_the_history_are_calls(tmp_path: Path) -> None:
    done = imported(write(tmp_path / "org__repo-1.traj"), tmp_path / "run").sessions[0]
    assert (done.num_calls, done.num_nodes, done.num_unanswered, done.notes) == (2, 7, 1, ())
    execution = only_execution(tmp_path / "run")
    assert (execution.info.task_id, execution.info.harness_version) == ("org__repo-1", "1.1.0")
    calls = said(execution)
    assert conversation(execution, calls["done"].prompt_node) == [
        ("system", "Be good."),
        ("user", "watch"),
        ("assistant", "shown"),
        ("user", "go"),
        ("assistant", "I look."),
        ("tool", "x"),
    ]
    assert execution.path(calls["done"].prompt_node or "").messages()[-1]["tool_call_id"] == "c1"


def test_what_was_sent_stands_over_the_history(tmp_path: Path) -> None:
    """The second step was sent with an observation left out: its prompt is another one."""
    second = [*HISTORY[:5], message("tool", "(1 line left out)", tool_call_ids=["c1"])]
    steps = [{"response": "I look.", "query": HISTORY[:4]}, {"response": "done", "query": second}]
    imported(write(tmp_path / "a.traj", trajectory=steps), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert conversation(execution, calls["done"].prompt_node)[-2:] == [
        ("assistant", "I look."),
        ("tool", "(1 line left out)"),
    ]
    assert calls["done"].branch_reason is None
    assert [call.branch_reason for call in execution.tree.calls] == [None, None]
    assert BranchReason.CONTEXT_REWRITE not in {call.branch_reason for call in execution.tree.calls}
