"""A teacher's log-probs of sampled tokens, in the run's side table: `teach` computes them, training reads them.

The table is append-only; of one teacher's rows for a node the last one written counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyre_data.arrays import list_views
from gyre_data.errors import ConfigError

from .pack import Array

if TYPE_CHECKING:
    from gyre_data.tree import Tables

__all__ = ["teach", "teacher_logprobs"]

_TOGETHER = 16
"""Executions laid out at a time: of the others only the log-probs found are in memory."""


def teacher_logprobs(run: Tables, name: str | None) -> Mapping[str, Array]:
    """Log-probs by node id of teacher `name`, or of the only one there is; ConfigError when that is not one teacher."""
    table = run.table("teacher_logprobs")
    known = sorted(set(table.column("teacher").to_pylist()))
    if name is None and len(known) == 1:
        name = known[0]
    if name not in known:
        where = getattr(run, "path", "the run")
        raise ConfigError(
            f"loss.teacher: wanted one teacher's log-probs in {where}, it holds those of {', '.join(known) or 'none'}; "
            "name one with loss.teacher_name, or compute them with gyre_train.teach"
        )
    mine = np.flatnonzero(table.column("teacher").to_numpy() == name)
    nodes, views = table.column("node_id").to_pylist(), list_views(table.column("logprobs"))
    return {nodes[row]: view for row in map(int, mine) if (view := views[row]) is not None}


def teach(
    run: str | Path, model: str | Path, *, teacher: str | None = None, executions: Sequence[str] | None = None,
    tokens: int = 8192,
) -> int:  # fmt: skip
    """Compute `model`'s log-probs of every sampled token that may be trained, at the temperature it was sampled with,
    and append them to the run. Returns their number.

    `teacher` names the rows (default: the model's own version). `tokens` is the longest pack.
    """
    import torch
    from transformers import AutoConfig

    from gyre_data.store import RunWriter
    from gyre_data.types import TeacherLogprobs

    from .config import DataConfig, LossConfig, ModelConfig, TrainingConfig
    from .lineage import lineage_of
    from .megatron.model import build_model, edge_logprobs
    from .megatron.parallel import groups
    from .megatron.weights import load_hf
    from .pack import node_values
    from .plan import plan
    from .source import load_source

    config = TrainingConfig(
        model=ModelConfig(path=str(model)), data=DataConfig(runs=(str(run),)), loss=LossConfig(advantage=0.0)
    )
    examples = [e for e in load_source(config).examples if executions is None or e.execution_id in executions]
    name, at = teacher or str(lineage_of(model).version), datetime.now(UTC)
    rows: list[TeacherLogprobs] = []
    with groups(), torch.no_grad():
        built = build_model(AutoConfig.from_pretrained(model))
        load_hf(built, model)
        for first in range(0, len(examples), _TOGETHER):
            some = examples[first : first + _TOGETHER]
            trees = [example.tree(number) for number, example in enumerate(some)]
            packs = plan(trees, tokens=tokens).packs
            found: Any = node_values(trees, packs, [edge_logprobs(built, pack)[0].numpy() for pack in packs])
            rows += [
                TeacherLogprobs(node_id=node_id, teacher=name, logprobs=value.astype(np.float32), at=at)
                for example, values in zip(some, found, strict=True)
                for node_id, value in zip(example.recorded().node_id if example.recorded else (), values, strict=True)
                if value is not None
            ]
    with RunWriter(run, create=False) as writer:
        writer.write(rows)
    return sum(len(row.logprobs) for row in rows)
