"""What was lost and what took its place, and agents that go in circles."""

from __future__ import annotations

from typing import Any

from gyre_data.execution import Execution
from gyre_data.retries import loops, lost_calls
from tests.support.forest import ExecutionBuilder, Forest


def made() -> tuple[Forest, ExecutionBuilder]:
    run = Forest()
    return run, run.execution("e_0123456789ab")


def test_lost_calls_name_why_and_what_replaced_them() -> None:
    run, e = made()
    a = e.call()
    failed = e.call(after=a, output=None, status="failed", error="engine 2 lost", delivery=None)
    again = e.retry(failed, delivery="undelivered")
    twice = e.retry(failed)
    e.call(after=twice, status="aborted", delivery="abandoned")
    found = lost_calls(Execution.load(run, "0123").tree)
    told = [(x.number, str(x.why), x.replaced_by, x.output_tokens) for x in found]
    assert told == [(2, "failed", 3, None), (3, "undelivered", 4, 4), (5, "aborted", None, 4)]
    first, second, _ = found
    assert (first.told, first.replaced_by_call_id, second.seconds) == ("engine 2 lost", again.id, 0.5)


def test_a_call_sampled_anew_is_repeated() -> None:
    run, e = made()
    a = e.call()
    e.retry(a)
    (found,) = lost_calls(Execution.load(run, "0123").tree)
    assert (found.number, str(found.why), found.replaced_by) == (1, "repeated", 2)


def replies(*names: Any) -> Execution:
    run, e = made()
    at = None
    for name, number in names:
        at = e.call(after=at)
        e.say(at.output, {"role": "assistant", "tool_calls": [{"name": name, "arguments": {"line": number}}]})
    run.blob = {row.blob_id: row.data for row in run.rows["blobs"]}.__getitem__  # type: ignore[attr-defined]
    return Execution.load(run, "0123")


def test_loops_of_near_identical_calls() -> None:
    once = [("Read", 1), ("Bash", 1), ("Read", 2), ("Bash", 7), ("Read", 3), ("Bash", 9), ("Edit", 0)]
    (found,) = loops(replies(("Edit", 0), *once))
    assert (found.calls, found.period, found.rounds) == ((2, 3, 4, 5, 6, 7), 2, 3)
    assert found.replies == ('Read {"line": 1}', 'Bash {"line": 1}')
    (same,) = loops(replies(*[("Read", n) for n in range(7)]))
    assert (same.period, same.rounds) == (1, 7)
    assert loops(replies(("Read", 1), ("Read", 2), ("Bash", 1), ("Read", 3))) == []
