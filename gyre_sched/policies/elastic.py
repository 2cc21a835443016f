"""Elastic policies: cells leave rollout as the waterlevel sinks, and train while the tail of the burst runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_sched.actions import Action
from gyre_sched.api import Query, Snapshot
from gyre_sched.rules import (
    Choose,
    claim,
    close_and_return,
    dispatch,
    in_arrival_order,
    leave_in_order,
    rescue,
    return_when_flooded,
)

from .settings import checked

__all__ = ["CarryOver", "Cohort", "Waterlevel", "elastic"]


def elastic(
    snapshot: Snapshot, *, burst: int, outstanding: int, theta: float = 1.0, choose: Choose = in_arrival_order
) -> list[Action]:
    """The rule that the elastic policies share; `outstanding` is in groups."""
    # What changes the waterlevel or the burst stands alone: the rest is decided on what comes of it.
    actions = close_and_return(snapshot, outstanding) or rescue(snapshot) or dispatch(snapshot, outstanding, choose)
    return actions or [
        *return_when_flooded(snapshot, theta=theta, movable=lambda cell: True),
        *leave_in_order(snapshot, burst=burst, outstanding=outstanding, theta=theta, movable=lambda cell: True),
        *claim(snapshot),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Waterlevel:
    """Bursts of `burst` steps over `depth` batches; with both 4, all that is dispatched is consumed in its burst."""

    burst: int = 4
    depth: float = 4.0
    """Groups outstanding after a dispatch, in batches. Staleness E[d] is depth - (burst + 1) / 2."""
    theta: float = 1.0
    """Share of the serving capacity that counts as cover."""

    def __post_init__(self) -> None:
        checked(self, burst=1, depth=1, theta=0.1)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """Close and return, dispatch, leave, claim."""
        outstanding = round(self.depth * snapshot.params.batch_groups)
        return elastic(snapshot, burst=self.burst, outstanding=outstanding, theta=self.theta)


@dataclass(frozen=True, kw_only=True, slots=True)
class CarryOver(Waterlevel):
    """Shorter bursts over more than they consume: no step waits for the slowest of all, the next burst takes those.

    Better than Waterlevel where the tail of durations is long, worse where the timeout cuts it (docs/scheduler.md).
    """

    burst: int = 3
    depth: float = 3.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohort(Waterlevel):
    """Of a window of `window` bursts of queries, those expected to be short go first, those expected to be long last.

    A window is used up before the next is drawn, so no query waits longer than that. Queries without an estimate keep
    the queue's order. The order of the data changes: leave it off where scores must be comparable.
    """

    window: int = 2

    def __post_init__(self) -> None:
        checked(self, burst=1, depth=1, window=1, theta=0.1)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """As Waterlevel, with another order of dispatch."""
        batch = snapshot.params.batch_groups
        return elastic(
            snapshot,
            burst=self.burst,
            outstanding=round(self.depth * batch),
            theta=self.theta,
            choose=lambda seen, count: by_cohort(seen, count, size=self.window * self.burst * batch),
        )


def by_cohort(snapshot: Snapshot, count: int, *, size: int, since: int = 0) -> Sequence[Query]:
    """The `count` upcoming queries of the window that are expected to end first.

    Windows hold `size` queries; the first began when `since` were dispatched.
    """
    chosen: list[Query] = []
    rest = snapshot.upcoming
    left = size - (snapshot.ledger.dispatched - since) % size
    while rest and len(chosen) < count:
        window, rest = rest[:left], rest[left:]
        known = all(query.predicted_s is not None for query in window)
        ordered = sorted(window, key=lambda query: query.predicted_s or 0.0) if known else list(window)
        chosen += ordered[: count - len(chosen)]
        left = size
    return chosen
