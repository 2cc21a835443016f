"""Where cells run: what the controller asks of a machine, or of a cluster, that holds their processes.

A cell is a slot with at most one process, which outlives the controller. Whoever starts one says what for (`Program`),
and a controller that comes back finds by that what it or its predecessor had started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Processes", "Program", "Slot", "SlotTakenError"]


class SlotTakenError(OSError):
    """Another process than the wanted one runs in a cell; it must be ended first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """What a cell is to run. `{port}` and `{host}` in the command are filled in by the place that starts it."""

    kind: str
    """rollout or train."""
    epoch: int
    """Of the cell when it was wanted; two programs of one kind and epoch are the same one."""
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """What was last started in a cell, and whether it runs."""

    kind: str
    epoch: int
    running: bool
    address: str
    """host:port as others reach it."""
    pid: int
    """On its machine."""


class Processes(Protocol):
    """A place for cells. Every call raises OSError when it is out of reach.

    Calls come from several threads; those that change a cell, one at a time.
    """

    def slot(self, cell: str) -> Slot | None:
        """What is there; None when nothing was ever started, or it is gone with its machine."""
        ...

    def start(self, cell: str, program: Program) -> Slot:
        """Start it and return at once; nothing when it runs already. SlotTakenError when another one runs."""
        ...

    def end(self, cell: str, *, grace_s: float) -> bool:
        """End it with all its children: asked first, killed after `grace_s`. Whether it went by itself."""
        ...

    def release(self, cell: str) -> None:
        """End it now and give its place back: the run is over."""
        ...
