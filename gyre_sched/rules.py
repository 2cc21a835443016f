"""The rules that policies are made of; each is a pure function of the snapshot (docs/scheduler.md tells why)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .actions import Action, AssignMicrostep, CloseBurst, Dispatch, OpenBurst, ToRollout, ToTrain
from .api import Cell, Query, Role, Snapshot

__all__ = [
    "Choose",
    "burst_is_over",
    "claim",
    "close_and_return",
    "dispatch",
    "in_arrival_order",
    "leave_in_order",
    "rescue",
    "return_when_flooded",
]

Choose = Callable[[Snapshot, int], Sequence[Query]]
"""Which of the upcoming queries to dispatch next, that many at most."""


def in_arrival_order(snapshot: Snapshot, count: int) -> Sequence[Query]:
    """The queue's own order."""
    return snapshot.upcoming[:count]


def dispatch(snapshot: Snapshot, outstanding: int, choose: Choose = in_arrival_order) -> list[Action]:
    """Fill up to `outstanding` groups, once cells serve the newest weights.

    While a burst is open only what its next step lacks is dispatched: a depth below one batch could never fill it.
    """
    batch = snapshot.params.batch_groups
    wanted = batch if snapshot.burst is not None else max(outstanding, batch)
    count = wanted - snapshot.outstanding
    if count <= 0 or not snapshot.upcoming or snapshot.rollout_version != snapshot.version:
        return []
    if len(snapshot.cells.serving) < snapshot.params.min_rollout:
        return []
    queries = tuple(query.id for query in choose(snapshot, count))
    return [Dispatch(queries=queries, version=snapshot.rollout_version)]


def claim(snapshot: Snapshot, *, streaming: bool = True) -> list[Action]:
    """Idle training cells with current weights claim micro-steps; without streaming, of a full step only."""
    step = snapshot.step
    if step is None or not step.pending or step.closing:
        return []
    if not streaming and step.groups < snapshot.params.batch_groups:
        return []
    able = [cell for cell in snapshot.cells.idle if cell.version == snapshot.version]
    return [
        AssignMicrostep(cell=cell.id, epoch=cell.epoch, key=key) for cell, key in zip(able, step.pending, strict=False)
    ]


def leave_in_order(
    snapshot: Snapshot, *, burst: int, outstanding: int, theta: float = 1.0, movable: Callable[[Cell], bool]
) -> list[Action]:
    """Cells leave rollout, core first, while the serving cells that stay cover the unfinished executions.

    theta scales the capacity that is counted on. The core opens the burst, and only with a ready group at hand.
    """
    cells, unfinished = snapshot.cells, snapshot.unfinished
    core = cells.core
    if core.role not in (Role.ROLLOUT, Role.TRAIN, Role.DRAINING, Role.TO_TRAIN):
        return []
    if snapshot.burst is None and (not snapshot.ready or snapshot.rollout_version != snapshot.version):
        return []
    if snapshot.burst is None and core.role is not Role.ROLLOUT:
        dispatched = snapshot.outstanding >= outstanding or not snapshot.upcoming
        return [OpenBurst(steps=burst)] if dispatched and unfinished <= theta * cells.capacity else []
    actions: list[Action] = []
    capacity, serving = cells.capacity, len(cells.serving)
    for cell in cells.serving:
        if not movable(cell):
            continue
        if unfinished and (unfinished > theta * (capacity - cell.capacity) or serving <= snapshot.params.min_rollout):
            break
        capacity, serving = capacity - cell.capacity, serving - 1
        if cell.core and snapshot.burst is None:
            actions.append(OpenBurst(steps=burst))
        actions.append(ToTrain(cell=cell.id, epoch=cell.epoch))
    return actions


def burst_is_over(snapshot: Snapshot) -> bool:
    """All its steps are done, or the next can never fill without a dispatch that only a closed burst allows."""
    burst, step = snapshot.burst, snapshot.step
    if burst is None:
        return False
    starved = snapshot.outstanding < snapshot.params.batch_groups and (
        step is None or not step.groups or (not step.running and not snapshot.cells.serving and not step.closing)
    )
    return burst.done >= burst.planned or (starved and bool(snapshot.upcoming))


def close_and_return(snapshot: Snapshot, outstanding: int, *, keep_core: bool = True) -> list[Action]:
    """At the end of a burst: close it, and bring the training cells back in reverse order.

    The core stays when the others will cover what is unfinished after the dispatch that follows: it would leave again
    at once.
    """
    if burst_is_over(snapshot):
        assert snapshot.burst is not None
        return [CloseBurst(done=snapshot.burst.done)]
    if snapshot.burst is not None or snapshot.rollout_version != snapshot.version:
        return []
    cells = snapshot.cells
    lack = max(0, outstanding - snapshot.outstanding) if snapshot.upcoming else 0
    then = snapshot.unfinished + lack * snapshot.params.group_size
    others = sum(cell.capacity for cell in cells if not cell.core and cell.role is not Role.DOWN)
    stays = keep_core and bool(snapshot.ready) and then <= others
    return [ToRollout(cell=cell.id, epoch=cell.epoch) for cell in reversed(cells.idle) if not (cell.core and stays)]


def return_when_flooded(snapshot: Snapshot, *, theta: float = 1.0, movable: Callable[[Cell], bool]) -> list[Action]:
    """Inside a burst an idle satellite returns when the unfinished executions outgrow the serving cells."""
    cells = snapshot.cells
    if snapshot.burst is None or snapshot.unfinished <= max(1.0, theta) * cells.capacity_soon:
        return []
    if cells.core.role is not Role.TRAIN:
        return []
    actions: list[Action] = []
    capacity = cells.capacity_soon
    for cell in reversed(cells.idle):
        if snapshot.unfinished <= max(1.0, theta) * capacity:
            break
        if movable(cell) and not cell.core:
            actions.append(ToRollout(cell=cell.id, epoch=cell.epoch))
            capacity += cell.capacity
    return actions


def rescue(snapshot: Snapshot) -> list[Action]:
    """When nothing serves and something must - executions, or a step that lacks groups - an idle satellite goes.

    For the groups only where a dispatch can follow: under newer weights than those that serve the burst ends first.
    """
    cells = snapshot.cells
    lacking = snapshot.outstanding < snapshot.params.batch_groups and bool(snapshot.upcoming)
    starved = lacking and snapshot.rollout_version == snapshot.version
    if not (snapshot.unfinished or starved) or cells.serving or cells.returning:
        return []
    core_trains = cells.core.role is Role.TRAIN
    for cell in reversed(cells.idle):
        if not cell.core and (core_trains or not cell.held):
            return [ToRollout(cell=cell.id, epoch=cell.epoch)]
    return []
