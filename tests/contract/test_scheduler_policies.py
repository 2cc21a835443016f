"""Every policy that ships is sound: I1-I12 after every event, with contention, few cells and failures.

A policy of your own is checked the same way: `check_policy(lambda: MyPolicy(...)) == []`.
"""

from collections.abc import Callable

import pytest

from gyre_sched.actions import Action, Dispatch, ToTrain
from gyre_sched.api import Policy, Snapshot
from gyre_sched.invariants import check_policy
from gyre_sched.policies import Async, CarryOver, Cohort, Colocate, Planner, Waterlevel

SOUND: dict[str, Callable[[], Policy]] = {
    "waterlevel": Waterlevel,
    "single steps": lambda: Waterlevel(burst=1, depth=2.5),
    "depth of one": lambda: Waterlevel(burst=3, depth=1.0),
    "theta low": lambda: Waterlevel(theta=0.7),
    "theta high": lambda: Waterlevel(theta=1.3),
    "carryover": CarryOver,
    "cohort": Cohort,
    "planner": lambda: Planner(target=0.5, window=1),
    "colocate": Colocate,
    "colocate, standalone": lambda: Colocate(standalone=2, streaming=True),
    "async": lambda: Async(rollout_cells=2),
    "async, streaming": lambda: Async(rollout_cells=2, streaming=True),
}


@pytest.mark.parametrize("name", list(SOUND))
def test_a_policy_that_ships_is_sound(name: str) -> None:
    problems = check_policy(SOUND[name], seeds=(0,), steps=6)
    if name.startswith(("async", "colocate, st")):  # fixed pools need a cell in each
        problems = [problem for problem in problems if not problem.startswith("1 cell")]
    assert problems == []


class EmptiesThePool:
    """Moves every cell to training at once, whatever is unfinished."""

    def decide(self, snapshot: Snapshot) -> list[Action]:
        if not snapshot.outstanding:
            ids = tuple(query.id for query in snapshot.upcoming[:8])
            return [Dispatch(queries=ids, version=snapshot.rollout_version)]
        return [ToTrain(cell=cell.id, epoch=cell.epoch) for cell in snapshot.cells.serving]


class Forgets:
    """Dispatches less than a batch, and nothing after it."""

    def decide(self, snapshot: Snapshot) -> list[Action]:
        if snapshot.ledger.dispatched:
            return []
        return [Dispatch(queries=(snapshot.upcoming[0].id,), version=0)]


class Remembers:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def decide(self, snapshot: Snapshot) -> list[Action]:
        self.calls += 1
        return [Dispatch(queries=(snapshot.upcoming[0].id,), version=0)] if self.calls == 1 else []


class NeverSettles:
    """Asks for one more query, for ever."""

    def decide(self, snapshot: Snapshot) -> list[Action]:
        return [Dispatch(queries=(snapshot.upcoming[0].id,), version=0)]


@pytest.mark.parametrize(
    ("unsound", "told"),
    [(EmptiesThePool, "unsafe action"), (Forgets, "I10 broken"), (Remembers, "I9 broken"), (NeverSettles, "settle")],
)
def test_an_unsound_policy_is_told_what_it_broke(unsound: Callable[[], Policy], told: str) -> None:
    problems = check_policy(unsound, seeds=(0,), steps=2)
    assert problems
    assert any(told in problem for problem in problems), problems
