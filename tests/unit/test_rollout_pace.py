"""How old the data of a step may be: which groups a step takes, waits for, and how many may be out."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from gyre_train.rollout.pace import Out, arriving, budget, choose


@dataclass(frozen=True)
class Member:
    group_id: str | None
    name: str = ""

    @property
    def execution_id(self) -> str:
        return self.name


def out(**groups: tuple[int, bool]) -> list[Out]:
    return [Out(group=name, task="t", step=step, complete=complete) for name, (step, complete) in groups.items()]


def members(*groups: str, size: int = 2) -> list[Member]:
    return [Member(group, f"{group}{n}") for group in groups for n in range(size)]


def names(chosen: list[Member] | None) -> list[str] | None:
    return None if chosen is None else [one.name for one in chosen]


BOUND = {"per_step": 2, "attempts": 2, "max_staleness": 1}


def test_older_dispatches_go_first_whatever_was_complete_first() -> None:
    chosen = choose(members("b", "a"), out(a=(0, True), b=(1, True)), step=1, **BOUND)
    assert names(chosen) == ["a0", "a1"]


def test_a_step_waits_for_a_group_that_may_get_no_older() -> None:
    young = members("b")
    assert names(choose(young, out(a=(0, False), b=(1, True)), step=0, **BOUND)) == ["b0", "b1"]
    assert choose(young, out(a=(0, False), b=(1, True)), step=1, **BOUND) is None
    assert names(choose(members("b", "a"), out(a=(0, True), b=(1, True)), step=1, **BOUND)) == ["a0", "a1"]


def test_a_group_counts_as_it_was_meant_to_be() -> None:
    short = [Member("a", "a0")]  # the evaluator failed for the other
    assert names(choose(short, out(a=(0, True)), step=0, **BOUND)) == ["a0"]
    assert choose([], out(a=(0, False)), step=0, **BOUND) is None


def test_recorded_executions_keep_their_places_in_the_mix() -> None:
    due = [Member("r", "r0"), *members("b"), Member("r", "r1"), *members("a")]
    chosen = choose(due, out(a=(0, True), b=(1, True)), step=1, per_step=6, attempts=2, max_staleness=3)
    assert names(chosen) == ["r0", "a0", "a1", "r1", "b0", "b1"]


@pytest.mark.parametrize(
    ("per_step", "attempts", "staleness", "share", "wanted"),
    [
        (8, 4, 0, 1.0, 2),
        (8, 4, 1, 1.0, 4),
        (8, 8, 0, 1.0, 1),
        (8, 4, 1, 0.75, 4),
        (8, 4, 1, 0.25, 2),
        (4, 4, 2, 0.1, 3),
    ],
)
def test_as_many_groups_are_out_as_the_bound_allows(
    per_step: int, attempts: int, staleness: int, share: float, wanted: int
) -> None:
    assert budget(per_step, attempts, staleness, share) == wanted


@pytest.mark.parametrize("seed", range(30))
def test_no_group_gets_older_than_the_bound_and_nothing_stands_still(seed: int) -> None:
    rng = random.Random(seed)
    attempts, staleness = rng.choice((1, 2, 4)), rng.randrange(4)
    per_step = attempts * rng.choice((1, 2, 3))
    step, number, idle = 0, 0, 0
    out: list[Out] = []
    while step < 40:
        limit = budget(per_step, attempts, staleness)
        for _ in range(limit - len(out)):
            out.append(Out(group=f"g{number}", task="t", step=step, complete=False))
            number += 1
        pick = rng.randrange(len(out))  # any of them becomes complete, or is given up, whatever its age
        if rng.random() < 0.1:
            del out[pick]
        else:
            out[pick] = Out(group=out[pick].group, task="t", step=out[pick].step, complete=True)
        due = members(*(one.group for one in out if one.complete), size=rng.randint(1, attempts))
        chosen = choose(due, out, step=step, per_step=per_step, attempts=attempts, max_staleness=staleness)
        idle += 1
        assert idle < 500
        if chosen is not None:
            used = {one.group_id for one in chosen}
            assert all(step - one.step <= staleness for one in out if one.group in used)
            assert len(used) >= per_step // attempts
            out = [one for one in out if one.group not in used]
            step, idle = step + 1, 0


def test_a_step_that_fills_keeps_places_for_what_may_get_no_older() -> None:
    young, old = members("b"), members("a")
    assert arriving(young, out(a=(0, False), b=(1, True)), [], step=1, **BOUND) == ([], False)
    assert arriving([*young, *old], out(a=(0, True), b=(1, True)), [], step=1, **BOUND) == (old, True)
    more = {**BOUND, "per_step": 4}
    assert arriving(young, out(a=(0, False), b=(1, True)), [], step=1, **more) == (young, False)
    assert arriving([*young, *old], out(a=(0, True), b=(1, True)), young, step=1, **more) == ([*young, *old], True)


@pytest.mark.parametrize("seed", range(30))
def test_a_step_that_fills_takes_each_group_once_and_keeps_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    attempts, staleness = rng.choice((1, 2, 4)), rng.randrange(4)
    per_step = attempts * rng.choice((1, 2, 3))
    step, number, idle = 0, 0, 0
    out: list[Out] = []
    taken: list[Member] = []
    while step < 40:
        for _ in range(budget(per_step, attempts, staleness) - len(out)):
            out.append(Out(group=f"g{number}", task="t", step=step, complete=False))
            number += 1
        inside = {one.group_id for one in taken}
        pick = rng.randrange(len(out))
        if rng.random() < 0.1 and out[pick].group not in inside:
            del out[pick]
        else:
            out[pick] = Out(group=out[pick].group, task="t", step=out[pick].step, complete=True)
        due = members(*rng.sample(found := [one.group for one in out if one.complete], len(found)), size=attempts)
        chosen, whole = arriving(
            due, out, taken, step=step, per_step=per_step, attempts=attempts, max_staleness=staleness
        )
        assert chosen[: len(taken)] == taken, "what is in it stays"
        assert len(set(chosen)) == len(chosen)
        used, forced = {one.group_id for one in chosen}, {one.group for one in out if one.step <= step - staleness}
        assert len(used) <= max(per_step // attempts, len(used & forced))
        taken, idle = chosen, idle + 1
        assert idle < 500
        if whole:
            assert all(step - one.step <= staleness for one in out if one.group in used)
            assert forced <= used
            out, taken = [one for one in out if one.group not in used], []
            step, idle = step + 1, 0
