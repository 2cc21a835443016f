"""Each change of a cell's role as a ledger tells it: how long it took, and what that time was made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .actions import Action, CellFailed, Event, SwitchDone, ToRollout, ToTrain

__all__ = ["Switch", "switches"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """One that came to its end."""

    cell: str
    to: str
    """train or rollout."""
    started_s: float
    """When it was decided, by the ledger's clock."""
    seconds: float
    """Until the controller knew that the cell had arrived."""
    phases: tuple[tuple[str, float], ...]
    """Name and seconds, in order; what they lack of `seconds` the controller and the cell's earlier job took."""


def switches(entries: Iterable[tuple[float, Action | Event]]) -> list[Switch]:
    """Every switch in the order of their ends; one that a lost cell never ended is none."""
    begun: dict[str, tuple[str, float]] = {}
    found: list[Switch] = []
    for at_s, record in entries:
        if isinstance(record, ToTrain | ToRollout):
            begun[record.cell] = ("train" if isinstance(record, ToTrain) else "rollout", at_s)
        elif isinstance(record, CellFailed):
            begun.pop(record.cell, None)
        elif isinstance(record, SwitchDone) and record.cell in begun:
            to, started_s = begun.pop(record.cell)
            found.append(
                Switch(
                    cell=record.cell, to=to, started_s=started_s, seconds=at_s - started_s, phases=record.phases or ()
                )
            )  # fmt: skip
    return found
