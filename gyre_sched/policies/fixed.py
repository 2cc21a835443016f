"""The two baselines: a pool that flips as a whole, and pools that never change."""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sched.actions import Action, OpenBurst, ToTrain
from gyre_sched.api import Cell, Role, Snapshot
from gyre_sched.rules import burst_is_over, claim, close_and_return, dispatch, leave_in_order, rescue

from .settings import checked

__all__ = ["Async", "Colocate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Colocate:
    """The whole pool flips: it rolls out until all executions ended, then trains `burst` steps.

    `standalone` cells at the end of the order always serve; with `streaming` the others flip as soon as those cover
    what is unfinished, and steps begin before they are full.
    """

    burst: int = 4
    depth: float = 4.0
    """Groups outstanding after a dispatch, in batches."""
    standalone: int = 0
    streaming: bool = False

    def __post_init__(self) -> None:
        checked(self, burst=1, depth=1, standalone=0)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """Close, dispatch, flip when the pool may, claim."""
        outstanding = round(self.depth * snapshot.params.batch_groups)
        actions = (
            close_and_return(snapshot, outstanding, keep_core=False)
            or rescue(snapshot)
            or dispatch(snapshot, outstanding)
        )
        return actions or [*self._flip(snapshot, outstanding), *claim(snapshot, streaming=self.streaming)]

    def _flip(self, snapshot: Snapshot, outstanding: int) -> list[Action]:
        cells = snapshot.cells
        staying = cells[len(cells) - self.standalone :] if self.standalone else ()
        room = sum(cell.capacity for cell in staying if cell.role is Role.ROLLOUT) if self.streaming else 0
        if snapshot.unfinished > room:
            return []
        return leave_in_order(
            snapshot, burst=self.burst, outstanding=outstanding, movable=lambda cell: cell not in staying
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Async:
    """Fixed pools: the last `rollout_cells` in the order serve for ever, the others train, one step after another."""

    rollout_cells: int = 4
    depth: float = 2.5
    streaming: bool = False

    def __post_init__(self) -> None:
        checked(self, rollout_cells=1, depth=1)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """Close and dispatch after each step, keep each cell in its pool, claim."""
        cells = snapshot.cells
        outstanding = round(self.depth * snapshot.params.batch_groups)
        pool = cells[: max(1, len(cells) - self.rollout_cells)]
        actions = rescue(snapshot) or dispatch(snapshot, outstanding)
        return actions or [
            *self._open_or_close(snapshot, pool, outstanding),
            *self._to_pool(snapshot, pool),
            *claim(snapshot, streaming=self.streaming),
        ]

    def _open_or_close(self, snapshot: Snapshot, pool: tuple[Cell, ...], outstanding: int) -> list[Action]:
        if snapshot.burst is not None:
            return close_and_return(snapshot, outstanding) if burst_is_over(snapshot) else []
        least = outstanding if snapshot.cells.serving else snapshot.params.batch_groups
        dispatched = snapshot.outstanding >= least or not snapshot.upcoming
        published = snapshot.rollout_version == snapshot.version
        if pool[0].role is Role.TRAIN and snapshot.ready and dispatched and published:
            return [OpenBurst(steps=1)]
        return []

    def _to_pool(self, snapshot: Snapshot, pool: tuple[Cell, ...]) -> list[Action]:
        spare = len(snapshot.cells.serving) - snapshot.params.min_rollout
        misplaced = [cell for cell in pool if cell.role is Role.ROLLOUT]
        return [ToTrain(cell=cell.id, epoch=cell.epoch) for cell in misplaced[: max(0, spare)]]
