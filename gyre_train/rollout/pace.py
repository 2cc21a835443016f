"""How old the data of a step may be, as plain functions.

With E executions a step in groups of G, Q = E / G groups are a step's worth. A group dispatched under the weights of
step d may be in step n + 1 (which changes the weights of step n) when n - d <= S, the bound. Two rules keep it:

- At most (S + 1) Q groups are out: dispatched, and neither trained nor given up. So the oldest are needed in time.
- No step is taken while a group with d <= n - S is out and not in it. Those go first, older before newer, and the step
  waits for them; where they are more than a step's worth, because younger ones were complete before them, it takes
  them all. Nothing is ever dropped for its age.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["Out", "Trainable", "arriving", "budget", "choose"]


class Trainable(Protocol):
    """What is read of an example."""

    @property
    def execution_id(self) -> str:
        """Its name."""

    @property
    def group_id(self) -> str | None:
        """Its group."""


T = TypeVar("T", bound=Trainable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Out:
    """A group that is dispatched and not used up: under the weights of which step, and whether it is complete."""

    group: str
    task: str
    step: int
    complete: bool


def budget(per_step: int, attempts: int, max_staleness: int, share: float = 1.0) -> int:
    """Groups that may be out at a time; `share` is the rollouts' part of each step."""
    groups = -(-round(per_step * share) // attempts)
    return (max_staleness + 1) * max(1, groups)


def choose(
    due: Sequence[T], out: Sequence[Out], *, step: int, per_step: int, attempts: int, max_staleness: int
) -> list[T] | None:
    """The examples of the next step out of those that are `due`, in their order; None: it has to wait.

    `step` is the number of steps taken. Groups in `out` are taken whole, older dispatches first, each as `attempts`
    whatever became of its members; other examples one by one.
    """
    members: Mapping[str, list[T]] = {one.group: [e for e in due if e.group_id == one.group] for one in out}
    order = sorted((one for one in out if one.complete), key=lambda one: one.step)
    forced = [one for one in out if one.step <= step - max_staleness]
    if any(not one.complete for one in forced):
        return None
    chosen = [e for one in order if one in forced for e in members[one.group]]
    places = len(forced) * attempts
    rest = iter([one for one in order if one not in forced])
    seen = {one.group for one in forced}
    for example in due:  # says where in the mix a group stands, not which group it is
        if places >= per_step:
            break
        if example.group_id is None or example.group_id not in members:
            chosen.append(example)
            places += 1
        elif example.group_id not in seen:
            seen.add(example.group_id)
            if (group := next(rest, None)) is not None:
                chosen += members[group.group]
                places += attempts
    return chosen if places >= per_step and chosen else None


def arriving(
    due: Sequence[T],
    out: Sequence[Out],
    taken: Collection[T],
    *,
    step: int,
    per_step: int,
    attempts: int,
    max_staleness: int,
) -> tuple[list[T], bool]:
    """What belongs to a step that fills as groups come, of those that are `due`, and whether it has all that it gets.

    As `choose`, for an open step with `taken` in it, which stay: a group is in it as soon as it is complete, and places
    are kept for those that must be in it.
    """
    groups, known = {one.group for one in out}, {e.execution_id for e in taken}
    forced = {one.group for one in out if one.step <= step - max_staleness}
    inside = {e.group_id for e in taken if e.group_id in groups}
    seen = forced | inside
    chosen = [*taken, *(e for e in due if e.group_id in forced - inside and _is_complete(e.group_id, out))]
    places = len(seen) * attempts + sum(e.group_id not in groups for e in taken)
    rest = iter([one.group for one in sorted(out, key=lambda one: one.step) if one.complete and one.group not in seen])
    for example in due:
        if places >= per_step:
            break
        if example.group_id is None or example.group_id not in groups:
            if example.execution_id not in known:
                chosen.append(example)
                places += 1
        elif example.group_id not in seen:
            seen.add(example.group_id)
            if (group := next(rest, None)) is not None:
                chosen += [e for e in due if e.group_id == group]
                places += attempts
    lacks = any(one.group in forced and not one.complete for one in out)
    return chosen, bool(chosen) and places >= per_step and not lacks


def _is_complete(group: str | None, out: Sequence[Out]) -> bool:
    return any(one.complete for one in out if one.group == group)
