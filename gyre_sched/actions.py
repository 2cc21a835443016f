"""What a policy may ask for and what the world tells; both are plain records that a ledger line holds.

Every action on a cell names the epoch it was decided for, and every completion the epoch it was started in: what is
stale is refused or dropped, never an error, so duplicates and late messages change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

from .api import Key, Plan, Query

__all__ = [
    "Action",
    "AssignMicrostep",
    "CellFailed",
    "CellRecovered",
    "CloseBurst",
    "Dispatch",
    "Drained",
    "Event",
    "ExecutionEnded",
    "GroupDropped",
    "GroupReady",
    "MicrostepDone",
    "OpenBurst",
    "Planned",
    "QueriesOffered",
    "ReturnPartial",
    "StepApplied",
    "SwitchDone",
    "ToRollout",
    "ToTrain",
    "WeightsPublished",
    "WeightsPulled",
    "from_json",
    "to_json",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToTrain:
    """Drain a serving cell and make it a training replica."""

    cell: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ToRollout:
    """Make an idle training cell serve; what it holds is handed to the core first."""

    cell: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Start all executions of these queries on the weights of `version`."""

    queries: tuple[str, ...]
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenBurst:
    """Begin a burst of `steps` steps."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseBurst:
    """End the burst, at a step boundary or when its step can never fill."""

    done: int
    """Steps done in it: the burst meant, so that a late copy closes no other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignMicrostep:
    """Let an idle training cell run a pending micro-step."""

    cell: str
    epoch: int
    key: Key


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnPartial:
    """Stop an execution now; its workspace is evaluated as it is."""

    query: str
    member: int


Action = ToTrain | ToRollout | Dispatch | OpenBurst | CloseBurst | AssignMicrostep | ReturnPartial


@dataclass(frozen=True, kw_only=True, slots=True)
class QueriesOffered:
    """The queue shows more queries."""

    queries: tuple[Query, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionEnded:
    """The harness can make no further model call; the evaluation may still run."""

    query: str
    member: int
    status: str = "finished"
    """finished | timed_out | failed | partial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReady:
    """All executions of a group ended and are judged."""

    query: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDropped:
    """A group will never be trained on."""

    query: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drained:
    """No call is in flight on a leaving cell."""

    cell: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchDone:
    """A cell reached its new role, with weights of `version`."""

    cell: str
    epoch: int
    version: int
    phases: tuple[tuple[str, float], ...] | None = None
    """What the switch was made of, in order: name and seconds, of those who know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsPulled:
    """A training cell holds the weights of `version`."""

    cell: str
    epoch: int
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrostepDone:
    """A cell has accumulated a micro-step's gradient; it holds it, nothing is reduced yet."""

    cell: str
    epoch: int
    key: Key


@dataclass(frozen=True, kw_only=True, slots=True)
class StepApplied:
    """The optimiser has made `version`; `generation` is that of the attempt."""

    version: int
    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsPublished:
    """Serving cells hold `version`."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CellFailed:
    """A cell is lost with all that it holds; serving calls are retried elsewhere by the proxy."""

    cell: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CellRecovered:
    """A lost cell is there again with current weights: the core in training while a burst is open, else serving."""

    cell: str
    epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A planner's choice, from now on."""

    plan: Plan


Event = (
    QueriesOffered
    | ExecutionEnded
    | GroupReady
    | GroupDropped
    | Drained
    | SwitchDone
    | WeightsPulled
    | MicrostepDone
    | StepApplied
    | WeightsPublished
    | CellFailed
    | CellRecovered
    | Planned
)


def to_json(record: Action | Event) -> dict[str, Any]:
    """A record as plain values, with its kind; records that it holds are rows of their values.

    What is None is left out: fields that came later are, so that lines of before mean and are the same bytes.
    """
    told = ((one.name, getattr(record, one.name)) for one in fields(record))
    return {"kind": type(record).__name__} | {name: _plain(value) for name, value in told if value is not None}


def from_json(value: dict[str, Any]) -> Action | Event:
    """The record that `to_json` told; ValueError for a kind that this release does not know."""
    rest = dict(value)
    kind = _KINDS.get(str(rest.pop("kind", None)))
    if kind is None:
        raise ValueError(f"wanted a known kind, got {value.get('kind')!r}; a newer release wrote it")
    made = _HOLDS.get(kind, _tuples)
    record: Action | Event = kind(**{name: made(item) for name, item in rest.items()})
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return [getattr(value, one.name) for one in fields(value)] if is_dataclass(value) else value


def _row(kind: type[Any], values: list[Any]) -> Any:
    return kind(**{one.name: value for one, value in zip(fields(kind), values, strict=True)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (*Action.__args__, *Event.__args__)}
_HOLDS: dict[type[Any], Callable[[Any], Any]] = {
    QueriesOffered: lambda rows: tuple(_row(Query, row) for row in rows),
    Planned: partial(_row, Plan),
}
"""Kinds whose only field holds other records."""
