"""The truth that the simulator and the controller share: actions and events change it, snapshots show it.

State is a fold over records: the same records give the same state, so a controller that was killed comes back from its
ledger. A stale action or event changes nothing and says so; an action that would lose work is refused as unsafe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from .actions import (
    Action,
    AssignMicrostep,
    CellFailed,
    CellRecovered,
    CloseBurst,
    Dispatch,
    Drained,
    Event,
    ExecutionEnded,
    GroupDropped,
    GroupReady,
    MicrostepDone,
    OpenBurst,
    Planned,
    QueriesOffered,
    ReturnPartial,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
    WeightsPublished,
    WeightsPulled,
)
from .api import Burst, Cell, Cells, Costs, ExecutionView, GroupView, Params, Query, Role, Snapshot
from .groups import Groups
from .step import OpenStep

__all__ = ["Refusal", "State"]

_COMING = {Role.DRAINING: Role.TRAIN, Role.TO_TRAIN: Role.TRAIN, Role.TO_ROLLOUT: Role.ROLLOUT}


class Refusal(StrEnum):
    """Why a record changed nothing."""

    STALE = "stale"
    """It was decided or started for what is no longer so; drop it."""
    UNSAFE = "unsafe"
    """It would break a rule that keeps runs whole: the policy is at fault."""


class _Shown(dict[str, Any]):
    """Parts of a snapshot, built when asked for and kept until they change."""

    def __init__(self, **build: Callable[[], Any]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, name: str) -> Any:
        self[name] = built = self._build[name]()
        return built


class State:
    """Cells, groups, the open step and burst. `apply` is the only way to change it."""

    def __init__(self, params: Params, cells: Sequence[Cell]) -> None:
        if [cell.core for cell in sorted(cells, key=lambda cell: cell.position)] != [True] + [False] * (len(cells) - 1):
            raise ValueError("wanted exactly one core cell, first in the fixed order; correct the list of cells")
        self.params = params
        self.cells = {cell.id: cell for cell in sorted(cells, key=lambda cell: cell.position)}
        self.core = next(iter(self.cells))
        self.groups = Groups(params.group_size)
        self.upcoming: dict[str, Query] = {}
        self.step: OpenStep | None = None
        self.burst: Burst | None = None
        self.version = self.rollout_version = self.seq = 0
        self.costs = Costs()
        self._shown = _Shown(
            cells=lambda: Cells(self.cells.values()),
            ready=lambda: tuple(self.groups.ready),
            step=lambda: self.step.view() if self.step else None,
            upcoming=lambda: tuple(self.upcoming.values()),
            ledger=self.groups.view,
        )
        self._apply: dict[type, Callable[[Any, float], Refusal | None]] = {
            ToTrain: self._to_train,
            ToRollout: self._to_rollout,
            Dispatch: self._dispatch,
            OpenBurst: self._open_burst,
            CloseBurst: self._close_burst,
            AssignMicrostep: self._assign,
            ReturnPartial: lambda record, now_s: self._known(self.groups.stop(record.query, record.member)),
            QueriesOffered: self._offered,
            ExecutionEnded: self._ended,
            GroupReady: self._group_ready,
            GroupDropped: self._group_dropped,
            Drained: self._drained,
            SwitchDone: self._switch_done,
            WeightsPulled: self._pulled,
            MicrostepDone: self._microstep_done,
            StepApplied: self._step_applied,
            WeightsPublished: self._published,
            CellFailed: self._failed,
            CellRecovered: self._recovered,
            Planned: self._planned,
        }

    def apply(self, record: Action | Event, now_s: float) -> Refusal | None:
        """Change the state, or say why nothing changed."""
        refusal = self._apply[type(record)](record, now_s)
        if refusal is None:
            self.seq += 1
        return refusal

    def snapshot(self, now_s: float) -> Snapshot:
        """What policies see; parts that did not change since the last one are the same objects."""
        groups, shown = self.groups, self._shown
        return Snapshot(
            seq=self.seq,
            now_s=now_s,
            version=self.version,
            rollout_version=self.rollout_version,
            params=self.params,
            cells=shown["cells"],
            unfinished=groups.unfinished,
            outstanding=len(groups.outstanding),
            ready=shown["ready"],
            step=shown["step"],
            burst=self.burst,
            upcoming=shown["upcoming"],
            costs=self.costs,
            ledger=shown["ledger"],
            executions=partial(self._executions, self.seq),
            groups=partial(self._groups, self.seq, now_s),
        )

    @property
    def fleet(self) -> Cells:
        """The cells as policies see them."""
        cells: Cells = self._shown["cells"]
        return cells

    def _executions(self, seq: int) -> Sequence[ExecutionView]:
        self._fresh(seq)
        return self.groups.execution_views()

    def _groups(self, seq: int, now_s: float) -> Sequence[GroupView]:
        self._fresh(seq)
        return self.groups.group_views(now_s)

    def _fresh(self, seq: int) -> None:
        if self.seq != seq:
            raise RuntimeError("wanted executions and groups inside decide(), came later; read them there")

    def _changed(self, *names: str) -> None:
        for name in names:
            self._shown.pop(name, None)

    def _cell(self, cell: Cell, **changes: Any) -> None:
        self.cells[cell.id] = replace(cell, **changes)
        self._shown.pop("cells", None)

    @staticmethod
    def _known(right: bool) -> Refusal | None:
        return None if right else Refusal.STALE

    # Actions.

    def _to_train(self, record: ToTrain, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is not Role.ROLLOUT:
            return Refusal.STALE
        if self.groups.unfinished and len(self.fleet.serving) <= self.params.min_rollout:
            return Refusal.UNSAFE
        self._cell(cell, role=Role.DRAINING, epoch=cell.epoch + 1)
        return None

    def _to_rollout(self, record: ToRollout, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is not Role.TRAIN or cell.running is not None:
            return Refusal.STALE
        if cell.core and (self.burst is not None or self.rollout_version != self.version):
            return Refusal.UNSAFE
        if cell.held and self.step is not None:
            core = self.cells[self.core]
            if core.role is not Role.TRAIN:
                return Refusal.UNSAFE
            moved = self.step.hand_over(cell.id, core.id)
            self._cell(core, held=core.held + moved)
        self._cell(cell, role=Role.TO_ROLLOUT, epoch=cell.epoch + 1, held=0)
        return None

    def _dispatch(self, record: Dispatch, now_s: float) -> Refusal | None:
        if record.version != self.rollout_version or any(query not in self.upcoming for query in record.queries):
            return Refusal.STALE
        doubled = len(set(record.queries)) < len(record.queries)
        if not record.queries or doubled or len(self.fleet.serving) < self.params.min_rollout:
            return Refusal.UNSAFE
        for query in record.queries:
            predicted_s = self.upcoming.pop(query).predicted_s
            self.groups.dispatch(query, version=record.version, now_s=now_s, predicted_s=predicted_s)
        self._changed("upcoming", "ledger")
        return None

    def _open_burst(self, record: OpenBurst, now_s: float) -> Refusal | None:
        if self.burst is not None:
            return Refusal.STALE
        if record.steps < 1:
            return Refusal.UNSAFE
        self.burst = Burst(planned=record.steps, done=0)
        self._open_step()
        return None

    def _close_burst(self, record: CloseBurst, now_s: float) -> Refusal | None:
        if self.burst is None or self.burst.done != record.done:
            return Refusal.STALE
        if self.step is not None and self.step.groups:
            if self.step.closing or self.step.running or len(self.groups.outstanding) >= self.params.batch_groups:
                return Refusal.UNSAFE
            self.groups.ready[:0] = self.step.groups
            for cell in list(self.cells.values()):
                if cell.held:
                    self._cell(cell, held=0)
        self.step, self.burst = None, None
        self.groups.bursts += 1
        self._changed("step", "ready", "ledger")
        return None

    def _assign(self, record: AssignMicrostep, now_s: float) -> Refusal | None:
        cell, step = self.cells[record.cell], self.step
        if cell.epoch != record.epoch or cell.role is not Role.TRAIN or cell.running is not None or step is None:
            return Refusal.STALE
        if record.key not in step.pending or cell.version != self.version:
            return Refusal.STALE
        step.assign(record.key, cell.id)
        self._cell(cell, running=record.key)
        self._changed("step")
        return None

    # Events.

    def _offered(self, record: QueriesOffered, now_s: float) -> Refusal | None:
        self.upcoming.update((query.id, query) for query in record.queries)
        self._changed("upcoming")
        return None

    def _ended(self, record: ExecutionEnded, now_s: float) -> Refusal | None:
        return self._known(self.groups.ended(record.query, record.member))

    def _group_ready(self, record: GroupReady, now_s: float) -> Refusal | None:
        if not self.groups.arrived(record.query):
            return Refusal.STALE
        self._changed("ready")
        self._fill()
        return None

    def _group_dropped(self, record: GroupDropped, now_s: float) -> Refusal | None:
        if not self.groups.drop(record.query):
            return Refusal.STALE
        self._changed("ready", "ledger")
        return None

    def _drained(self, record: Drained, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is not Role.DRAINING:
            return Refusal.STALE
        self._cell(cell, role=Role.TO_TRAIN)
        return None

    def _switch_done(self, record: SwitchDone, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role not in _COMING:
            return Refusal.STALE
        self._cell(cell, role=_COMING[cell.role], version=record.version)
        return None

    def _pulled(self, record: WeightsPulled, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is not Role.TRAIN or record.version <= cell.version:
            return Refusal.STALE
        self._cell(cell, version=record.version)
        return None

    def _microstep_done(self, record: MicrostepDone, now_s: float) -> Refusal | None:
        cell, step = self.cells[record.cell], self.step
        if cell.epoch != record.epoch or cell.running != record.key or step is None:
            return Refusal.STALE
        step.done(record.key)
        self._cell(cell, running=None, held=cell.held + 1)
        if len(step.groups) == self.params.batch_groups and not step.pending and not step.running:
            self._close_step(step)
        self._changed("step")
        return None

    def _step_applied(self, record: StepApplied, now_s: float) -> Refusal | None:
        step, burst = self.step, self.burst
        if step is None or burst is None or not step.closing:
            return Refusal.STALE
        if record.generation != step.generation or record.version != self.version + 1:
            return Refusal.STALE
        self.groups.consume(step.groups, self.version)
        self.version = record.version
        self.burst = Burst(planned=burst.planned, done=burst.done + 1)
        self._cell(self.cells[self.core], version=self.version)
        self._changed("ledger")
        self._open_step()
        return None

    def _published(self, record: WeightsPublished, now_s: float) -> Refusal | None:
        if not self.rollout_version < record.version <= self.version:
            return Refusal.STALE
        self.rollout_version = record.version
        for cell in list(self.cells.values()):
            if cell.role is Role.ROLLOUT:
                self._cell(cell, version=record.version)
        return None

    def _failed(self, record: CellFailed, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is Role.DOWN:
            return Refusal.STALE
        self._cell(cell, role=Role.DOWN, epoch=cell.epoch + 1, running=None, held=0)
        if self.step is not None and cell.core:
            self.step.restart()
            for other in list(self.cells.values()):
                if other.role is Role.TRAIN:  # fences off what they ran for the void attempt
                    self._cell(other, epoch=other.epoch + 1, running=None, held=0)
        elif self.step is not None and not self.step.closing:
            self.step.lost(cell.id)
        self._changed("step")
        return None

    def _recovered(self, record: CellRecovered, now_s: float) -> Refusal | None:
        cell = self.cells[record.cell]
        if cell.epoch != record.epoch or cell.role is not Role.DOWN:
            return Refusal.STALE
        role = Role.TRAIN if cell.core and self.burst is not None else Role.ROLLOUT
        self._cell(cell, role=role, version=self.version if role is Role.TRAIN else self.rollout_version)
        return None

    def _planned(self, record: Planned, now_s: float) -> Refusal | None:
        self.groups.plan = record.plan
        self._changed("ledger")
        return None

    # The open step.

    def _open_step(self) -> None:
        burst = self.burst
        more = burst is not None and burst.done < burst.planned
        self.step = OpenStep(self.version, self.params.microsteps_per_group) if more else None
        self._changed("step")
        self._fill()

    def _fill(self) -> None:
        """Ready groups enter the open step in order of arrival, up to exactly B."""
        step = self.step
        if step is None or step.closing or not self.groups.ready:
            return
        room = self.params.batch_groups - len(step.groups)
        if room:
            step.take(self.groups.ready[:room])
            del self.groups.ready[:room]
            self._changed("step", "ready")

    def _close_step(self, step: OpenStep) -> None:
        step.close()
        for cell in list(self.cells.values()):
            if cell.held:
                self._cell(cell, held=0)
