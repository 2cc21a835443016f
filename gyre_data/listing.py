"""`gyre ls`: the executions of a run, or the runs of a folder, one record each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from .errors import DataError
from .execution import ExecutionInfo, executions
from .frame import Records
from .hosted import hosted_by_execution
from .lean import Lean
from .lock import is_locked
from .reader import Run
from .schema import EndReason, ScoreStatus
from .scores import scores_by_execution
from .store import run_folders

__all__ = ["ExecutionState", "ExecutionSummary", "RunSummary", "list_executions", "list_runs"]

_COLUMNS = {
    "nodes": ("node_id", "execution_id", "token_ids", "counted_tokens"),
    "calls": ("execution_id", "output_tokens", "status", "wire", "upstream", "served_model", "provider_usage"),
}


class ExecutionState(StrEnum):
    """Where an execution stands: `queued` has no call yet, `interrupted` was being worked on when the writer left."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSummary:
    """One execution in a line."""

    execution_id: str
    task_id: str | None
    group_id: str | None
    sample_index: int | None
    harness: str | None
    state: ExecutionState
    end_reason: EndReason | None
    num_calls: int
    num_bad_calls: int
    """Calls aborted or failed."""
    num_tokens: int
    """Tokens recorded, each once."""
    num_sampled_tokens: int
    score: float | None
    """Of the newest scored row; None when there is none."""
    score_status: ScoreStatus | None
    """Status of the newest score row, scored or not."""
    evaluator: str | None
    partial: bool | None
    started_at: datetime | None
    ended_at: datetime | None
    cost: float | None = None
    """US dollars at list price of what hosted APIs served; None when nothing of it has a price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """One run in a line. `problem` says why it could not be opened."""

    path: str
    created_at: str | None
    writing: bool
    num_executions: int
    num_calls: int
    num_tokens: int
    problem: str | None = None


def _sums(table: pa.Table, value: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    """(rows, sum of `value`) by execution."""
    both = pa.table({"execution_id": table.column("execution_id"), "value": pc.fill_null(value, 0)})
    totals = both.group_by("execution_id").aggregate([("value", "count"), ("value", "sum")]).to_pydict()
    return dict(zip(totals["execution_id"], zip(totals["value_count"], totals["value_sum"], strict=True), strict=True))


def _state(info: ExecutionInfo, num_calls: int, writing: bool) -> ExecutionState:
    if not info.running:
        return ExecutionState.ENDED
    if not num_calls:
        return ExecutionState.QUEUED
    return ExecutionState.RUNNING if writing else ExecutionState.INTERRUPTED


def list_executions(run: Run) -> Records[ExecutionSummary]:
    """Every execution of `run` that has an event or a call, oldest first."""
    # A run that grows is listed again and again, and keeps what it has gathered.
    tables = Lean(run, _COLUMNS) if isinstance(run, Run) and not run.open_segments else run
    calls, nodes = tables.table("calls"), tables.table("nodes")
    sampled = _sums(calls, calls.column("output_tokens"))
    ids = pc.list_value_length(nodes.column("token_ids"))
    tokens = _sums(nodes, pc.coalesce(nodes.column("counted_tokens"), ids))
    bad = calls.filter(pc.not_equal(calls.column("status"), "ok")).column("execution_id").value_counts()
    num_bad = {item["values"]: item["counts"] for item in bad.to_pylist()}
    scores, bills = scores_by_execution(run), hosted_by_execution(tables)
    writing = is_locked(run.path / "lock")
    found = []
    for info in executions(tables).values():
        rows = scores.get(info.execution_id, [])
        scored = next((row for row in reversed(rows) if row.status == ScoreStatus.SCORED), None)
        found.append(
            ExecutionSummary(
                execution_id=info.execution_id,
                task_id=info.task_id,
                group_id=info.group_id,
                sample_index=info.sample_index,
                harness=info.harness,
                state=_state(info, sampled.get(info.execution_id, (0, 0))[0], writing),
                end_reason=info.end_reason,
                num_calls=sampled.get(info.execution_id, (0, 0))[0],
                num_bad_calls=num_bad.get(info.execution_id, 0),
                num_tokens=tokens.get(info.execution_id, (0, 0))[1],
                num_sampled_tokens=sampled.get(info.execution_id, (0, 0))[1],
                score=scored.value if scored else None,
                score_status=rows[-1].status if rows else None,
                evaluator=scored.evaluator if scored else None,
                partial=scored.partial if scored else None,
                started_at=info.started_at,
                ended_at=info.ended_at,
                cost=bill.cost if (bill := bills.get(info.execution_id)) else None,
            )
        )
    return Records(ExecutionSummary, found)


def list_runs(root: str | Path | None = None) -> Records[RunSummary]:
    """Every run folder directly under `root` (None: under ./runs and in this folder), oldest first.

    One that cannot be read is listed with its problem.
    """
    found = []
    for path in run_folders(root):
        writing, problem, created_at = is_locked(path / "lock"), None, None
        executions: Sequence[ExecutionSummary] = ()
        try:
            run = Run(path)
            created_at = run.info.get("created_at")
            executions = list_executions(run)
        except DataError as error:
            problem = str(error)
        found.append(
            RunSummary(
                path=str(path),
                created_at=created_at,
                writing=writing,
                num_executions=len(executions),
                num_calls=sum(e.num_calls for e in executions),
                num_tokens=sum(e.num_tokens for e in executions),
                problem=problem,
            )
        )
    return Records(RunSummary, sorted(found, key=lambda r: (r.created_at or "", r.path)))
