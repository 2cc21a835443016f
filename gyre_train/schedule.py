"""The learning rate of a step: linear warm-up, then constant, linear or cosine decay to `min_lr` at the last step."""

from __future__ import annotations

import math

from .config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of optimiser step `step`, from 1; after `config.steps` it stays at its end."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr + (config.lr - config.min_lr) * left
