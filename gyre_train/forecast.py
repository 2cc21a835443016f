"""What a training run would do, without torch: `gyre train --dry-run`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from gyre_data.model_shapes import shape_of

from .config import TrainingConfig, to_toml
from .plan import flops
from .source import load_source, plan_examples

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """Totals over the steps that would run on the data as it is now, from the start of training."""

    config: str
    """Resolved settings as TOML."""
    steps: int
    executions: int
    excluded: Mapping[str, Mapping[str, int]]
    """Counts by reason, for executions, calls and trajectories."""
    packs: int
    packed_tokens: int
    unpacked_tokens: int
    edges: int
    """Trained tokens."""
    flops: int
    """Forward and backward, by formula."""


def forecast(config: TrainingConfig) -> Forecast:
    """Admit, choose and lay out every step as training would, and add up what it costs."""
    source = load_source(config, pack_tokens=config.pack.tokens)
    shape = shape_of(config.model.path)
    trained: Counter[str] = Counter()
    total: Counter[str] = Counter()  # sums only: the packs of all steps would hold every token there is
    while not config.train.steps or total["steps"] < config.train.steps:
        due = source.due(trained, config.train.executions_per_step)
        if not due:
            break
        trained.update(example.execution_id for example in due)
        made = plan_examples(due, config)
        total += Counter(
            steps=1, executions=made.num_executions, packs=len(made.packs), packed_tokens=made.num_packed_tokens,
            unpacked_tokens=made.num_unpacked_tokens, edges=made.num_edges, flops=flops(made, shape),
        )  # fmt: skip
    return Forecast(
        config=to_toml(config),
        steps=total["steps"],
        executions=total["executions"],
        excluded=source.excluded,
        packs=total["packs"],
        packed_tokens=total["packed_tokens"],
        unpacked_tokens=total["unpacked_tokens"],
        edges=total["edges"],
        flops=total["flops"],
    )
