"""A run that is recorded while a test looks on: groups of a whole run, one by one, when they are told to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from gyre_data.arrays import from_table
from gyre_data.schema import DeliveryState
from gyre_data.store import Run, RunWriter
from gyre_data.store import open as open_run

__all__ = ["Recording", "recording"]

TABLES = ("blobs", "executions", "nodes", "calls", "deliveries", "scores")


class Recording:
    """Records the groups of `whole` into a run of its own, when it is told to."""

    def __init__(self, whole: Run, path: Path) -> None:
        self.path, self._writer = path, RunWriter(path)
        self._num = 0
        self._rows = {name: from_table(name, whole.table(name)) for name in TABLES}
        self._groups: dict[str, list[str]] = {}
        for row in self._rows["executions"]:
            if row.group_id and row.execution_id not in self._groups.setdefault(row.group_id, []):
                self._groups[row.group_id].append(row.execution_id)
        self._writer.write(self._rows["blobs"])
        self.open_run = open_run(path)

    def add(self, group: str, *, but: int = 0) -> None:
        """A group, without the verdicts of its last `but` executions."""
        names = self._groups[group]
        unjudged = names[len(names) - but :]
        for table in TABLES[1:]:
            rows = [r for r in self._rows[table] if r.execution_id in names]
            if table == "scores":
                rows = [r for r in rows if r.execution_id not in unjudged]
            self._writer.write([dataclasses.replace(r, at=datetime.now(UTC)) if hasattr(r, "at") else r for r in rows])

    def judge(self, group: str, value: float | None = None) -> None:
        """The verdicts of all of its executions, or a new value for the first of them."""
        names = self._groups[group][: 1 if value is not None else None]
        rows = [r for r in self._rows["scores"] if r.execution_id in names]
        self._num += 1
        changes = {} if value is None else {"value": value}
        self._writer.write(
            [
                dataclasses.replace(r, score_id=f"{r.score_id}x{self._num}", at=datetime.now(UTC), **changes)
                for r in rows
            ]
        )

    def deliver(self, group: str, state: DeliveryState) -> None:
        """Another end of the last reply of its first execution."""
        name = self._groups[group][0]
        last = [r for r in self._rows["deliveries"] if r.execution_id == name][-1]
        self._writer.write([dataclasses.replace(last, state=state, at=datetime.now(UTC))])

    def close(self) -> None:
        self._writer.close()


@contextmanager
def recording(whole: Run, path: Path) -> Iterator[Recording]:
    made = Recording(whole, path)
    try:
        yield made
    finally:
        made.close()
