"""What a training config says, as the controller's settings and as the config of the core: plain translation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_data.types import PolicyVersion
from gyre_train.config import TrainingConfig
from gyre_train.rollout.dispatch import tasks_in_round
from gyre_train.rollout.settings import RolloutConfig

from .settings import SchedulerConfig

__all__ = [
    "batch_groups",
    "cell_names",
    "core_config",
    "engine_command",
    "fleet_settings",
    "folder_of",
    "queries",
    "receiver_arguments",
    "training_commands",
]

_REFILL_S = 60.0
"""`gyre run` replaces what fell out of a group; the controller does only where no launcher did for so long."""


def folder_of(config: TrainingConfig) -> Path:
    """Where the controller keeps its ledger, its cells and their logs."""
    return Path(config.output.dir).resolve() / "scheduler"


def batch_groups(config: TrainingConfig) -> int:
    """Groups of rollouts in a step; recorded executions fill the rest of it."""
    return round(config.train.executions_per_step * config.data.live_share) // config.rollout.attempts


def cell_names(config: TrainingConfig) -> list[str]:
    """The first is the core's."""
    return [f"c{number}" for number in range(config.scheduler.cells)]


def queries(tasks: Sequence[str], seed: int, count: int) -> list[str]:
    """The first `count` groups in order: every task once in each round. A longer list begins with a shorter one."""
    found: list[str] = []
    for turn in range(-(-count // len(tasks))):
        found += [task + (f"#{turn + 1}" if turn else "") for task in tasks_in_round(turn, tasks, seed)]
    return found[:count]


def core_config(config: TrainingConfig, policy_id: str, keep: int) -> TrainingConfig:
    """The same training as the core does it: what is dispatched, shown and served is others' work."""
    return replace(
        config,
        output=replace(config.output, policy_id=policy_id, keep=max(keep, config.output.keep), page=0),
        rollout=RolloutConfig(),
        publish=replace(config.publish, proxy=None),
        scheduler=SchedulerConfig(),
    )


def engine_command(config: TrainingConfig) -> list[str]:
    """What a cell serves with."""
    own = [
        sys.executable, "-m", "gyre_data", "engine", "{weights}", "--host", "{host}", "--port", "{port}",
        "--weight-version", "{label}", *config.rollout.engine_flags,
    ]  # fmt: skip
    return list(config.scheduler.engine) or own


def receiver_arguments(config: TrainingConfig, port: str) -> list[str]:
    """Of `gyre`: what stands beside the cells' engines and fetches weights out of the core's memory."""
    publish = config.publish
    words = ["receive", str(folder_of(config) / "received"), "--port", port, "--protocol", publish.protocol]
    return [*words, "--device", publish.device] if publish.device else words


def training_commands(config: TrainingConfig) -> dict[str, list[str]]:
    """What the first cell trains with, and what the others do."""
    python, out = [sys.executable, "-m"], str(Path(config.output.dir).resolve())
    core = str(folder_of(config) / "core.toml")
    return {
        "core_command": [
            *python, "gyre_data", "train", core, "--stream.host={host}", "--stream.port={port}",
        ],
        "command": [
            *python, "gyre_train.streaming.satellite", out, "--name", "{cell}", "--listen", "{host}:{port}",
        ],
    }  # fmt: skip


def fleet_settings(
    config: TrainingConfig,
    *,
    proxy: str,
    groups: Sequence[str],
    base: PolicyVersion,
    policy_id: str,
    receiver: str = "",
) -> dict[str, Any]:
    """The controller's settings (`gyre_sched.cells.settings`) for the groups in this order.

    `receiver`: URL of the `gyre receive` to which the core brings weights; empty: engines load checkpoints.
    """
    scheduler, out = config.scheduler, Path(config.output.dir).resolve()
    return {
        "folder": str(folder_of(config)),
        "proxy": proxy,
        "queries": list(groups),
        "batch_groups": batch_groups(config),
        "group_size": config.rollout.attempts,
        "microsteps_per_group": config.stream.parts,
        "steps": config.train.steps,
        "policy": scheduler.policy,
        "policy_settings": scheduler.policy_settings,
        "base_weights": str(Path(config.model.path).resolve()),
        "base_label": str(base),
        "weights": f"{out}/checkpoints/step-{{version:08}}",
        "label": f"{policy_id}:{{version}}",
        "executions": {"refill_s": _REFILL_S},
        "rollout": {"command": engine_command(config)} | ({"receiver": receiver} if receiver else {}),
        "train": training_commands(config),
        "cells": [{"id": name, "capacity": scheduler.capacity} for name in cell_names(config)],
    }
