"""The settings of cells, and what they cannot stand beside."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from gyre_data.errors import ConfigError

if TYPE_CHECKING:
    from gyre_train.config import TrainingConfig

__all__ = ["SchedulerConfig", "check_scheduler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Cells of this machine that serve and train in turns, for the tasks of `[rollout]`."""

    cells: int = 0
    """Cells that the scheduler moves between rollout and training; 0: fixed pools."""
    capacity: int = 8
    """Executions that a cell serves at full speed."""
    policy: str = "waterlevel"
    """Which policy decides: one that ships, an entry point, or `module:Name` (docs/scheduler.md)."""
    policy_settings: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Its settings, such as { burst = 2, depth = 2.0 }; they bound the age of what is trained."""
    engine: tuple[str, ...] = ()
    """Command of an engine, with {weights}, {label}, {host} and {port}; unset: `gyre engine`."""


def check_scheduler(config: TrainingConfig) -> None:
    """Refuse what cannot work with cells, and settings that would have no effect."""
    scheduler, rollout = config.scheduler, config.rollout
    if not scheduler.cells:
        for f in fields(SchedulerConfig):
            if getattr(scheduler, f.name) != getattr(SchedulerConfig(), f.name):
                raise ConfigError(f"scheduler.{f.name} has no effect without cells; set scheduler.cells or remove it")
        return
    for name in ("cells", "capacity"):
        if getattr(scheduler, name) < 1:
            raise ConfigError(f"scheduler.{name}: wanted at least 1, got {getattr(scheduler, name)}; raise it")
    if not rollout.tasks:
        raise ConfigError("scheduler.cells: cells serve and train what tasks give; set rollout.tasks")
    _check_no_effect(config)
    told = " ".join(scheduler.engine)
    if told and (missing := [name for name in ("{weights}", "{label}", "{port}") if name not in told]):
        raise ConfigError(f"scheduler.engine: wanted {' and '.join(missing)} in it, got {told!r}; add it")
    if config.data.chat:
        raise ConfigError("data.chat beside scheduler.cells: chats have no executions; train on them in a run before")
    if len(config.data.runs) > 1 and config.data.mix is None:
        raise ConfigError("data.runs beside scheduler.cells: wanted the share of each run; set data.mix")
    live = config.train.executions_per_step * config.data.live_share
    if abs(live - round(live)) > 1e-6 or round(live) % rollout.attempts or not round(live):
        raise ConfigError(
            f"data.mix: a step of {config.train.executions_per_step} executions would have {live:g} of the rollouts; "
            f"wanted whole groups of rollout.attempts = {rollout.attempts}; set other shares or sizes"
        )


def _check_no_effect(config: TrainingConfig) -> None:
    """Settings of fixed pools, and what this command sets itself."""
    default = type(config)()
    instead = {
        "rollout.max_staleness": "the policy bounds the age; set scheduler.policy_settings",
        "rollout.engines": "set scheduler.cells",
        "publish.engines": "cells start engines and bring the weights to them",
        "publish.every": "the policy says when",
        "publish.receivers": "one is started beside the cells",
        "stream.port": "each cell has its own",
    }
    if config.scheduler.engine:
        instead["rollout.engine_flags"] = "write them into scheduler.engine"
    for name, told in instead.items():
        section, _, key = name.partition(".")
        if getattr(getattr(config, section), key) != getattr(getattr(default, section), key):
            raise ConfigError(f"{name} has no effect with scheduler.cells: {told}; remove it")
