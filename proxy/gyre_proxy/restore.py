"""Reads back from the run what a proxy keeps in memory, so that a restart is not noticed."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from gyre_data.arrays import from_table
from gyre_data.errors import ConfigError
from gyre_data.store import Run
from gyre_data.types import Call, EnvironmentState, ExecutionEvent, GroupEvent, Node, Score

from .executions import Executions
from .experts import KnownExperts
from .history import History

__all__ = ["load_executions", "restore_history", "same_recording"]


def same_recording(run: Run, mode: str, fingerprint: str) -> None:
    """Refuse to go on with a run that was recorded in another mode, or with another tokenizer or template."""
    if (before := run.info.get("mode", mode)) != mode:
        raise ConfigError(f"{run.path} was recorded in {before} mode, this proxy is in {mode} mode; give another --run")
    recorded = run.info.get("fingerprint")
    if recorded not in (None, fingerprint):
        raise ConfigError(
            f"{run.path} was recorded with tokenizer and template {recorded}, these are {fingerprint}; "
            "go on with the same ones, or record to another --run"
        )


def load_executions(executions: Executions, run: Run) -> None:
    """Every execution with its state, keys and counts."""
    events: list[ExecutionEvent] = from_table("executions", run.table("executions"))
    environments: list[EnvironmentState] = from_table("environments", run.table("environments"))
    scores: list[Score] = from_table("scores", run.table("scores"))
    groups: list[GroupEvent] = from_table("groups", run.table("groups"))
    calls = Counter(run.table("calls").column("execution_id").to_pylist())
    executions.load(events, environments, scores, groups, calls)


def restore_history(history: History, run: Run, execution_id: str) -> KnownExperts:
    """Rebuild an execution's history from its recorded nodes and calls; gives what of its experts is on record."""
    run.refresh()
    nodes: list[Node] = from_table("nodes", _rows_of(run.table("nodes"), execution_id))
    calls: list[Call] = from_table("calls", _rows_of(run.table("calls"), execution_id))
    history.restore(nodes, calls, run.blob)
    experts = run.table("routed_experts")
    of_nodes = pa.array([node.node_id for node in nodes], pa.string())
    return KnownExperts(from_table("routed_experts", experts.filter(pc.is_in(experts.column("node_id"), of_nodes))))


def _rows_of(table: pa.Table, execution_id: str) -> pa.Table:
    return table.filter(pc.equal(table.column("execution_id"), execution_id))
