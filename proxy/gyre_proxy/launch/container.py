"""Containers by command templates: what a harness runs in is a matter of three command lines, not of a client library.

`up` starts what an execution needs, `exec` stands before each of its commands, `down` removes what is left, also what a
launcher that died has left. With `exec` alone (`docker run --rm ...`) each command has a container of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gyre_data.errors import ConfigError

from .split import split_command

__all__ = ["Container", "prefix", "read_container"]

_NAMES = ("up", "exec", "down")


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """Command templates with the placeholders of a task's commands, and `{name}`, one for each execution.

    A word `{env}` in `exec` becomes `--env NAME` for each variable that the command is to see: its value is taken from
    the environment of `exec` itself, so that keys stand on no command line.
    """

    exec: tuple[str, ...]
    up: tuple[str, ...] | None = None
    down: tuple[str, ...] | None = None


def read_container(value: Any, what: str) -> Container:
    """Read a `container` table; raise ConfigError with the nearest name for an unknown key."""
    if not isinstance(value, dict) or "exec" not in value:
        raise ConfigError(
            f"{what}: wanted a table with exec, and up and down where they are needed, got {value!r:.120}"
        )
    for key in value:
        if key not in _NAMES:
            near = difflib.get_close_matches(key, _NAMES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{what}: unknown key {key!r}; nearest is {near!r}")
    return Container(**{name: split_command(value[name], f"{what}: {name}") for name in _NAMES if name in value})


def prefix(container: Container, env: Iterable[str]) -> tuple[str, ...]:
    """The words that stand before a command which is to see the variables `env` in the container."""
    passed = [word for name in sorted(env) for word in ("--env", name)]
    words: list[str] = []
    for word in container.exec:
        words += passed if word == "{env}" else [word]
    return tuple(words)
