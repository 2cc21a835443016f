"""`gyre tree` as text: folding, every call, narrow terminals, a path as a conversation, breaks with both sides."""

from __future__ import annotations

import json
from pathlib import Path as Folder

import pytest
from rich.text import Text
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.breaks import breaks
from gyre_data.execution import Execution
from gyre_data.main import app
from gyre_data.show.layout import flow, hints, wrapped
from gyre_data.show.outline import outline
from gyre_data.show.path_text import path_lines
from gyre_data.show.tree_text import MOST_LINES, tree_lines
from gyre_data.show.trouble_text import break_lines, retry_lines
from gyre_data.store import SAMPLE
from tests.support.busy_case import busy_case
from tests.support.forest import Forest
from tests.support.published_case import published_case


def drawn(run: Forest, prefix: str, width: int = 80, depth: int | None = None, *, every: bool = False) -> list[str]:
    shown = outline(Execution.load(run, prefix))
    lines = tree_lines(shown, short=prefix, where="runs/a", width=width, depth=depth, every=every)
    return [line.plain for line in lines]


def test_what_an_unscored_tree_would_train_is_called_that() -> None:
    run = Forest()
    run.execution("e_0123456789ab", score=0.0).call(output=7)
    bare = run.execution("e_1123456789ab")
    bare.call(output=7)
    bare.score(None, status="failed")
    note = "not scored: RL leaves it out until it is; trained is what it would give"
    assert [note in drawn(run, prefix) for prefix in ("0123", "1123")] == [False, True]


def test_depth_folds_and_adds_up_what_it_hides() -> None:
    whole, agents, top = (drawn(busy_case(), "0bbb", depth=depth) for depth in (9, 1, 0))
    assert whole == drawn(busy_case(), "0bbb")
    assert not [line for line in whole if "[folded]" in line]
    (run,) = [line for line in agents if "c2-c11" in line]
    assert run.split("[folded]")[1].split() == ["8", "calls", "1.3k", "tok", "235", "trained", "10", "s"]
    assert "folded at depth 1; more: --depth 2, every call: --all" in agents
    assert [line for line in top if line.startswith("main [folded]")]
    assert len(top) < len(agents) < len(whole)


def test_a_tree_too_long_for_the_screen_is_folded_by_itself() -> None:
    run = Forest()
    e = run.execution("e_0123456789ab")
    at = e.call()
    for n in range(MOST_LINES):
        e.call(role="sub_agent", agent_id=f"a{n}", spawned_by_node=at.output, branch_reason="sub_agent")
    folded = drawn(run, "0123")
    assert len(folded) < MOST_LINES
    assert [line for line in folded if "c1 [folded]" in line]
    assert len(drawn(run, "0123", depth=9)) > MOST_LINES


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_every_width_holds_and_keeps_what_counts(width: int) -> None:
    for run, prefix in ((busy_case(), "0bbb"), (published_case(), "e7f3")):
        for every in (False, True):
            lines = drawn(run, prefix, width=width, every=every)
            told = " ".join(" ".join(lines).replace("|", " ").split())
            for part in ("0.50 partial (pytest@3)", "compaction @c", "not trained:", f"gyre explain runs/a {prefix}"):
                assert part in told, (width, part)
            limit = width if not every else max(width, 56)
            lines = [line for line in lines if ": gyre " not in line]  # a command is never broken
            assert max(map(len, lines)) <= limit, (width, max(lines, key=len))


def test_every_call_has_a_line_with_its_id() -> None:
    lines = drawn(busy_case(), "0bbb", every=True)
    tree = Execution.load(busy_case(), "0bbb").tree
    kept = {
        e["call"]
        for lane in outline(Execution.load(busy_case(), "0bbb")).walk()
        for s in lane.segments
        for e in s.events
    }
    for number, call in enumerate(tree.calls, 1):
        assert number in kept or [line for line in lines if f"c{number} {call.call_id}" in line], number


def test_flow_and_wrap_lose_nothing() -> None:
    parts = [Text("one two three"), Text("four " * 12), Text("five")]
    lines = list(flow(parts, 30))
    assert " ".join(" ".join(line.plain for line in lines).split()) == "one two three " + "four " * 12 + "five"
    assert max(len(line) for line in lines) <= 30
    assert [line.plain for line in wrapped(Text("short"), 30)] == ["short"]
    assert all(line.plain.startswith("| ") for line in wrapped(Text("word " * 20), 30, guide=Text("| "))[1:])


def test_a_command_to_type_next_is_never_broken() -> None:
    short, long = "look: gyre ls a", "read: gyre tree " + "folder/" * 12
    assert [line.plain for line in hints([short, short], 80)] == [f"{short}  {short}"]
    assert [line.plain for line in hints([short, long], 80)] == [short, long]
    assert list(hints([], 80)) == []


def conversation(number: int, turns: int, *, full: bool = False) -> list[str]:
    run = Forest()
    e = run.execution("e_0123456789ab")
    at = None
    for turn in range(turns):
        at = e.call(after=at, new=[("tool" if turn else "user", 5)])
    for node in list(e.nodes.values()):
        if node.message_role:
            long = "\n".join(f"line {n}" for n in range(40)) if node.message_role == "tool" else "short"
            e.say(node.node_id, {"role": node.message_role, "content": long})
    run.blob = {row.blob_id: row.data for row in run.rows["blobs"]}.__getitem__  # type: ignore[attr-defined]
    own = Execution.load(run, "0123")
    call = own.tree.calls[number - 1]
    return [line.plain for line in path_lines(own.path(call.call_id), call, short="0123", where="runs/a", full=full)]


def test_a_long_conversation_is_short_until_it_is_asked_for() -> None:
    short, whole = conversation(40, 40), conversation(40, 40, full=True)
    assert [line for line in short if "messages more: --full" in line] == ["      ... 51 messages more: --full"]
    assert [line.strip() for line in short if "lines more" in line] == ["... 29 lines more: --full"]
    assert len(short) < 50
    assert sum(line.strip() == "line 39" for line in whole) == 39
    assert "all of it: gyre tree runs/a 0123:c40 --full" in short
    assert "c40 adds" in "".join(whole)


def test_breaks_show_both_sides_and_decode_when_they_can() -> None:
    run = Forest()
    e = run.execution("e_0123456789ab")
    e.call(new=[("system", 5), ("user", 4)])
    system = next(node for node in e.nodes.values() if node.message_role == "system")
    fork = {"extension": "fork", "branch_reason": "context_rewrite"}
    e.call(after=system.node_id, new=[("user", 6)], **fork)
    first, second = (node for node in e.nodes.values() if node.message_role == "user")
    e.say(first.node_id, {"role": "user", "content": "mend the parser"})
    e.say(second.node_id, {"role": "user", "content": "mend the printer"})
    run.blob = {row.blob_id: row.data for row in run.rows["blobs"]}.__getitem__  # type: ignore[attr-defined]
    found = breaks(Execution.load(run, "0123"))
    told = [line.plain for line in break_lines(found, short="0123", where="runs/a")]
    assert told[0].startswith("0123:c2 left c1")
    assert "task: the task was edited" in " ".join(told)
    assert "  - mend the parser" in told
    assert "  + mend the printer" in told
    assert [line for line in told if line.startswith("  + ids ")]
    decoded = [line.plain for line in break_lines(found, short="0123", where="a", decode=lambda ids: f"<{len(ids)}>")]
    assert "  + ids <0> | <8>" in decoded
    assert next(iter(break_lines([], short="x", where="a"))).plain.startswith("no prefix broke")
    assert next(iter(retry_lines([], [], short="x", where="a"))).plain == "no call was lost or sent again"


def test_the_commands_print_json_of_the_same(tmp_path: Folder) -> None:
    def told(*words: str) -> object:
        done = CliRunner().invoke(app, ["tree", "sample", *words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.output)

    run = gd.open(SAMPLE)
    path = told("982c:c5")
    assert isinstance(path, dict)
    own = run["982c"].path(path["calls"][-1]["call_id"])
    assert [m["message"] for m in path["messages"]] == own.messages()
    assert path["num_tokens"] == len(own)
    assert [m["trained_by"] for m in path["messages"]] == [None, None, None, None, 1]
    broken = told("982c", "--breaks")
    assert isinstance(broken, list)
    assert [(b["cause"], b["reason"], b["number"]) for b in broken] == [("compaction", "compaction", 5)]
    lost = told("982c", "--retries")
    assert isinstance(lost, dict)
    assert [(x["why"], x["replaced_by"]) for x in lost["lost"]] == [("repeated", 3)]
    assert lost["loops"] == []
