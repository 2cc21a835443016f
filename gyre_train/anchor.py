"""Which weights logp_old comes from, for a run's data and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_data.errors import ConfigError

from .config import TrainingConfig
from .edges import Anchor
from .lineage import Lineage
from .source import Source

__all__ = ["check_burst", "choose_anchor"]


def choose_anchor(config: TrainingConfig, source: Source, lineage: Lineage) -> Anchor | None:
    """Return the anchor for this data: None for SFT; `auto` asks whether the model's own lineage sampled it.

    Data that is recorded meanwhile is sampled by weights of this run: its anchor is that of the burst.
    """
    if config.loss.kind == "sft":
        return None
    if config.train.anchor != "auto":
        return Anchor(config.train.anchor)
    if config.data.live:
        return Anchor.BURST
    own = set(lineage.policy_ids)
    known_own = all(example.policy_ids and example.policy_ids <= own for example in source.examples)
    return Anchor.BEHAVIOUR if known_own else Anchor.STEP


def check_burst(config: TrainingConfig, anchor: Anchor | None, state: Mapping[str, Any]) -> None:
    """Refuse another K, or another anchor, in the middle of a burst: logp_old would be of weights nobody chose."""
    begun, now = int(state.get("steps_per_burst", 1)), config.train.steps_per_burst
    done = int(state["step"]) % begun
    if done and (begun != now or anchor is not Anchor.BURST):
        end = int(state["step"]) - done + begun
        came = f"train.steps_per_burst = {now}" if anchor is Anchor.BURST else f"train.anchor = {anchor}"
        raise ConfigError(
            f"{came}: step {state['step']} lies inside a burst of {begun} steps with its own anchor; train to step "
            f"{end} with steps_per_burst = {begun} first (--train.steps={end}), then change it"
        )
