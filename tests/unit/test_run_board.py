"""What `gyre run` shows while it works: who waits for whom, how far it is, and no more lines than a screen has."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from gyre_proxy.launch.show import Board
from gyre_proxy.launch.supervisor import Watched

NOW = 1000.0


def shown(them: list[Watched], total: int | None = 8) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gyre_proxy.launch.show.time", SimpleNamespace(monotonic=lambda: NOW))  # it takes no time
        board = Board(quiet=False, total=total, console=console)
        board.about("proxy 127.0.0.1:8765  4 tasks x 2", 4)
        console.print(board.view({one.id: replace(one, last_event=NOW) for one in them}))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def watched() -> list[Watched]:
    return [
        Watched(
            id="e7f3aaaa1",
            task="swe-412",
            state="running",
            num_calls=212,
            in_flight=1,
            prompt_tokens=81000,
            doing="a91",
        ),
        Watched(id="b02caaaa1", task="swe-412", state="evaluating", num_calls=96),
        Watched(id="b03caaaa1", task="swe-413", state="to judge", num_calls=9),
        Watched(id="9d1eaaaa1", task="swe-007", state="done", num_calls=140, score=1.0, end_reason="finished"),
        Watched(id="9d1eaaaa2", task="swe-007", state="done", num_calls=14, score=0.5, end_reason="harness_timeout"),
        Watched(id="9d1eaaaa3", task="swe-007", state="done", unscored="evaluator exited 1", end_reason="finished"),
        Watched(id="9d1eaaaa4", task="swe-007", state="done", error="could not start: x", end_reason="infra_fault"),
    ]


def test_it_says_who_waits_for_whom_and_how_far_it_is() -> None:
    lines = shown(watched())
    assert lines[0] == "proxy 127.0.0.1:8765  4 tasks x 2  1 of 4 running"
    assert lines[2].split() == ["e7f3aaaa", "swe-412", "running", "212", "81,000", "a91", "0", "s", "-"]
    assert "waiting on: engine 1, evaluator 1, a free evaluator 1; longest silence 0 s" in lines
    assert lines[-1] == "3/8 done, ETA 0 s: 2 scored, 1 timed out, 1 evaluator failed, 1 lost"
    assert max(map(len, lines)) <= 80


def test_what_is_at_work_stands_before_what_is_done_and_a_screen_holds_it() -> None:
    done = [Watched(id=f"d{n:08}", task="t", state="done", end_reason="finished") for n in range(50)]
    lines = shown([*done, watched()[0]], total=None)
    assert lines[2].startswith("e7f3aaaa")
    assert len(lines) < 30
    assert "and 27 more" in lines
    assert lines[-1].startswith("50 done")
