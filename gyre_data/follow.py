"""Following a run while it is written: new rows as they become durable, some hundredths of a second later.

Nothing but the standard library is at hand for watching files on every system, so the folder is looked at: its newest
manifest and the lengths of the commit logs, a few `stat` calls each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from . import manifest as manifests
from .reader import READ_ORDER, Run

__all__ = ["Changes", "follow", "wait"]

_LOOK_S = 0.01
_TICK_NS = 100_000_000
"""A folder's time of change may be this coarse: younger than that, it is no proof that nothing changed since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Rows that came since the last time, by table; whatever a call names is there with it or was before."""

    tables: dict[str, pa.Table]
    manifest: int
    rewritten: bool
    """The run was compacted, purged, or lost executions: forget all rows from before, `tables` holds every row."""


def wait(run: Run, timeout_s: float | None = None) -> bool:
    """Block until the folder changed and take a new snapshot; False when nothing did in `timeout_s` seconds."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    before: tuple[int, ...] | None = None
    while True:
        now = _signature(run)
        if (now != before or time.time_ns() - now[0] < _TICK_NS) and run.refresh():
            return True
        before = now
        rest = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
        if rest <= 0:
            return False
        time.sleep(rest)


def follow(run: Run, *, idle_s: float | None = None) -> Iterator[Changes]:
    """Yield all rows that are there, and then those that come, each once.

    Ends when nothing came for `idle_s` seconds; without it, never.
    """
    seen: dict[tuple[str, str], int] = {}
    removed = run.manifest.removed
    while True:
        held = {(name, stem): table for name in READ_ORDER for stem, table in run.parts(name) if table.num_rows}
        rewritten = removed != run.manifest.removed or not seen.keys() <= held.keys()
        if rewritten:
            seen.clear()
            removed = run.manifest.removed
        fresh: dict[str, list[pa.Table]] = {}
        for (name, stem), table in held.items():
            if table.num_rows > (start := seen.get((name, stem), 0)):
                fresh.setdefault(name, []).append(table.slice(start))
            seen[name, stem] = table.num_rows
        if fresh or rewritten:
            tables = {name: run.shown(name, pa.concat_tables(parts)) for name, parts in fresh.items()}
            yield Changes(tables=tables, manifest=run.manifest_number, rewritten=rewritten)
        if not wait(run, idle_s):
            return


def _signature(run: Run) -> tuple[int, ...]:
    """Changes when a manifest is published or a commit is made."""
    found = [os.stat(run.path / manifests.FOLDER).st_mtime_ns]
    for name, stem in run.open_segments:
        try:
            found.append(os.stat(run.path / name / f"{stem}.commit").st_size)
        except FileNotFoundError:
            found.append(-1)
    return tuple(found)
