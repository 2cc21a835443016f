"""What a policy sees and may ask for: an immutable snapshot in, a list of actions out.

`decide(snapshot)` is a pure function of the snapshot: no clock, no input or output, no memory but `snapshot.ledger`, so
it survives a restart and the same object drives the simulator and real cells. Events only wake it; it looks at state
alone. The driver applies its actions in order and asks again until the list is empty.

Words: a *group* is a query's G executions; *outstanding* groups are dispatched and neither consumed nor dropped; a
*step* consumes exactly B groups, cut into *micro-steps*; a *burst* is a run of steps with the core in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .actions import Action

__all__ = [
    "Burst",
    "Cell",
    "Cells",
    "Costs",
    "ExecutionView",
    "GroupView",
    "Key",
    "LedgerView",
    "Params",
    "Plan",
    "Policy",
    "Query",
    "Role",
    "Snapshot",
    "StepView",
]

Key = tuple[int, str, int]
"""A micro-step: (step, query id, part)."""


class Role(StrEnum):
    """What a cell does; only ROLLOUT serves model calls, only TRAIN claims micro-steps."""

    ROLLOUT = "rollout"
    DRAINING = "draining"
    TO_TRAIN = "to_train"
    TRAIN = "train"
    TO_ROLLOUT = "to_rollout"
    DOWN = "down"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A group of GPUs that is either a rollout engine or a training replica."""

    id: str
    position: int
    """Place in the fixed order; the core has the least."""
    capacity: int
    """Executions it serves at full speed."""
    core: bool = False
    role: Role = Role.ROLLOUT
    epoch: int = 0
    """Grows with every role change, failure and restart of a step; what carries an older one is refused."""
    version: int = 0
    """Of the weights it holds."""
    running: Key | None = None
    held: int = 0
    """Micro-steps whose gradients it holds and has not handed over."""


class Cells(tuple[Cell, ...]):
    """The cells in fixed order, with what policies ask of them counted once, when a cell has changed."""

    core: Cell
    """The one cell with the authoritative weights and the optimiser."""
    serving: tuple[Cell, ...]
    """Cells in ROLLOUT now; one that is switching back does not serve yet."""
    returning: tuple[Cell, ...]
    """Cells on their way to ROLLOUT."""
    training: tuple[Cell, ...]
    """Cells in TRAIN."""
    idle: tuple[Cell, ...]
    """Cells in TRAIN that run no micro-step."""
    capacity: int
    """Executions that the serving cells take at full speed."""
    capacity_soon: int
    """The same with the returning cells."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        by_role: dict[Role, list[Cell]] = {Role.ROLLOUT: [], Role.TO_ROLLOUT: [], Role.TRAIN: []}
        for cell in self:
            if cell.role in by_role:
                by_role[cell.role].append(cell)
            if cell.core:
                self.core = cell
        self.serving, self.returning, self.training = map(tuple, by_role.values())
        self.idle = tuple([cell for cell in self.training if cell.running is None])
        self.capacity = sum([cell.capacity for cell in self.serving])
        self.capacity_soon = self.capacity + sum([cell.capacity for cell in self.returning])


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """What a run fixes for every policy."""

    batch_groups: int
    """B: groups a step consumes."""
    group_size: int
    """G: executions a group has."""
    microsteps_per_group: int = 4
    min_rollout: int = 1
    """Cells that must serve while executions are unfinished."""

    def __post_init__(self) -> None:
        for name in ("batch_groups", "group_size", "microsteps_per_group", "min_rollout"):
            if getattr(self, name) < 1:
                raise ValueError(f"wanted {name} of at least 1, got {getattr(self, name)}; correct the scenario")

    @classmethod
    def of(cls, settings: object) -> Params:
        """Those that a scenario or a fleet's settings have among their fields, under the same names."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A task that has not been dispatched yet."""

    id: str
    predicted_s: float | None = None
    """Expected duration of its executions, from an earlier epoch; None in the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionView:
    """An unfinished execution."""

    query: str
    member: int
    dispatched_s: float
    version: int
    returning: bool = False
    """ReturnPartial was asked for it, and its end is not told yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupView:
    """A group that is not ready."""

    query: str
    done: int
    left: int
    age_s: float
    predicted_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """The step that is open."""

    index: int
    """Equal to the version it starts from."""
    groups: int
    """Taken so far, at most B."""
    pending: tuple[Key, ...]
    """Micro-steps nobody has claimed, oldest first."""
    running: int
    held: int
    closing: bool
    """Its gradients are reduced and the optimiser runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Burst:
    """The burst that is open."""

    planned: int
    done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds as measured last; 0 where nothing was measured."""

    to_train_s: float = 0.0
    to_rollout_s: float = 0.0
    optimiser_s: float = 0.0
    pull_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a planner chose last: K, N in groups, and the cohort window in bursts (1: none)."""

    burst: int
    outstanding: int
    window: int = 1
    since: int = 0
    """Groups dispatched when it was made: its windows are counted from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerView:
    """Sums over all that happened; a policy's only memory."""

    dispatched: int = 0
    consumed: int = 0
    dropped: int = 0
    staleness_sum: int = 0
    """Of d over consumed groups."""
    staleness_max: int = 0
    bursts: int = 0
    plan: Plan | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The whole state at one moment. `executions` and `groups` are built when called, and only inside `decide`."""

    seq: int
    now_s: float
    version: int
    """Optimiser steps applied."""
    rollout_version: int
    """Of the weights that new executions are dispatched with."""
    params: Params
    cells: Cells
    unfinished: int
    """U, the waterlevel: executions dispatched that can still make a model call."""
    outstanding: int
    ready: tuple[str, ...]
    """Groups ready and not taken by a step, in order of arrival."""
    step: StepView | None
    burst: Burst | None
    upcoming: tuple[Query, ...]
    """The next queries, a bounded window of them."""
    costs: Costs
    ledger: LedgerView
    executions: Callable[[], Sequence[ExecutionView]]
    groups: Callable[[], Sequence[GroupView]]


class Policy(Protocol):
    """A replaceable scheduler.

    It may also have `plan(history)` (`history.Plans`), which the driver calls when a burst ends, and `tick_s`, the
    seconds after which it is asked again though nothing happened.
    """

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """Return what to do now; empty when nothing is to be done until something happens."""
        ...
