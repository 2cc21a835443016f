"""What a controller of real cells is told: one TOML file, read into a frozen record; unknown keys fail."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gyre_sched.api import Cell, Params
from gyre_sched.errors import ScenarioError

from .hicache import HierarchicalCache

__all__ = ["CellSettings", "ExecutionSettings", "FleetSettings", "RolloutSettings", "TrainSettings", "load", "to_toml"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSettings:
    """One cell. The first one named is the core."""

    id: str
    capacity: int
    """Executions it serves at full speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How a cell serves. Commands know {port}, {host}, {cell}, {weights} (a folder) and {label} (its version)."""

    command: tuple[str, ...]
    """An engine with SGLang's native routes, which `/ready` says is up and `/model_info` which weights it has."""
    ready_s: float = 600.0
    """Longest that it takes to start and to answer with the wanted weights."""
    finish_s: float = 0.0
    """How long a leaving cell may finish replies; then they go on elsewhere."""
    grace_s: float = 20.0
    """How long it may take to end when it is asked."""
    receiver: str = ""
    """Where the core brings weights for an engine to load, with {host}, the engine's; unset: it loads the folder."""
    cache: HierarchicalCache | None = None
    """Keys and values that SGLang engines share; not run yet, it needs GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """How a cell trains. Its program answers the routes of `gyre_sched.cells.training`."""

    command: tuple[str, ...]
    """Of a satellite; {core} is the core's address."""
    core_command: tuple[str, ...]
    ready_s: float = 600.0
    grace_s: float = 120.0
    """How long a satellite may take to hand over what it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSettings:
    """How a dispatched group becomes executions of the proxy."""

    launcher: Mapping[str, Any] = field(default_factory=dict)
    """Handed to whoever claims them."""
    judged: bool = True
    """A group is ready when each execution has a verdict; else when each has ended."""
    refill_s: float = 5.0
    """After this long without another to take its place, one that no policy is to blame for is replaced."""
    replacements: int = 3
    """Most for one group; it is dropped then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSettings:
    """A run of the controller."""

    folder: Path
    """Ledger, slots and logs."""
    proxy: str
    """Base URL of the proxy."""
    queries: tuple[str, ...]
    """Tasks, `name` or `name#epoch`, in the order of the queue. A later controller may find more at its end."""
    cells: tuple[CellSettings, ...]
    rollout: RolloutSettings
    train: TrainSettings
    batch_groups: int
    group_size: int
    steps: int
    base_weights: str
    """Folder of version 0."""
    base_label: str
    """What engines call version 0, such as base:0."""
    weights: str
    """Folder of a later version, with {version}, or {version:08} for eight digits."""
    label: str
    """What engines call it, with {version}, such as run:{version}."""
    policy: str = "waterlevel"
    policy_settings: Mapping[str, Any] = field(default_factory=dict)
    executions: ExecutionSettings = field(default_factory=ExecutionSettings)
    microsteps_per_group: int = 4
    min_rollout: int = 1
    backend: Literal["local", "ray"] = "local"
    """Where cells run: this machine, or the Ray cluster that it belongs to."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What each cell takes of a cluster, such as { GPU = 8 }; one CPU by default."""
    proxy_key: str | None = None
    beat_s: float = 1.0
    """How often each cell is asked whether it lives."""
    lost_s: float = 30.0
    """A cell that is silent for this long is lost: it is killed and started again."""
    call_s: float = 30.0
    """Longest of one control call."""
    hour_s: float = 3600.0
    """Real seconds of an hour of the ledger's clock; less in emulations."""

    def __post_init__(self) -> None:
        ids = [cell.id for cell in self.cells]
        if not ids or len(set(ids)) < len(ids):
            raise ScenarioError(f"wanted [[cells]] with ids that differ, got {ids}; correct them")
        if any("/" in one or one.startswith(".") for one in ids):
            raise ScenarioError(f"wanted ids of cells that can be names of folders, got {ids}; correct them")
        if len(set(self.queries)) < len(self.queries):
            raise ScenarioError("wanted queries that differ, got one twice; write name#epoch")

    @property
    def params(self) -> Params:
        """What policies are told."""
        return Params.of(self)

    def fresh_cells(self) -> list[Cell]:
        """The cells before anything happened."""
        return [
            Cell(id=cell.id, position=position, capacity=cell.capacity, core=position == 0)
            for position, cell in enumerate(self.cells)
        ]

    def weights_of(self, version: int) -> tuple[str, str]:
        """Folder and label of a version."""
        if version == 0:
            return self.base_weights, self.base_label
        return self.weights.format(version=version), self.label.format(version=version)


def load(path: Path) -> FleetSettings:
    """Read a settings file; paths in it are taken from the working directory."""
    try:
        told = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ScenarioError(f"wanted settings at {path}, which is not there; see docs/scheduler.md") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"wanted a TOML file at {path}, got: {error}; correct it") from error
    made: FleetSettings = _read(FleetSettings, told, "")
    return made


def to_toml(settings: Mapping[str, Any]) -> str:
    """Plain values as TOML for `load`, one key a line, tables inline."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items())


def _toml(value: Any) -> str:
    """Strings and numbers are written as JSON's are."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(one) for one in value) + "]"
    return json.dumps(value)


def _read(kind: type[Any], told: Any, where: str) -> Any:
    """A record of `kind` from a table; ScenarioError names the key that is wrong."""
    known = {one.name: one for one in fields(kind)}
    if not isinstance(told, dict):
        raise ScenarioError(f"wanted {where or 'settings'} as a table, got {told!r:.80}; correct it")
    for key in told:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise ScenarioError(f"unknown key {where}{key}; {f'nearest {where}{near[0]}' if near else sorted(known)}")
    for name, one in known.items():
        if one.default is MISSING and one.default_factory is MISSING and name not in told:
            raise ScenarioError(f"wanted {where}{name}, which is not there; add it")
    hints = get_type_hints(kind)
    return kind(**{key: _value(hints[key], value, f"{where}{key}") for key, value in told.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(arguments[0], one, where) for one in value)
    if is_dataclass(hint):
        return _read(hint, value, f"{where}.")  # type: ignore[arg-type]
    if hint is Path and isinstance(value, str):
        return Path(value)
    if origin is Literal and value in arguments:
        return value
    if type(None) in arguments:
        return _value(arguments[0], value, where)
    wanted = dict if origin is Mapping else hint if isinstance(hint, type) else None
    fits = isinstance(value, (int, float) if wanted is float else wanted or ())
    if not fits or (isinstance(value, bool) and hint is not bool):
        told = " or ".join(arguments) if origin is Literal else getattr(hint, "__name__", hint)
        raise ScenarioError(f"wanted {where} as {told}, got {value!r:.80}; correct it")
    return value
