"""Two paths side by side, and text found in messages, on trees built by hand and on the sample run."""

from __future__ import annotations

import json
from pathlib import Path as Folder
from typing import Any

import pytest
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.diff import Differs, argument_changes, diff_paths
from gyre_data.errors import ConfigError
from gyre_data.execution import Execution
from gyre_data.main import app
from gyre_data.search import search
from gyre_data.store import SAMPLE
from tests.support.forest import Forest


def out(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert all(len(line) <= 80 for line in done.output.splitlines()) or "--json" in words
    return done.output


def calling(*calls: tuple[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{"name": n, "arguments": a} for n, a in calls]}


def test_arguments_that_differ_are_named() -> None:
    one, two = calling(("Edit", {"path": "a", "old": "x"})), calling(("Edit", {"path": "b", "new": "y", "old": "x"}))
    assert argument_changes(one, two) == [("Edit.path", "a", "b"), ("Edit.new", None, "y")]
    assert argument_changes(calling(("Edit", "{")), calling(("Edit", "{}"))) == [("Edit", "{", "{}")]
    assert argument_changes(one, calling(("Read", {"path": "a"}))) is None
    assert argument_changes({"role": "assistant", "content": "x"}, {"role": "assistant", "content": "y"}) is None


def test_branches_share_nodes_and_differ_behind_the_fork() -> None:
    run = Forest()
    e = run.execution("e_0123456789ab", score=0.5)
    a = e.call(new=[("system", 3), ("user", 4)], output=5)
    e.say(a.output, {"role": "assistant", "content": "one"})
    b = e.call(after=a, new=[("tool", 6)], output=7)
    c = e.call(after=a, new=[("user", 2)], output=3)
    own = Execution.load(run, "0123")
    found = diff_paths(own.path(b.id), own.path(c.id))
    assert (found.shared.nodes, found.shared.tokens) == (4, 3 + 4 + 2 + 5)
    assert (found.a.num_calls, found.a.num_tokens, found.b.num_tokens) == (2, 14 + 6 + 2 + 7, 14 + 2 + 2 + 3)
    assert [(s.kind, len(s.a), len(s.b)) for s in found.steps] == [
        (Differs.SAME, 3, 3),
        (Differs.ONLY_A, 1, 0),
        (Differs.ONLY_A, 1, 0),
        (Differs.ONLY_B, 0, 1),
        (Differs.ONLY_B, 0, 1),
    ]
    assert found.a.scores == {"check": 0.5}


def test_rollouts_of_one_task_say_the_same_without_sharing_a_node() -> None:
    run = gd.open(SAMPLE)
    found = diff_paths(run["f2c9"].main, run["7b1e"].main)
    assert (found.shared.nodes, found.shared.tokens) == (0, 0)
    kinds = [(step.kind, len(step.a)) for step in found.steps]
    assert kinds == [(Differs.SAME, 4), (Differs.CHANGED, 1), (Differs.SAME, 2)]


def test_the_diff_command_shows_outcome_and_arguments() -> None:
    told = out("diff", "sample", "f2c9", "7b1e")
    assert "score    0.80 (judge)" in told
    assert "- write.text: 4 7 7 9 5" in told
    assert "+ write.text: 4 7 7 9 0" in told
    assert "both say the same" in out("diff", "sample", "982c:c2", "982c:c3")
    assert "lines more: --full" in out("diff", "sample", "982c:c4", "982c:c6")
    assert "hour 23" in out("diff", "sample", "982c:c4", "982c:c6", "--full")
    assert json.loads(out("diff", "sample", "982c:c2", "982c:c3", "--json"))["shared"]["nodes"] == 6
    failed = CliRunner().invoke(app, ["diff", "sample", "f2c9"])
    assert isinstance(failed.exception, ConfigError)
    assert "two executions or calls" in str(failed.exception)


def test_search_finds_every_place_by_role() -> None:
    run = gd.open(SAMPLE)
    hits = search(run, "BAY 3: 2")
    assert {(hit.role, hit.part, hit.match) for hit in hits} == {("tool", "content", "bay 3: 2")}
    assert search(run, "bay 3", role="user") == []
    assert {hit.execution_id for hit in hits} == {
        info["execution_id"] for info in run.table("executions").to_pylist() if info["task_id"] == "stock"
    }
    for hit in hits:
        tree = run[hit.execution_id].tree
        assert tree.calls[hit.number - 1].call_id == hit.call_id
        assert tree.call_of_N[tree.index[hit.node_id]] == hit.call_id
    (call, *_) = search(run, 'write {"path": "answer.txt"', role="assistant")
    assert (call.part, call.before, call.after[:9]) == ("call", "", ', "text":')
    assert len(search(run, "the", limit=3)) == 3
    with pytest.raises(ConfigError, match="an empty one"):
        search(run, "")


def test_a_text_that_json_writes_otherwise_is_found(tmp_path: Folder) -> None:
    run = Forest()
    e = run.execution("e_0123456789ab")
    e.say(e.call().output, {"role": "assistant", "content": 'a "quote"\nand Größe'})
    opened = run.write(tmp_path / "a")
    for text in ('a "quote"', 'quote"\nand', "größe", "GRÖSSE"[:3]):
        assert [hit.part for hit in search(opened, text)] == ["content"], text


def test_the_search_command() -> None:
    told = out("search", "sample", "bay 3", "--role", "tool")
    assert "4 hits in 4 executions" in told
    assert "more may follow" in out("search", "sample", "the", "--limit", "2")
    assert "no message holds 'xyzzy'" in out("search", "sample", "xyzzy")
    first = json.loads(out("search", "sample", "bay 3", "--json"))[0]
    assert first["before"] + first["match"] in "bay 1: 4\nbay 2: 7\nbay 3: 2"
