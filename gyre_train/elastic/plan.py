"""What `gyre train` with cells would start, without starting it: for `--dry-run`."""

from __future__ import annotations

from typing import Any

from gyre_train.config import TrainingConfig
from gyre_train.rollout.services import launcher_arguments, proxy_arguments

from .command import check_policy_of
from .fleet import batch_groups, cell_names, engine_command, folder_of, receiver_arguments, training_commands

__all__ = ["cells_plan"]


def cells_plan(config: TrainingConfig) -> dict[str, Any]:
    """Services, cells and their programs, and what a step consists of; ConfigError for a policy that is none.

    A command is a list of words, {port} and the like in it are known when it starts.
    """
    check_policy_of(config)
    groups, folder = batch_groups(config), folder_of(config)
    receiver = {"receiver": ["gyre", *receiver_arguments(config, "{port}")]}
    return {
        "services": {
            "proxy": ["gyre", *proxy_arguments(config, (), "{port}")],
            "launcher": ["gyre", *launcher_arguments(config)],
            **(receiver if config.publish.method == "mooncake" else {}),
            "controller": ["python", "-m", "gyre_sched.cells", str(folder / "fleet.toml")],
        },
        "cells": cell_names(config),
        "programs": {
            "serves with": engine_command(config),
            "core": training_commands(config)["core_command"],
            "satellite": training_commands(config)["command"],
        },
        "groups": groups,
        "recorded": config.train.executions_per_step - groups * config.rollout.attempts,
        "steps": config.train.steps,
        "folder": str(folder),
    }
