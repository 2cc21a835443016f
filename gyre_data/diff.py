"""Two paths side by side: branches of one execution, two calls, or two rollouts of one task.

Messages are compared by what they say: ids and blanks around a reply do not count. What the two have in common on the
tree (nodes and tokens) is told apart from what they merely say alike.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .path import Path, PathMessage, Shared
from .scores import latest_scored
from .texts import arguments_text, role_of, said, tools_of

__all__ = ["Diff", "DiffSide", "DiffStep", "Differs", "argument_changes", "diff_paths"]


class Differs(StrEnum):
    """How a step differs between the sides."""

    SAME = "same"
    CHANGED = "changed"
    ONLY_A = "only_a"
    ONLY_B = "only_b"


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffStep:
    """A stretch of equal messages, or one message that is changed or on one side only."""

    kind: Differs
    a: tuple[PathMessage, ...] = ()
    b: tuple[PathMessage, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffSide:
    """One side's outcome. Scores, end and time are of its execution; calls, tokens and tools of the path."""

    execution_id: str
    task_id: str | None
    sample_index: int | None
    end_reason: str | None
    call_id: str | None
    scores: dict[str, float | None]
    """Latest scored value by evaluator; None for one that never scored."""
    num_calls: int
    num_messages: int
    num_tokens: int
    num_sampled: int
    seconds: float | None
    tools: dict[str, int]
    """Calls on the path by tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """What two paths share and where they differ."""

    a: DiffSide
    b: DiffSide
    shared: Shared
    """Common nodes and tokens on the tree; none for paths of different executions."""
    steps: tuple[DiffStep, ...]


def diff_paths(a: Path, b: Path) -> Diff:
    """Compare two paths, of one execution or of two."""
    return Diff(a=_side(a), b=_side(b), shared=a.shared_with(b), steps=tuple(_steps(a.conversation, b.conversation)))


def _side(path: Path) -> DiffSide:
    info, scores = path.execution.info, path.execution.scores
    latest = {name: latest_scored(scores, name) for name in sorted({row.evaluator for row in scores})}
    took = (info.ended_at - info.started_at).total_seconds() if info.ended_at and info.started_at else None
    return DiffSide(
        execution_id=info.execution_id,
        task_id=info.task_id,
        sample_index=info.sample_index,
        end_reason=info.end_reason,
        call_id=None if path.call is None else path.call.call_id,
        scores={name: None if row is None else row.value for name, row in latest.items()},
        num_calls=len(path.calls),
        num_messages=len(path.conversation),
        num_tokens=len(path),
        num_sampled=sum(made.end - made.start for made in path.calls),
        seconds=took,
        tools=dict(Counter(name for m in path.conversation for name, _ in tools_of(m.value)).most_common()),
    )


def _key(message: PathMessage) -> tuple[Any, ...]:
    """What it says; where the run holds no text, the node itself, so that only a shared node is the same."""
    return said(message.value) if message.value is not None else (message.node, message.index)


def _steps(a: tuple[PathMessage, ...], b: tuple[PathMessage, ...]) -> Iterator[DiffStep]:
    ones, twos = [_key(m) for m in a], [_key(m) for m in b]
    matcher = difflib.SequenceMatcher(None, ones, twos, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            yield DiffStep(kind=Differs.SAME, a=a[i1:i2], b=b[j1:j2])
            continue
        mine, its = a[i1:i2], b[j1:j2]
        paired = 0
        while paired < min(len(mine), len(its)) and mine[paired].role == its[paired].role:
            yield DiffStep(kind=Differs.CHANGED, a=mine[paired : paired + 1], b=its[paired : paired + 1])
            paired += 1
        for message in mine[paired:]:
            yield DiffStep(kind=Differs.ONLY_A, a=(message,))
        for message in its[paired:]:
            yield DiffStep(kind=Differs.ONLY_B, b=(message,))


def argument_changes(one: Any, two: Any) -> list[tuple[str, str | None, str | None]] | None:
    """(argument, value, value) of what differs when both messages call the same tools; None when they do not.

    An argument is named `TOOL.NAME`; None stands where a side does not have it. Text and reasoning are not looked at.
    """
    ones, twos = tools_of(one), tools_of(two)
    if not ones or [name for name, _ in ones] != [name for name, _ in twos] or role_of(one) != role_of(two):
        return None
    found: list[tuple[str, str | None, str | None]] = []
    for (name, left), (_, right) in zip(ones, twos, strict=True):
        if not (isinstance(left, dict) and isinstance(right, dict)):
            if arguments_text(left) != arguments_text(right):
                found.append((name, arguments_text(left), arguments_text(right)))
            continue
        for key in (*left, *(k for k in right if k not in left)):
            values = tuple(arguments_text(side[key]) if key in side else None for side in (left, right))
            if values[0] != values[1]:
                found.append((f"{name}.{key}", values[0], values[1]))
    return found
