"""Task files: what `gyre run` runs, and how a command line is filled in without a shell."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError

from .container import Container, read_container
from .split import split_command
from .workspace import GitSource

__all__ = ["PLACEHOLDERS", "Task", "fill", "load_tasks", "program_name"]

_INTERPRETER = re.compile(r"python[\d.]*|sh|bash|node|npx|uvx?")

_COMMANDS = ("command", "evaluator", "setup", "worker")
_SECONDS = ("timeout_s", "overall_timeout_s", "evaluator_timeout_s")

PLACEHOLDERS = ("base_url", "prompt", "workspace", "sample_index", "tasks", "task", "root", "timeout_s", "name")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One `[[task]]` table. Relative paths are taken from the file's folder; times are seconds."""

    id: str
    prompt: str
    command: tuple[str, ...] | None = None
    """Harness command with placeholders; `gyre run -a` overrides it."""
    worker: tuple[str, ...] | None = None
    """In place of `command`: a program that is started once and runs one execution after the other (worker.py)."""
    workspace: Path | GitSource | None = None
    """Folder copied for each execution, or a commit of a git repository; none = an empty folder."""
    setup: tuple[str, ...] | None = None
    """Command that makes a fresh workspace ready, before its first state; where it fails, so does the set-up."""
    container: Container | None = None
    """What `setup`, `command` and `evaluator` run in; none = this machine."""
    evaluator: tuple[str, ...] | None = None
    evaluator_outside: bool = False
    """The evaluator runs on this machine and reaches the container by `{name}`."""
    timeout_s: float = 3600.0
    """Harness time; when it is over the harness is stopped and the workspace is judged all the same."""
    overall_timeout_s: float = 7200.0
    """Time since dispatch, waiting included."""
    evaluator_timeout_s: float = 600.0
    folder: Path = field(default=Path(), metadata={"key": False})
    """Folder of the task file, `{tasks}` in commands."""


def load_tasks(path: Path) -> tuple[Task, ...]:
    """Read a task file (TOML, or JSON lines with the same keys), or the `tasks.toml` of a folder.

    Raise ConfigError with the nearest name for an unknown key.
    """
    file = path / "tasks.toml" if path.is_dir() else path
    try:
        tables, defaults = _read_json_lines(file) if file.suffix == ".jsonl" else _read_toml(file)
    except FileNotFoundError:
        raise ConfigError(f"wanted a task file, found none at {file}; write one with [[task]] tables") from None
    tasks = tuple(_task(table, defaults, file) for table in tables)
    ids = [task.id for task in tasks]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise ConfigError(f"{file}: task id {twice[0]!r} stands twice; ids must differ")
    return tasks


def _read_toml(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Tables of the tasks, and what `[defaults]` says for all of them."""
    try:
        document = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    tables, defaults = document.get("task"), document.get("defaults", {})
    if not isinstance(tables, list) or not tables or not set(document) <= {"task", "defaults"}:
        raise ConfigError(
            f"{file}: wanted [[task]] tables, [defaults] at most beside them, got {', '.join(document) or 'nothing'}"
        )
    if not isinstance(defaults, dict) or {"id", "prompt"} & set(defaults):
        raise ConfigError(f"{file}: [defaults] holds what tasks share; id and prompt are each task's own")
    _check_keys(defaults, file, "[defaults]")
    return tables, defaults


def _read_json_lines(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    tables = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            table = json.loads(line or "{}")
        except ValueError as error:
            raise ConfigError(f"{file}:{number} is not valid JSON: {error}") from None
        if table:
            tables.append(table)
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{file}: wanted one JSON object with id and prompt on each line")
    return tables, {}


def _task(own: Mapping[str, Any], defaults: Mapping[str, Any], file: Path) -> Task:
    other = {"command": "worker", "worker": "command"}  # one of them runs the harness, so one replaces the other
    table = {name: value for name, value in defaults.items() if other.get(name) not in own} | dict(own)
    _check_keys(own, file, "[[task]]")
    if not isinstance(table.get("id"), str) or not isinstance(table.get("prompt"), str):
        raise ConfigError(f"{file}: each [[task]] needs a string id and a string prompt, got {dict(table)}")
    where = f"of task {table['id']}"
    values = {name: value for name, value in table.items() if value is not None}
    for key in _COMMANDS:
        if key in values:
            values[key] = split_command(values[key], f"{file}: {key} {where}")
    if "workspace" in values:
        values["workspace"] = _workspace(values["workspace"], file, where)
    if "container" in values:
        values["container"] = read_container(values["container"], f"{file}: container {where}")
    for key in _SECONDS:
        if key in values and not (isinstance(values[key], int | float) and values[key] > 0):
            raise ConfigError(f"{file}: {key} {where}: wanted seconds above 0, got {values[key]!r}")
    if not isinstance(values.get("evaluator_outside", False), bool):
        raise ConfigError(f"{file}: evaluator_outside {where}: wanted true or false")
    if "command" in table and "worker" in table:
        raise ConfigError(f"{file}: task {table['id']} has both command and worker; one of them runs the harness")
    return Task(**values, folder=file.parent.resolve())


def _check_keys(table: Mapping[str, Any], file: Path, name: str) -> None:
    known = [each.name for each in fields(Task) if each.metadata.get("key", True)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{file}: unknown key {key!r} in {name}; nearest is {near!r}")


def _workspace(value: Any, file: Path, where: str) -> Path | GitSource:
    if (
        isinstance(value, dict)
        and {"git"} <= set(value) <= {"git", "ref"}
        and all(isinstance(v, str) and v for v in value.values())
    ):
        repository = value["git"]
        local = file.parent / repository
        return GitSource(
            repository=str(local.resolve()) if local.is_dir() else repository, ref=value.get("ref", "HEAD")
        )
    if not isinstance(value, str):
        raise ConfigError(
            f'{file}: workspace {where}: wanted a folder or {{ git = "URL", ref = "COMMIT" }}, got {value!r}'
        )
    folder = (file.parent / value).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{file}: workspace {where}: no folder {folder}")
    return folder


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
