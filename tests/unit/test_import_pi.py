"""pi sessions become executions: linear ones of old, trees, compactions with their kept entries."""

from pathlib import Path
from typing import Any

from gyre_data import open as open_run
from gyre_data.hosted import hosted
from gyre_data.links import compactions
from gyre_data.schema import BranchReason
from tests.support.importing import DATA, conversation, imported, only_execution, said, write_lines

SAMPLE = next((DATA / "pi").glob("*.jsonl"))
HEADER = {"type": "session", "version": 3, "id": "0b5e6ac1", "timestamp": "2026-01-02T03:04:05Z", "cwd": "/work"}


def entry(id_: str | None, parent: str | None, **more: Any) -> dict[str, Any]:
    ids = {} if id_ is None else {"id": id_, "parentId": parent}
    return {"type": "message", "timestamp": "2026-01-02T03:04:06Z", **ids, **more}


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": words}]}


def reply(words: str, stop: str = "stop", *, api: str = "anthropic-messages", **more: Any) -> dict[str, Any]:
    usage = {"input": 3, "output": 5, "cacheRead": 7, "cacheWrite": 11, "totalTokens": 26}
    content = [{"type": "text", "text": words}]
    return {
        "role": "assistant",
        "content": content,
        "api": api,
        "model": "m",
        "usage": usage,
        "stopReason": stop,
        **more,
    }


def test_the_sample_of_the_real_client(tmp_path: Path) -> None:
    """Five replies; the compaction after the fourth keeps the third, its result and the fourth."""
    done = imported(SAMPLE, tmp_path / "run")
    assert [(s.num_calls, s.num_nodes) for s in done.sessions] == [(5, 14)]
    execution = only_execution(tmp_path / "run")
    (one,) = compactions(execution.tree)
    assert one.continues_from == execution.tree.calls[3].call_id
    assert one.call_id == execution.tree.calls[4].call_id
    prompt = conversation(execution, execution.tree.calls[4].prompt_node)
    assert [role for role, _ in prompt] == ["user", "assistant", "tool", "assistant", "user"]
    copies = [i for i in range(len(execution.tree)) if execution.tree.copy_of_N[i]]
    assert [execution.tree.copy_of_N[i] for i in copies] == [execution.tree.calls[i].output_node for i in (2, 3)]


def test_branches_failures_and_what_is_no_reply(tmp_path: Path) -> None:
    lines = [
        HEADER,
        entry("a", None, message=user("go")),
        entry("b", "a", message=reply("", "error", errorMessage="overloaded")),
        entry("c", "b", message=reply("one")),
        entry("d", "c", message=user("left")),
        entry("e", "d", message=reply("two")),
        entry("f", "c", type="branch_summary", fromId="e", summary="went left"),
        entry("g", "f", message=user("right")),
        entry("h", "g", message=reply("three", api="openai-completions")),
        entry("i", "h", message={"role": "bashExecution", "command": "ls", "output": "x", "excludeFromContext": True}),
        entry("j", "i", type="label", targetId="a", label="here"),
        entry("k", "j", message=user("nobody answers")),
        entry("l", "k", type="wormhole"),
    ]
    done = imported(write_lines(tmp_path / "s.jsonl", lines), tmp_path / "run").sessions[0]
    execution = only_execution(tmp_path / "run")
    told = [(str(c.status), str(c.extension), c.branch_reason and str(c.branch_reason)) for c in execution.tree.calls]
    assert told == [
        ("failed", "root", None),
        ("ok", "retry", "retry"),
        ("ok", "bridge", None),
        ("ok", "fork", "rewind"),
    ]
    assert execution.tree.calls[0].error == "overloaded"
    assert conversation(execution, said(execution)["three"].prompt_node) == [
        ("user", "go"),
        ("assistant", "one"),
        ("user", "went left"),
        ("user", "right"),
    ]
    assert (done.num_unanswered, done.not_understood) == (1, {"wormhole": 1})
    assert done.beside == {"label": 1, "message: kept out of the context": 1}
    bill = hosted(open_run(tmp_path / "run"))
    assert bill is not None
    assert (bill.usage.input, bill.usage.cache_read, bill.usage.cache_write, bill.usage.output) == (12, 28, 33, 20)


def test_a_session_of_old_has_no_ids(tmp_path: Path) -> None:
    """The index of the first kept entry counts the header."""
    lines = [
        {name: value for name, value in HEADER.items() if name != "version"},
        entry(None, None, message=user("go")),
        entry(None, None, message=reply("one")),
        entry(None, None, message=user("more")),
        entry(None, None, message=reply("two")),
        entry(None, None, type="compaction", summary="did things", firstKeptEntryIndex=3, tokensBefore=9),
        entry(None, None, message=user("on")),
        entry(None, None, message=reply("", "aborted")),
        entry(None, None, message=user("on!")),
        entry(None, None, message=reply("three")),
    ]
    imported(write_lines(tmp_path / "s.jsonl", lines), tmp_path / "run")
    execution = only_execution(tmp_path / "run")
    reasons = [call.branch_reason for call in execution.tree.calls]
    assert reasons == [None, None, BranchReason.COMPACTION, BranchReason.CONTEXT_REWRITE]
    assert [text for _, text in conversation(execution, said(execution)["three"].prompt_node)] == [
        "did things",
        "more",
        "two",
        "on",
        "on!",
    ]
