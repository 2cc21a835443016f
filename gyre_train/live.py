"""Runs that are still being recorded: which of their groups are complete, and waiting until more of them are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from gyre_data.arrays import from_table
from gyre_data.execution import ExecutionInfo, executions
from gyre_data.schema import EndReason
from gyre_data.scores import scores_by_execution
from gyre_data.types import GroupEvent

if TYPE_CHECKING:
    from gyre_data.store import Run

__all__ = ["Rest", "settled_at", "wait_for_news"]

_LOOK_S = 0.2
_NEWS = ("executions", "scores", "groups")
"""Tables that settle groups. Calls come all the time and settle nothing."""
_NOT_JUDGED = (EndReason.INFRA_FAULT, EndReason.CANCELLED)


def settled_at(
    run: Run, evaluators: Collection[str] | None, patience_s: float = 0.0, now: datetime | None = None
) -> dict[str, datetime]:
    """When the group of each execution was complete, by execution id; those of other groups are not there.

    A group is complete when it has the members it is meant to have, all of them ended, and each was judged by every one
    of `evaluators`, whatever came of it (by any one, when none is named; None: no verdict is needed). Members that did
    not end by themselves (infra_fault, cancelled) are not counted: nobody judges them, their launcher replaces them or
    makes the group smaller. Where no launcher does, a group that lost members is taken as it stands `patience_s`
    seconds after the last of it ended or was judged, so that nothing waits for ever (0: it is waited for).
    """
    now = now or datetime.now(UTC)
    judged: dict[str, dict[str, datetime]] = {}
    for name, rows in scores_by_execution(run).items() if evaluators is not None else ():
        judged[name] = {row.evaluator: row.at for row in rows}
    sizes: dict[str, int | None] = {row.group_id: row.size for row in _latest_groups(run)}
    members: dict[tuple[str, str], list[ExecutionInfo]] = {}
    for info in executions(run).values():
        key = ("group", info.group_id) if info.group_id is not None else ("execution", info.execution_id)
        members.setdefault(key, []).append(info)
    found: dict[str, datetime] = {}
    for (kind, name), infos in members.items():
        counted = [info for info in infos if info.end_reason not in _NOT_JUDGED]
        times = [_settled(info, evaluators, judged.get(info.execution_id, {})) for info in counted]
        if not times or None in times:
            continue
        at = max(at for at in times if at)
        if kind == "group" and len(counted) < (sizes.get(name) or 0):
            at = max(at, *(info.ended_at for info in infos if info.ended_at)) + timedelta(seconds=patience_s)
            if not patience_s or len(counted) == len(infos) or at > now:
                continue
        found |= {info.execution_id: at for info in infos}
    return found


def _settled(
    info: ExecutionInfo, evaluators: Collection[str] | None, verdicts: Mapping[str, datetime]
) -> datetime | None:
    if info.ended_at is None:
        return None
    if evaluators is None:
        return info.ended_at
    wanted = {name.partition("@")[0] for name in evaluators}
    if not verdicts or not wanted <= verdicts.keys():
        return None
    return max(info.ended_at, *(at for name, at in verdicts.items() if name in wanted or not wanted))


def _latest_groups(run: Run) -> list[GroupEvent]:
    rows: list[GroupEvent] = from_table("groups", run.table("groups"))
    return sorted(rows, key=lambda row: row.at)


def wait_for_news(runs: Sequence[Run], seconds: float) -> bool:
    """Take new snapshots until an execution or a verdict came to one of `runs`; False when none did in `seconds`."""
    before = [_num_rows(run) for run in runs]
    deadline = time.monotonic() + seconds
    while True:
        for run in runs:
            run.refresh()
        if [_num_rows(run) for run in runs] != before:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)


def _num_rows(run: Run) -> tuple[int, ...]:
    return tuple(run.table(name).num_rows for name in _NEWS)


class Rest:
    """Keeps looking to a fifth of the time: a look at a run costs by its size, and news of it comes at any rate."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._until = clock, clock()

    @contextmanager
    def after(self) -> Iterator[None]:
        """Measure one look: four times as long is to pass before the next."""
        began = self._clock()
        yield
        now = self._clock()
        self._until = now + 4 * (now - began)

    def left_s(self) -> float:
        """Seconds until the next look, 0 when it may begin."""
        return max(0.0, self._until - self._clock())
