"""Runs that are still being recorded: which of their groups are complete, and waiting until more of them are."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from gyre_data.arrays import from_table
from gyre_data.execution import ExecutionInfo, executions
from gyre_data.schema import EndReason
from gyre_data.scores import scores_by_execution
from gyre_data.types import GroupEvent

if TYPE_CHECKING:
    from gyre_data.store import Run

__all__ = ["settled_at", "wait_for_news"]

_LOOK_S = 0.2
_NEWS = ("executions", "scores", "groups")
"""Tables that settle groups. Calls come all the time and settle nothing."""
_NOT_JUDGED = (EndReason.INFRA_FAULT, EndReason.CANCELLED)


def settled_at(run: Run, evaluators: Collection[str] | None) -> dict[str, datetime]:
    """When the group of each execution was complete, by execution id; those of other groups are not there.

    A group is complete when it has the members it is meant to have, all of them ended, and each was judged by every one
    of `evaluators`, whatever came of it (by any one, when none is named; None: no verdict is needed). Members that did
    not end by themselves (infra_fault, cancelled) are not counted: nobody judges them, their launcher replaces them.
    """
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
        if kind == "group" and len(counted) < (sizes.get(name) or 0):
            continue
        times = [_settled(info, evaluators, judged.get(info.execution_id, {})) for info in counted]
        if times and None not in times:
            found |= {info.execution_id: max(at for at in times if at) for info in infos}
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
