"""One optimiser step: a replica's gradients, 1/E, clip, AdamW. The same code in every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre_data.errors import DataError

from .config import TrainingConfig
from .edges import Anchor
from .figures import Figures, total, values
from .loss import step_scale
from .megatron.checkpoint import load_checkpoint, save_checkpoint
from .megatron.gradients import finish_gradients
from .megatron.parallel import counts_figures, from_all_ranks
from .megatron.stock import open_optimizer
from .megatron.weights import load_hf
from .pack import Pack
from .replica import Replica

__all__ = ["Learner", "StepWork"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepWork:
    """What one optimiser step computes on; rank 0 makes it and every rank gets the same."""

    step: int
    packs: tuple[Pack, ...]
    """Empty where the step's micro-steps were computed as they came."""
    num_executions: int
    lr: float


class Learner(Replica):
    """The weights in training with their optimiser and anchor, in one rank."""

    def __init__(self, config: TrainingConfig, anchor: Anchor | None, checkpoint: Path | None) -> None:
        """Load the model, from the checkpoint when there is one. `anchor` None is SFT."""
        super().__init__(config, anchor, checkpoint or Path(config.model.path))
        if checkpoint is None:
            load_hf(self.model, config.model.path)
        self.optimizer = open_optimizer(self.wrapped, self.model, config.train, config.model)
        if checkpoint is not None:
            self.burst = load_checkpoint(checkpoint, self.model, self.optimizer)

    def step(self, work: StepWork) -> dict[str, float]:
        """Apply one optimiser step and return its figures."""
        started = time.monotonic()
        self.begin()
        return self.apply(work, self.accumulate(work.packs, step=work.step), started)

    def apply(self, work: StepWork, figures: Figures, started: float) -> dict[str, float]:
        """Close a step on the gradients there are; `figures` are this rank's of all it computed, or heard of."""
        finish_gradients(self.wrapped, step_scale(work.num_executions))
        norm = self.optimizer.clip(self._config.train.clip_grad)
        found = values(total(*from_all_ranks(figures if counts_figures() else {})))
        loss = found.pop("loss")
        if not math.isfinite(norm) or not math.isfinite(loss):
            raise DataError(
                f"step {work.step}: wanted a finite loss and gradient, got loss {loss} and gradient norm {norm}; the "
                "weights were not touched, resume with a smaller train.lr or look at the model and data of this step"
            )
        self.optimizer.step(work.lr)
        if self.burst is not None and work.step % self._config.train.steps_per_burst == 0:
            self.burst = None
        return {
            "loss": loss * step_scale(work.num_executions),
            "grad_norm": norm,
            "lr": work.lr,
            **found,
            "seconds": time.monotonic() - started,
        }

    def save(self, root: Path, step: int, state: Mapping[str, object]) -> Path:
        """Write a checkpoint from all ranks and return its folder."""
        return save_checkpoint(
            root, step=step, model=self.model, optimizer=self.optimizer, state=state,
            source=Path(self._config.model.path), anchor=self.burst, keep=self._config.output.keep,
        )  # fmt: skip
