"""What is simulated: cells, costs, durations, steps. Scenarios ship as TOML files and are read from yours."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .api import Params
from .durations import Durations, TwoLevel
from .errors import ScenarioError

__all__ = ["Failures", "Scenario", "load", "rung", "shipped"]

_LADDER = Path(__file__).with_name("ladder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Random failures of cells; a mean of 0 means none."""

    mean_between_h: float = 0.0
    """Per cell."""
    repair_h: float = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One set-up. Times say their unit; defaults are what was measured or chosen for the published 122B runs."""

    durations: Durations
    steps: int = 48
    cells: int = 8
    batch_groups: int = 32
    group_size: int = 16
    microsteps_per_group: int = 4
    min_rollout: int = 1
    saturation_batches: float = 4.0
    """Batches of executions that all cells together serve at full speed."""
    engine_share: float = 0.6
    """Share of an execution's time that an engine works for it, which contention stretches."""
    timeout_h: float = 5.4
    """Wall clock after which an execution is ended and judged."""
    train_cell_h: float = 4.85
    """Cell-hours that a step's micro-steps take, for groups of mean length."""
    optimiser_s: float = 60.0
    pull_s: float = 10.0
    """A satellite's pull of new weights after a step."""
    publish_s: float = 0.0
    """Serving cells take new weights in this time, while they serve."""
    to_train_s: float = 8.52
    to_rollout_s: float = 3.46
    prediction_error: float = 0.1
    """Relative error of the estimates that queries carry; below 0 they carry none."""
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self) -> None:
        positive = ("steps", "cells", "batch_groups", "group_size", "saturation_batches", "timeout_h", "train_cell_h")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ScenarioError(f"wanted {name} above 0, got {getattr(self, name)}; correct the scenario")

    @property
    def params(self) -> Params:
        """What policies are told."""
        return Params.of(self)

    @property
    def capacity(self) -> int:
        """Executions that one cell serves at full speed."""
        return max(1, round(self.saturation_batches * self.batch_groups * self.group_size / self.cells))


def shipped() -> list[str]:
    """Names of the ladders that ship."""
    return sorted(path.stem for path in _LADDER.glob("*.toml"))


def load(name: str | Path) -> dict[str, Any]:
    """A ladder: a shipped name or a TOML file, as plain values; `rung` makes scenarios of it."""
    path = _LADDER / f"{name}.toml" if str(name) in shipped() else Path(name)
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        near = ", ".join(shipped())
        raise ScenarioError(
            f"wanted a scenario, got {name}, which is no file; name a TOML file or one of: {near}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
        raise ScenarioError(f"wanted a TOML file at {path}, got: {error}; see docs/scheduler.md") from error


def rung(
    base: Mapping[str, Any], changes: Mapping[str, Any] | None = None, durations: Durations | None = None
) -> Scenario:
    """The scenario of a `[scenario]` table with a rung's changes; `durations` stands in for the table's own."""
    values = {**base, **(changes or {})}
    told = values.pop("durations", None)
    failures = values.pop("failures", None)
    if durations is None:
        if told is None:
            raise ScenarioError("wanted [scenario.durations] with mean_h, cv_query and cv_execution, got none; add it")
        _known(told, ("mean_h", "cv_query", "cv_execution"), "scenario.durations")
        durations = TwoLevel(
            mean_s=float(told.get("mean_h", 1.0)) * 3600,
            cv_query=float(told.get("cv_query", 0.0)),
            cv_execution=float(told.get("cv_execution", 0.0)),
        )
    made = Scenario(durations=durations)
    _typed(made, values, "scenario")
    scenario = replace(made, **values)
    if failures is not None:
        _typed(scenario.failures, failures, "scenario.failures")
        scenario = replace(scenario, failures=Failures(**failures))
    return scenario


def _known(values: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"nearest {where}.{near[0]}" if near else f"known: {', '.join(names)}"
            raise ScenarioError(f"unknown key {where}.{name}; {hint}")


def _typed(record: Any, values: Mapping[str, Any], where: str) -> None:
    """Only settings that the record has, as the kind of number it has."""
    settable = [one for one in fields(record) if one.default is not MISSING]
    _known(values, tuple(one.name for one in settable), where)
    for one in settable:
        if one.name in values:
            value, wanted = values[one.name], type(one.default)
            if isinstance(value, bool) or not isinstance(value, int if wanted is int else (int, float)):
                raise ScenarioError(f"wanted {where}.{one.name} as {wanted.__name__}, got {value!r}; correct it")
