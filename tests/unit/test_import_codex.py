"""Codex sessions become executions: a thread per agent, compactions with their summary, rolled back turns."""

from pathlib import Path
from typing import Any

from gyre_data import open as open_run
from gyre_data.hosted import hosted
from gyre_data.links import compactions, sub_agents
from gyre_data.schema import AgentRole, BranchReason
from tests.support.importing import DATA, conversation, imported, only_execution, said, write_lines

SAMPLES = sorted((DATA / "codex").rglob("*.jsonl"))


def test_the_sample_of_the_real_client(tmp_path: Path) -> None:
    """Main: 4 calls, a summary, 2 more. Its sub-agent: 2, a summary, 1. Usage: the client's own totals."""
    done = imported(DATA / "codex", tmp_path / "run")
    assert [(s.num_calls, s.num_files) for s in done.sessions] == [(11, 2)]
    execution = only_execution(tmp_path / "run")
    tree = execution.tree
    roles = [str(call.agent_role) for call in tree.calls]
    counts = {role: roles.count(role) for role in set(roles)}
    assert counts == {"main": 6, "main_summary": 1, "sub_agent": 3, "sub_agent_summary": 1}
    (agent,) = sub_agents(tree)
    assert agent.spawned_by_call == tree.calls[0].call_id
    assert len(agent.calls) == 4
    for one in compactions(tree):
        summary = tree.call(one.summary_call or "")
        assert tree.call(one.call_id).continues_from == summary.call_id
        assert tree.call(one.call_id).agent_id == summary.agent_id
    assert len(compactions(tree)) == 2
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.input, bill.usage.output) == (11, 72_679 + 38_287, 195 + 67)
    assert imported(SAMPLES[0], tmp_path / "run").skipped[0].why == "the run holds it already"


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-02T03:04:06Z", "type": "response_item", "payload": {"type": kind, **more}}


def words(role: str, text: str) -> dict[str, Any]:
    return item(
        "message", role=role, content=[{"type": "output_text" if role == "assistant" else "input_text", "text": text}]
    )


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-02T03:04:06Z", "type": "event_msg", "payload": {"type": kind, **more}}


def used(output: int) -> dict[str, Any]:
    return event(
        "token_count", info={"last_token_usage": {"input_tokens": 9, "cached_input_tokens": 4, "output_tokens": output}}
    )


META = {"type": "session_meta", "payload": {"id": "0b5e6ac1-0000", "cli_version": "0.50.0", "instructions": "Be good."}}


def test_a_client_of_old(tmp_path: Path) -> None:
    """Usage comes in events that may be repeated; a compaction holds its text alone; turns are rolled back."""
    lines = [
        META,
        event("task_started"),
        words("user", "go"),
        item("reasoning", summary=[{"type": "summary_text", "text": "Hm."}], encrypted_content="x"),
        item("function_call", name="shell", arguments='{"cmd": "ls"}', call_id="c1"),
        item("function_call", name="shell", arguments='{"cmd": "pwd"}', call_id="c2"),
        used(5),
        used(5),
        item("function_call_output", call_id="c1", output="x"),
        item("function_call_output", call_id="c2", output="/"),
        words("assistant", "one"),
        used(3),
        event("task_started"),
        words("user", "wrong way"),
        words("assistant", "two"),
        used(2),
        event("thread_rolled_back", num_turns=1),
        event("task_started"),
        words("user", "right way"),
        words("assistant", "three"),
        {"type": "compacted", "payload": {"message": "Summary: went"}},
        words("user", "on"),
        words("assistant", "four"),
        words("user", "nobody answers"),
        {"type": "beam", "payload": {}},
    ]
    done = imported(write_lines(tmp_path / "rollout-x.jsonl", lines), tmp_path / "run").sessions[0]
    execution = only_execution(tmp_path / "run")
    calls = said(execution)
    assert list(calls) == ["shell shell", "one", "two", "three", "four"]
    assert conversation(execution, calls["three"].output_node) == [
        ("system", "Be good."),
        ("user", "go"),
        ("assistant", "shell shell"),
        ("tool", "x"),
        ("tool", "/"),
        ("assistant", "one"),
        ("user", "right way"),
        ("assistant", "three"),
    ]
    assert calls["three"].branch_reason is BranchReason.REWIND
    assert (calls["four"].branch_reason, calls["four"].continues_from) == (
        BranchReason.COMPACTION,
        calls["three"].call_id,
    )
    assert [text for _, text in conversation(execution, calls["four"].prompt_node)] == [
        "Be good.",
        "Summary: went",
        "on",
    ]
    assert {call.agent_role for call in execution.tree.calls} == {AgentRole.MAIN}
    assert (done.num_unanswered, done.not_understood) == (1, {"beam": 1})
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.calls, bill.usage.output, bill.usage.input, bill.usage.cache_read) == (3, 10, 15, 12)
