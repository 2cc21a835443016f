"""What the page shows of training beside a run: figures by step, waits, cells by time, what a step consumed.

Columns of figures are whole; nothing is thinned out. Only micro-steps that lie closer together than a screen can show
are told as one stretch.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_data import manifest as manifests
from gyre_data.cell_spans import CellsByTime, CellsLedger, RoleSpan
from gyre_data.errors import ConfigError, DataError, GyreError
from gyre_data.json_values import object_of
from gyre_data.lock import LOCK, is_locked
from gyre_data.reader import Run
from gyre_data.store import open as open_run
from gyre_data.training_folder import TrainingFolder, find_training, is_training

from .loopback import is_loopback

__all__ = ["Training", "open_training", "step_model"]

_LOG = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"
_DIGITS = 7
_STRETCHES = 500
"""Micro-steps of a cell are told as at most about so many stretches of work."""
_ASK_S = 2.0
_ANSWER_S = 1.0
_MOST_BYTES = 1 << 20


class Training:
    """A training folder, a scheduler's ledger where there is one, and the proxy that records the run."""

    def __init__(self, folder: str | Path, run: Path, *, cells: str | Path | None = None) -> None:
        self.folder = TrainingFolder(folder)
        self.run = run
        beside = [self.folder.path / place / LEDGER for place in (".", "scheduler", "..")]
        self._ledgers = [Path(cells)] if cells else beside
        self._cells: CellsLedger | None = CellsLedger(cells) if cells else None
        self._cells_told: dict[str, Any] | None = None
        self._columns: tuple[Any, dict[str, Any]] = (None, {})
        self._problem: str | None = None
        self._proxy: str | None = None
        self._asked_at = -math.inf
        self._read_cells()

    def refresh(self) -> bool:
        """Take what came since; True when anything did."""
        moved = [self.folder.refresh(), self._read_cells(), self._ask_proxy()]
        return any(moved)

    def model(self) -> dict[str, Any]:
        """What the page shows on its first screen: columns of figures, one value a step, and what goes on now."""
        folder, doing, here = self.folder, self.folder.doing, _known(self.run)
        if self._columns[0] is not folder.steps:
            self._columns = folder.steps, _columns(folder.steps)
        return {
            "path": str(folder.path),
            "policy": folder.info.get("policy_id"),
            "base": folder.info.get("base"),
            "running": folder.running,
            "doing": None if doing is None else {"text": doing.text, "waiting": doing.waiting, "since": doing.since},
            "total": None if doing is None else doing.total,
            "proxy": self._proxy,
            "columns": self._columns[1],
            "versions": [str(row.get("version", "")) for row in folder.steps],
            "evals": [_evaluation(row) for row in folder.evals],
            "consumed": {name: step for (data_run, name), step in folder.consumed_in.items() if data_run == here},
            "elsewhere": sorted({data_run for data_run, _ in folder.consumed_in if data_run != here}),
            "cells": self._cells_told,
            "problem": self._problem,
        }

    def step(self, step: int) -> dict[str, Any]:
        """See `step_model`."""
        return step_model(self.folder, self.run, step)

    def _read_cells(self) -> bool:
        if self._cells is None:  # a scheduler may begin later than the trainer
            path = next((path for path in self._ledgers if path.is_file()), None)
            self._cells = None if path is None else CellsLedger(path)
        if self._cells is None:
            return False
        try:
            moved, problem = self._cells.refresh(), None
        except DataError as error:
            moved, problem = False, str(error)
        changed, self._problem = problem != self._problem, problem
        if moved and (found := self._cells.cells()) is not None:
            self._cells_told = _cells(found)
        return moved or changed

    def _ask_proxy(self) -> bool:
        """What the proxy says it is doing; asked only while it records, and only on this machine."""
        now = time.monotonic()
        if now < self._asked_at + _ASK_S:
            return False
        self._asked_at, before = now, self._proxy
        self._proxy = _proxy_word(self.run)
        return self._proxy != before


def open_training(run: Run, folder: Path | None, *, cells: Path | None = None) -> tuple[Run, Training | None]:
    """The run to show and the training beside it: that of `folder`, or one that is found; None when there is none.

    `run` may be a trainer's folder itself: then the first run that it trained on and that is here is shown.
    """
    if folder is None and is_training(run.path):
        folder = run.path
        here = [Path(name) for name in TrainingFolder(folder).data_runs if manifests.numbers(Path(name))]
        run = open_run(here[0]) if here else run
    if folder is not None:
        return run, Training(folder, run.path, cells=cells)
    try:
        found = find_training(run.path)
        beside = None if found is None else Training(found, run.path, cells=cells)
    except (GyreError, OSError) as error:  # nobody asked for it: the run can be looked at without
        _LOG.warning("the training beside %s cannot be shown: %s", run.path, error)
        beside = None
    if beside is None and cells is not None:
        raise ConfigError(f"wanted training for the cells of {cells}, found none beside {run.path}; give --training")
    return run, beside


def step_model(folder: TrainingFolder, run: Path, step: int) -> dict[str, Any]:
    """One step: all its figures, and the executions that it consumed, a row each, in the order of the ledger."""
    row = next((one for one in folder.steps if one["step"] == step), {"step": step})
    here = _known(run)
    executions: dict[tuple[str, str], dict[str, Any]] = {}
    for one in folder.consumed(step):
        found = executions.setdefault(
            (one.data_run, one.execution_id),
            {
                "execution_id": one.execution_id, "run": one.data_run, "here": one.data_run == here,
                "group_id": one.group_id, "reward": _number(one.reward), "advantage": _number(one.advantage),
                "owned_tokens": 0, "trajectories": [],
            },
        )  # fmt: skip
        found["owned_tokens"] += one.owned_tokens
        found["trajectories"].append({"index": one.trajectory, "leaf": one.leaf_node, "tokens": one.owned_tokens})
    figures = {name: value for name, value in row.items() if not isinstance(value, dict | list)}
    plain = {name: _number(v) if isinstance(v, float) else v for name, v in figures.items()}
    return {"step": step, "figures": plain, "executions": list(executions.values())}


def _known(run: Path) -> str:
    """The run as a ledger names it."""
    return str(run.resolve()) if run.exists() else str(run)


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[float | int | None]]:
    names = dict.fromkeys(name for row in rows for name, value in row.items() if _is_number(value))
    return {name: [_number(row.get(name)) for row in rows] for name in names}


def _evaluation(row: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: row.get(name) for name in ("step", "version", "scored", "unscored")}
    by_task = row.get("by_task")
    tasks = by_task if isinstance(by_task, dict) else {}
    return {**told, "score": _number(row.get("score")), "by_task": {str(k): _number(v) for k, v in tasks.items()}}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | int | None:
    """A finite number with as many digits as a figure needs; anything else is unknown."""
    if not _is_number(value) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


def _cells(found: CellsByTime) -> dict[str, Any]:
    """Seconds count from the ledger's first line; spans are (cell, what, start, end)."""
    place = {cell: i for i, cell in enumerate(found.cells)}
    gap_s = (found.end_s - found.start_s) / _STRETCHES
    spans: list[RoleSpan] = []
    last: dict[str, int] = {}
    for span in sorted(found.spans, key=lambda one: one.start_s):
        at = last.get(span.cell)
        if span.what == "busy" and at is not None and span.start_s - spans[at].end_s <= gap_s:
            spans[at] = RoleSpan(cell=span.cell, what="busy", start_s=spans[at].start_s, end_s=span.end_s)
            continue
        if span.what == "busy":
            last[span.cell] = len(spans)
        spans.append(span)
    return {
        "start": found.start_s,
        "length": round(found.end_s - found.start_s, 2),
        "names": list(found.cells),
        "spans": [
            [place[s.cell], s.what, round(s.start_s - found.start_s, 2), round(s.end_s - found.start_s, 2)]
            for s in spans
        ],
        "steps": [[round(at - found.start_s, 2), version] for at, version in found.steps],
    }


def _proxy_word(run: Path) -> str | None:
    """One line by the status of the proxy that records `run`; None when there is none, or it asks for a key."""
    try:
        endpoint = (object_of((run / "run.json").read_bytes()).get("endpoints") or {}).get("proxy")
    except (OSError, AttributeError):
        return None
    if not isinstance(endpoint, str) or not is_locked(run / LOCK):
        return None
    try:
        at = urlsplit(endpoint)
        if not is_loopback(at.hostname or ""):
            return None  # a folder may come from anybody, and must not send us anywhere
        connection = HTTPConnection(str(at.hostname), at.port or 80, timeout=_ANSWER_S)
        connection.request("GET", "/api/status")
        answer = connection.getresponse()
        told = object_of(answer.read(_MOST_BYTES)) if answer.status == HTTPStatus.OK else {}
        connection.close()
        return _said(told) if told else None
    except (OSError, HTTPException, ValueError, TypeError, AttributeError):
        return None


def _said(told: Mapping[str, Any]) -> str:
    engines = list(told.get("engines") or [])
    up = sum(one.get("state") == "up" for one in engines)
    parts = [f"proxy: {int(told.get('in_flight') or 0)} calls wait for {up} of {len(engines)} engines"]
    states = Counter({str(k): int(v) for k, v in (told.get("executions") or {}).items()})
    parts += [f"{n} executions {state}" for state, n in sorted(states.items()) if n and state != "ended"]
    parts += [f"{one.get('url')} is {one.get('state')}: {one.get('error')}" for one in engines if one.get("error")]
    if told.get("draining"):
        parts.append("draining")
    return ", ".join(parts)
