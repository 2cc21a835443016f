"""Light rows out of run tables: what tree, admission and counts need of calls, deliveries, events and scores."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from .schema import (
    AgentRole,
    BranchReason,
    CallStatus,
    DeliveryState,
    EndReason,
    Extension,
    ScoreStatus,
)
from .types import Attempt, Call, ExecutionEvent, Score

__all__ = ["calls_from", "events_from", "latest_deliveries", "scores_from"]


def calls_from(table: pa.Table) -> list[Call]:
    """Rows of `calls` as dataclasses, in table order."""
    return [_call(row) for row in table.to_pylist()]


def _call(row: dict[str, Any]) -> Call:
    row["agent_role"] = AgentRole.read(row["agent_role"])
    row["extension"] = Extension.read(row["extension"])
    row["branch_reason"] = BranchReason.read(row["branch_reason"])
    row["status"] = CallStatus.read(row["status"])
    row["attempts"] = tuple(Attempt(**attempt) for attempt in row["attempts"])
    row["request_blobs"] = None if row["request_blobs"] is None else tuple(row["request_blobs"])
    return Call(**row)


def latest_deliveries(table: pa.Table) -> dict[str, DeliveryState]:
    """Latest state by call id: by time, then delivered before the rest, so that row order does not matter."""
    best: dict[str, tuple[Any, bool, str]] = {}
    for call_id, state, at in zip(*(table.column(c).to_pylist() for c in ("call_id", "state", "at")), strict=True):
        key = (at, state == DeliveryState.DELIVERED, state)
        if call_id not in best or key > best[call_id]:
            best[call_id] = key
    return {call_id: DeliveryState(str(DeliveryState.read(key[2]))) for call_id, key in best.items()}


def events_from(table: pa.Table) -> list[ExecutionEvent]:
    """Rows of `executions`, in time order."""
    events = [ExecutionEvent(**{**row, "end_reason": EndReason.read(row["end_reason"])}) for row in table.to_pylist()]
    return sorted(events, key=lambda event: event.at)


def scores_from(table: pa.Table) -> list[Score]:
    """Rows of `scores`, oldest first; rows of one instant by id."""
    scores = [Score(**{**row, "status": ScoreStatus.read(row["status"])}) for row in table.to_pylist()]
    return sorted(scores, key=lambda score: (score.at, score.score_id))
