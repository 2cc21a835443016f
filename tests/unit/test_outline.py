"""How calls are sorted into lanes and segments, for the shapes that harnesses make."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from rich.text import Text

from gyre_data.execution import Execution, executions
from gyre_data.links import compactions, sub_agents
from gyre_data.show import numbers
from gyre_data.show.outline import Outline, outline
from gyre_data.show.tree_text import tree_lines
from tests.support.forest import ExecutionBuilder, Forest, forests


def made() -> tuple[Forest, ExecutionBuilder]:
    run = Forest()
    return run, run.execution("e_0123456789ab")


def shape(run: Forest) -> list[tuple[str, list[tuple[str | None, list[int], list[tuple[str, int]]]]]]:
    """Per lane its segments: kind of opening, calls, and what was retried or lost."""
    shown = outline(Execution.load(run, "0123"))
    return [
        (
            lane.kind,
            [
                (s.opening and s.opening["kind"], s.calls, [(e["kind"], e["call"]) for e in s.events])
                for s in lane.segments
            ],
        )
        for lane in shown.walk()
    ]


def test_a_first_call_that_fails_is_tried_again() -> None:
    run, e = made()
    lost = e.call(output=None, status="failed", delivery=None)
    again = e.retry(lost, output=None, status="failed", delivery=None)
    e.call(after=e.retry(again))
    assert shape(run) == [("main", [(None, [3, 4], [("retry", 1), ("retry", 2)])])]


def test_a_retry_in_the_middle_takes_the_place_of_its_original() -> None:
    run, e = made()
    a = e.call()
    lost = e.call(after=a, output=None, status="failed", delivery=None)
    e.retry(lost, output=None, status="failed", delivery=None)
    b = e.retry(lost)
    e.call(after=b)
    assert shape(run) == [("main", [(None, [1, 4, 5], [("retry", 2), ("retry", 3)])])]


def test_a_retry_after_the_original_went_on_is_a_fork() -> None:
    run, e = made()
    a = e.call()
    e.call(after=a)
    e.call(after=e.retry(a))
    assert shape(run) == [("main", [(None, [1, 2], []), ("fork", [3, 4], [])])]


def test_calls_that_were_lost_are_named() -> None:
    run, e = made()
    a = e.call()
    e.call(after=a, status="aborted", delivery="abandoned")
    e.call(after=a, delivery="undelivered", branch_reason="rewind", extension="fork")
    assert shape(run) == [("main", [(None, [1, 2], [("lost", 2)]), ("fork", [3], [("lost", 3)])])]


def test_a_summary_in_a_prompt_of_its_own_is_no_boundary() -> None:
    run, e = made()
    a = e.call(new=[("system", 9), ("user", 5)])
    summary = e.call(
        new=[("user", 20)], role="main_summary", branch_reason="compaction", extension="fork", continues_from=a.id
    )
    e.call(new=[("user", 7)], branch_reason="compaction", extension="fork", continues_from=summary.id)
    ((kind, segments),) = shape(run)
    assert (kind, [s[0] for s in segments]) == ("main", [None, "summary", "compaction"])
    opening = outline(Execution.load(run, "0123")).lanes[0].segments[2].opening
    assert opening == {
        "kind": "compaction",
        "at": 2,
        "tokens_before": 20,
        "tokens_after": 9,
        "summary_tokens": 4,
        "copied_tokens": 0,
    }


def test_a_compaction_without_a_recorded_summary_measures_the_last_call() -> None:
    run, e = made()
    a = e.call(new=[("user", 50)])
    e.call(new=[("user", 7)], branch_reason="compaction", extension="fork", continues_from=a.id)
    opening = outline(Execution.load(run, "0123")).lanes[0].segments[1].opening
    assert opening is not None
    assert (opening["tokens_before"], opening["tokens_after"], opening["summary_tokens"]) == (56, 9, None)


def test_links_name_calls() -> None:
    run, e = made()
    a = e.call()
    sub = {"role": "sub_agent", "agent_id": "a91", "spawned_by_node": a.output, "spawned_by_tool_call": "t1"}
    b = e.call(**sub)
    c = e.call(after=b, role="sub_agent_summary", agent_id="a91")
    other = e.call(after=b, role="sub_agent_summary", agent_id="a91", output=9)
    d = e.call(
        new=[("user", 7), ("assistant", 4, {"copy_of": b.output})],
        role="sub_agent", agent_id="a91", branch_reason="compaction", extension="fork", continues_from=c.id,
    )  # fmt: skip
    nameless = e.call(role="sub_agent")
    tree = Execution.load(run, "0123").tree
    first, second = sub_agents(tree)
    assert (first.agent_id, first.calls, first.spawned_by_call) == ("a91", (b.id, c.id, other.id, d.id), a.id)
    assert (first.spawned_by_node, first.spawned_by_tool_call) == (a.output, "t1")
    assert (second.calls, second.spawned_by_call) == ((nameless.id,), None)
    assert second.agent_id == tree.node_id[int(tree.path(tree.index[nameless.prompt])[0])]
    (found,) = compactions(tree)
    assert (found.call_id, found.summary_call, found.continues_from) == (d.id, c.id, c.id)
    assert (found.tokens_before, found.tokens_after, found.summary_tokens, found.copied_tokens) == (9, 13, 4, 4)


def test_unrelated_calls_stay_folded_but_a_false_fork_shows() -> None:
    run, e = made()
    e.call()
    for _ in range(5):
        e.call(role="unknown")
    e.call(role="unknown", extension="root", fork_check="ids differ", tokens_lost=8)
    shown = outline(Execution.load(run, "0123"))
    lines = [line.plain for line in tree_lines(shown, short="0123", where="runs/a")]
    unknown = [line for line in lines if line.startswith("unknown role, never trained  c2-c7")]
    assert len(unknown) == 1
    assert [line for line in lines if "FALSE fork @start  check: ids differ; 8 tok lost" in line]
    assert not [line for line in lines if "new conversation" in line]


def test_many_retries_are_counted_in_one_line() -> None:
    run, e = made()
    at = e.call()
    for _ in range(7):
        at = e.retry(e.call(after=at, output=None, status="failed", delivery=None))
    shown = outline(Execution.load(run, "0123"))
    lines = [line.plain for line in tree_lines(shown, short="0123", where="runs/a")]
    assert [line for line in lines if "7 retried: c2 c4 c6 c8 c10 ..." in line]


def test_titles_come_from_the_first_user_message() -> None:
    run, e = made()
    blobs: dict[str, bytes] = {}

    def blob(message: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(message).encode()
        blobs[name := hashlib.sha256(data).hexdigest()] = data
        return {"message_blobs": (name,)}

    system = blob({"role": "system", "content": "You are"})
    user = blob({"role": "user", "content": "<system-reminder>date</system-reminder>\nfind tests\nand more"})
    e.call(new=[("system", 3, system), ("user", 4, user)])
    assert outline(Execution.load(run, "0123")).lanes[0].title is None
    run.blob = blobs.__getitem__  # type: ignore[attr-defined]
    assert outline(Execution.load(run, "0123")).lanes[0].title == "find tests"
    assert Execution.load(run, "0123").main.messages()[1]["content"].endswith("and more")
    blobs[next(iter(blobs))] = b"not JSON"
    del blobs[list(blobs)[1]]
    assert outline(Execution.load(run, "0123")).lanes[0].title is None


def _everything(shown: Outline) -> list[int]:
    return sorted(n for lane in shown.walk() for n in lane.calls)


@settings(max_examples=30, deadline=None)
@given(forests(max_executions=1))
def test_every_call_stands_in_one_lane_and_every_token_is_counted_once(run: Forest) -> None:
    for info in executions(run).values():
        if not run.rows["calls"]:
            continue
        shown = outline(Execution(run, info))
        assert _everything(shown) == list(range(1, len(shown.tree.calls) + 1))
        assert sum(shown.tokens) == shown.tree.num_tokens
        assert sum(shown.trained) == sum(t.num_owned for t in shown.kept)
        assert all(isinstance(line, Text) for line in tree_lines(shown, short="e", where="runs/a"))


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (numbers.amount(None), "-"),
        (numbers.amount(0), "0"),
        (numbers.amount(999), "999"),
        (numbers.amount(1000), "1.0k"),
        (numbers.amount(9949), "9.9k"),
        (numbers.amount(9950), "10k"),
        (numbers.amount(999_499), "999k"),
        (numbers.amount(999_500), "1.0M"),
        (numbers.amount(38_200_000), "38M"),
        (numbers.count(None), "-"),
        (numbers.count(1347), "1,347"),
        (numbers.ratio(None), "-"),
        (numbers.ratio(1716 / 1347), "1.27x"),
        (numbers.share(1, 1000), "<1%"),
        (numbers.share(0, 1000), "0%"),
        (numbers.share(0, 0), "-"),
        (numbers.duration(None), "-"),
        (numbers.duration(59.4), "59 s"),
        (numbers.duration(192), "3m12"),
        (numbers.duration(5460), "1h31"),
    ],
)
def test_numbers(told: str, wanted: str) -> None:
    assert told == wanted
