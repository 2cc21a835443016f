"""How long executions take: a fitted model, or recorded ones drawn again group by group.

Executions of one query are alike: figures published for 122B exclude every independent family, and a two-level
lognormal fits them all (docs/scheduler.md). So a query's effect is drawn first, then each execution's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import ScenarioError

__all__ = ["Draw", "Durations", "Recorded", "TwoLevel", "grouped", "lognormal", "speed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The executions of one query, in seconds at full speed and without a timeout."""

    seconds: tuple[float, ...]
    query_s: float
    """What a perfect estimate of the query would be."""


class Durations(Protocol):
    """Where durations come from."""

    @property
    def mean_s(self) -> float:
        """Mean of an execution at full speed, without a timeout."""
        ...

    def draw(self, rng: random.Random, members: int) -> Draw:
        """The next query's executions."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoLevel:
    """mean x LN(cv_query, shared by a query) x LN(cv_execution); both factors have mean one."""

    mean_s: float
    cv_query: float
    cv_execution: float

    def __post_init__(self) -> None:
        if self.mean_s <= 0 or self.cv_query < 0 or self.cv_execution < 0:
            raise ScenarioError(f"wanted a mean above 0 and variations of at least 0, got {self}; correct them")

    def draw(self, rng: random.Random, members: int) -> Draw:
        """One query."""
        query_s = self.mean_s * lognormal(rng, self.cv_query)
        return Draw(seconds=tuple(query_s * lognormal(rng, self.cv_execution) for _ in range(members)), query_s=query_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Recorded groups, drawn with replacement; members are drawn again within a group of another size."""

    groups: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.groups or any(not group or min(group) <= 0 for group in self.groups):
            raise ScenarioError("wanted groups of durations above 0, got none or one without; record executions first")

    @property
    def mean_s(self) -> float:
        """Mean over all of them."""
        return sum(map(sum, self.groups)) / sum(map(len, self.groups))

    def draw(self, rng: random.Random, members: int) -> Draw:
        """One query."""
        group = rng.choice(self.groups)
        seconds = group if len(group) == members else tuple(rng.choices(group, k=members))
        return Draw(seconds=seconds, query_s=sum(group) / len(group))


def speed(unfinished: int, capacity: int, engine_share: float) -> float:
    """Progress of each unfinished execution, 1 where `capacity` covers them all, 0 where nothing serves.

    Contention stretches the share of an execution's time that an engine works for it.
    """
    if not capacity:
        return 0.0
    return 1.0 / (engine_share * max(1.0, unfinished / capacity) + 1.0 - engine_share)


def lognormal(rng: random.Random, cv: float) -> float:
    """A factor of mean one and this coefficient of variation."""
    variance = math.log1p(cv * cv)
    return rng.lognormvariate(-variance / 2, math.sqrt(variance))


def grouped(rows: Sequence[tuple[str, float]]) -> Recorded:
    """Recorded durations by group name."""
    groups: dict[str, list[float]] = {}
    for name, seconds in rows:
        groups.setdefault(name, []).append(seconds)
    return Recorded(groups=tuple(tuple(group) for group in groups.values()))
