"""The settings of rollouts, and which of them have an effect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from gyre_data.errors import ConfigError

__all__ = ["RolloutConfig", "check_rollout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Executions that `gyre train` itself has run while it trains."""

    tasks: str = ""
    """Task file as for `gyre run`; unset: nothing is run."""
    run: str = ""
    """Run folder they are recorded in, a live one; unset: `output.dir` with `-run` behind it."""
    harness: str = ""
    """Harness command for every task, as `gyre run -a`; unset: each task's own."""
    worker: str = ""
    """Long-lived harness for every task, as `gyre run --worker`."""
    attempts: int = 8
    """Executions of a group."""
    jobs: int = 8
    """Harnesses at once."""
    max_staleness: int = 1
    """Most optimiser steps between the weights that a group was dispatched under and those it is trained with."""
    eval_every: int = 0
    """Steps between two passes over the held-out tasks, the first before training; 0: none."""
    eval_attempts: int = 1
    """Executions of each held-out task in a pass."""
    engines: int = 1
    """Engines started here (`gyre engine`) where `publish.engines` names none."""
    engine_flags: tuple[str, ...] = ()
    """More flags of `gyre engine`."""
    proxy_flags: tuple[str, ...] = ()
    """More flags of `gyre proxy`."""
    run_flags: tuple[str, ...] = ()
    """More flags of `gyre run`."""


def check_rollout(rollout: RolloutConfig, *, per_step: int, held_out: bool, live: Sequence[str]) -> None:
    """Refuse what cannot work and settings that would have no effect. `per_step`: executions of one step."""
    if not rollout.tasks:
        for f in fields(RolloutConfig):
            if getattr(rollout, f.name) != f.default:
                raise ConfigError(f"rollout.{f.name} has no effect without tasks; set rollout.tasks or remove it")
        return
    if rollout.harness and rollout.worker:
        raise ConfigError("rollout.harness and rollout.worker: wanted one of them, got both; remove one")
    for name in ("attempts", "jobs", "eval_attempts", "engines"):
        if getattr(rollout, name) < 1:
            raise ConfigError(f"rollout.{name}: wanted at least 1, got {getattr(rollout, name)}; raise it")
    for name in ("max_staleness", "eval_every"):
        if getattr(rollout, name) < 0:
            raise ConfigError(f"rollout.{name}: wanted a number from 0, got {getattr(rollout, name)}; raise it")
    if per_step % rollout.attempts:
        raise ConfigError(
            f"rollout.attempts = {rollout.attempts}: wanted a divisor of train.executions_per_step = {per_step}, since "
            "a step takes whole groups; set one of them"
        )
    if rollout.eval_every and not held_out:
        raise ConfigError("rollout.eval_every: no task is held out; set data.eval_tasks or data.eval_share")
    if others := [name for name in live if name != rollout.run]:
        raise ConfigError(f"data.live: rollouts are the one run that grows, got {', '.join(others)} too; remove it")
