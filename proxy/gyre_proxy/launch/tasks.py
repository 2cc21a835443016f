"""Task files: what `gyre run` runs, and how a command line is filled in without a shell."""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError

__all__ = ["PLACEHOLDERS", "Task", "fill", "load_tasks", "program_name", "split_command"]

_INTERPRETER = re.compile(r"python[\d.]*|sh|bash|node|npx|uvx?")

PLACEHOLDERS = ("base_url", "prompt", "workspace", "sample_index", "tasks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One `[[task]]` table. Relative paths are taken from the file's folder; times are seconds."""

    id: str
    prompt: str
    command: tuple[str, ...] | None = None
    """Harness command with placeholders; `gyre run -a` overrides it."""
    workspace: Path | None = None
    """Folder copied for each execution; none = an empty one."""
    evaluator: tuple[str, ...] | None = None
    timeout_s: float = 3600.0
    """Harness time; when it is over the harness is stopped and the workspace is judged all the same."""
    overall_timeout_s: float = 7200.0
    """Time since dispatch, waiting included."""
    evaluator_timeout_s: float = 600.0
    folder: Path = field(default=Path(), metadata={"key": False})
    """Folder of the task file, `{tasks}` in commands."""


def load_tasks(path: Path) -> tuple[Task, ...]:
    """Read `tasks.toml`, or the one in a folder. Raise ConfigError with the nearest name for an unknown key."""
    file = path / "tasks.toml" if path.is_dir() else path
    try:
        document = tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"wanted a task file, found none at {file}; write one with [[task]] tables") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    tables = document.get("task")
    if not isinstance(tables, list) or not tables or set(document) != {"task"}:
        raise ConfigError(f"{file}: wanted [[task]] tables and nothing else, got {', '.join(document) or 'nothing'}")
    tasks = tuple(_task(table, file) for table in tables)
    ids = [task.id for task in tasks]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigError(f"{file}: task id {twice[0]!r} stands twice; ids must differ")
    return tasks


def _task(table: Mapping[str, Any], file: Path) -> Task:
    known = [each.name for each in fields(Task) if each.metadata.get("key", True)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{file}: unknown key {key!r} in [[task]]; nearest is {near!r}")
    if not isinstance(table.get("id"), str) or not isinstance(table.get("prompt"), str):
        raise ConfigError(f"{file}: each [[task]] needs a string id and a string prompt, got {dict(table)}")
    values = dict(table)
    for key in ("command", "evaluator"):
        if values.get(key) is not None:
            values[key] = split_command(values[key], f"{file}: {key} of task {table['id']}")
    if values.get("workspace") is not None:
        values["workspace"] = (file.parent / values["workspace"]).resolve()
        if not values["workspace"].is_dir():
            raise ConfigError(f"{file}: workspace of task {table['id']}: no folder {values['workspace']}")
    for key in ("timeout_s", "overall_timeout_s", "evaluator_timeout_s"):
        if key in values and not (isinstance(values[key], int | float) and values[key] > 0):
            raise ConfigError(f"{file}: {key} of task {table['id']}: wanted seconds above 0, got {values[key]!r}")
    return Task(**values, folder=file.parent.resolve())


def split_command(command: str | list[str], what: str) -> tuple[str, ...]:
    """Split a command line as a shell would, without running one; a list is taken as it is."""
    parts = shlex.split(command) if isinstance(command, str) else list(command)
    if not parts or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{what}: wanted a command line or a list of strings, got {command!r}")
    return tuple(parts)


def program_name(command: Sequence[str]) -> str:
    """What a command line is called in the records: its program, or the script or module that an interpreter runs."""
    words = [word for word in command if not word.startswith("-")]
    if len(words) > 1 and _INTERPRETER.fullmatch(Path(words[0]).name):
        return words[1].rpartition(".")[2] if "-m" in command[:2] else Path(words[1]).stem
    return Path(words[0]).name


def fill(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """Put values for `{name}` into each argument. Only the names in PLACEHOLDERS count; other braces stay."""
    out = []
    for argument in command:
        for name in PLACEHOLDERS:
            argument = argument.replace("{" + name + "}", values.get(name, ""))
        out.append(argument)
    return out
