"""What a trainer's folder says, written as the trainer writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gyre_data import RunWriter
from gyre_data.admission import AdmittedExecution
from gyre_data.types import LedgerRow, Step

__all__ = ["append", "rows_of"]


def rows_of(made: Step, executions: Iterable[AdmittedExecution]) -> list[LedgerRow]:
    return [
        LedgerRow(
            step=made.step,
            policy_id=made.policy_id,
            data_run=str(Path(getattr(e.run, "path", "")).resolve()),
            manifest=getattr(e.run, "manifest_number", 0),
            execution_id=e.execution_id,
            group_id=e.group_id,
            trajectory=t.index,
            leaf_node=e.tree.node_id[t.leaf],
            owned_tokens=t.num_owned,
            reward=e.reward,
            advantage=e.advantage,
            score_ids=e.score_ids,
            at=made.at,
        )
        for e in executions
        for t in e.trajectories
    ]


def append(writer: RunWriter, made: Step, executions: Iterable[AdmittedExecution]) -> None:
    writer.write([*rows_of(made, executions), made])
