"""Calls that came to nothing and what took their place, and agents that go round in circles.

A call is *lost* when it failed, was aborted, or its reply never reached the harness and nothing goes on from it; a call
that was sampled twice is *repeated*. A *loop* is a stretch of an agent's calls that asks for the same tools with nearly
the same arguments over and over: digits and blanks do not count as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .eligible import Reason, eligibility
from .execution import Execution
from .links import agent_of
from .texts import arguments_text, content_text, node_messages, tools_of
from .tree import Tree
from .types import Call

__all__ = ["Loop", "Lost", "LostWhy", "loops", "lost_calls"]

_LONGEST_PERIOD = 4
LEAST_ROUNDS = 3


class LostWhy(StrEnum):
    """What became of a call that counts for nothing."""

    FAILED = "failed"
    ABORTED = "aborted"
    UNDELIVERED = "undelivered"
    REPEATED = "repeated"
    """Answered, and yet the same request came again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A call that was lost or sampled again. Tokens and time are what it cost."""

    number: int
    call_id: str
    why: LostWhy
    told: str
    """The error, or what is known of the delivery."""
    replaced_by: int | None
    """Number of the call that took its place: the next one with the same prompt; None when nothing did."""
    replaced_by_call_id: str | None
    output_tokens: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Calls of one agent that repeat themselves: `rounds` times the same `period` replies."""

    calls: tuple[int, ...]
    period: int
    rounds: int
    replies: tuple[str, ...]
    """One round, in short."""


_WHY = {
    Reason.CALL_FAILED: LostWhy.FAILED,
    Reason.CALL_ABORTED: LostWhy.ABORTED,
    Reason.UNDELIVERED: LostWhy.UNDELIVERED,
}


def lost_calls(tree: Tree) -> list[Lost]:
    """Every lost or repeated call by time, with what replaced it."""
    reasons = eligibility(tree).reasons
    later: dict[str, list[int]] = {}
    for number, call in enumerate(tree.calls, 1):
        if call.prompt_node is not None:
            later.setdefault(call.prompt_node, []).append(number)
    found = []
    for number, call in enumerate(tree.calls, 1):
        reason, detail = reasons.get(call.call_id, (None, ""))
        after = [n for n in later.get(call.prompt_node or "", ()) if n > number]
        why = _WHY.get(reason) if reason is not None else None
        if why is None and after and call.output_node is not None:
            why, detail = LostWhy.REPEATED, "was answered, and the same request came again"
        if why is not None:
            found.append(_lost(tree, number, call, why, detail, after[0] if after else None))
    return found


def _lost(tree: Tree, number: int, call: Call, why: LostWhy, told: str, by: int | None) -> Lost:
    return Lost(
        number=number,
        call_id=call.call_id,
        why=why,
        told=told,
        replaced_by=by,
        replaced_by_call_id=None if by is None else tree.calls[by - 1].call_id,
        output_tokens=call.output_tokens,
        seconds=None if call.ended_at is None else (call.ended_at - call.started_at).total_seconds(),
    )


def loops(execution: Execution) -> list[Loop]:
    """Stretches of at least three rounds of near-identical replies, by the number of their first call."""
    tree, of = execution.tree, dict[tuple[str, str | None], list[tuple[int, str, str]]]()
    for number, call in enumerate(tree.calls, 1):
        output = tree.output(call)
        said = [] if output is None else node_messages(execution.run, tree, output)
        if said:
            of.setdefault(agent_of(tree, call), []).append((number, *_signature(said[-1])))
    found = [loop for replies in of.values() for loop in _loops(replies)]
    return sorted(found, key=lambda loop: loop.calls)


def _signature(message: object) -> tuple[str, str]:
    """(what is compared, what is shown) of a reply."""
    calls = [f"{name} {arguments_text(arguments)}" for name, arguments in tools_of(message)]
    text = "; ".join(calls) or content_text(message)
    return re.sub(r"\d+", "#", " ".join(text.split())), text


def _loops(replies: Sequence[tuple[int, str, str]]) -> list[Loop]:
    keys = [key for _, key, _ in replies]
    found, at = [], 0
    while at < len(keys):
        best = max(((_repeats(keys, at, period), period) for period in range(1, _LONGEST_PERIOD + 1)), key=_worth)
        rounds, period = best
        if rounds < LEAST_ROUNDS:
            at += 1
            continue
        part = replies[at : at + rounds * period]
        shown = tuple(text for _, _, text in part[:period])
        found.append(Loop(calls=tuple(n for n, _, _ in part), period=period, rounds=rounds, replies=shown))
        at += rounds * period
    return found


def _worth(found: tuple[int, int]) -> tuple[bool, int, int]:
    """Prefer what repeats at all, then the longest stretch, then the shortest round."""
    rounds, period = found
    return rounds >= LEAST_ROUNDS, rounds * period, -period


def _repeats(keys: Sequence[str], at: int, period: int) -> int:
    round_, rounds = keys[at : at + period], 0
    while keys[at + rounds * period : at + (rounds + 1) * period] == round_ and len(round_) == period:
        rounds += 1
    return rounds
