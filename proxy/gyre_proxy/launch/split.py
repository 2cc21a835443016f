"""A command line as a list of words, as a shell would read it, without running one."""

from __future__ import annotations

import shlex
from typing import Any

from gyre_data.errors import ConfigError

__all__ = ["split_command"]


def split_command(command: Any, what: str) -> tuple[str, ...]:
    """Split a command line; a list is taken as it is. `what` names it in the error for anything else."""
    parts = shlex.split(command) if isinstance(command, str) else list(command) if isinstance(command, list) else []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{what}: wanted a command line or a list of strings, got {command!r}")
    return tuple(parts)
