"""Policies compared on paired seeds, with confidence intervals: every difference is taken seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .choose import policy
from .durations import Durations
from .errors import ScenarioError
from .measure import Measured
from .scenario import Scenario, load, rung
from .simulate import simulate

__all__ = ["Comparison", "Interval", "Outcome", "Rung", "compare", "interval", "ladder", "select"]

# Two-sided 95 % quantiles of Student's t for 1..30 degrees of freedom; 1.96 beyond.
_T95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
    2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean over seeds and the half width of its 95 % confidence interval; infinite for one seed."""

    mean: float
    half: float

    @property
    def upper(self) -> float:
        """The upper bound."""
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """Of a sample, by Student's t."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean=mean, half=math.inf)
    quantile = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return Interval(mean=mean, half=quantile * statistics.stdev(values) / math.sqrt(n))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One line of a ladder: a policy on a scenario, with what was published of it."""

    name: str
    scenario: Scenario
    policy: str
    settings: Mapping[str, Any]
    about: str = ""
    published_h: float | None = None
    published_ratio: tuple[float, float] | None = None
    """Least and most, against the base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A rung's runs, seed by seed, and what they say."""

    rung: Rung
    runs: tuple[Measured, ...]
    hours: Interval
    ratio: Interval
    """Against the base, paired."""
    work_ratio: float
    path_ratio: float
    """Hours over the critical path of its own pattern of dispatch."""

    def mean(self, name: str) -> float:
        """Mean over seeds of a figure of `Measured`."""
        return statistics.fmean(getattr(run, name) for run in self.runs)

    def to_json(self) -> dict[str, Any]:
        """As plain values, every run with it."""
        runs = [{k: v for k, v in asdict(run).items() if k != "spans"} for run in self.runs]
        return {
            "name": self.rung.name,
            "policy": self.rung.policy,
            "settings": dict(self.rung.settings),
            "hours": _finite(self.hours),
            "ratio": _finite(self.ratio),
            "hours_per_work_bound": self.work_ratio,
            "hours_per_critical_path": self.path_ratio,
            "published_h": self.rung.published_h,
            "published_ratio": self.rung.published_ratio,
            "runs": runs,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rungs of a ladder on the same seeds."""

    title: str
    base: str
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "title": self.title,
            "base": self.base,
            "seeds": list(self.seeds),
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }


def ladder(
    source: str | Path, *, changes: Mapping[str, Any] | None = None, durations: Durations | None = None
) -> tuple[str, str, list[Rung]]:
    """Title, base and rungs of a shipped ladder or a TOML file; `changes` are laid over every rung's scenario."""
    told = load(source)
    rows = told.get("rung", [])
    for key in told:
        if key not in ("title", "base", "scenario", "rung"):
            raise ScenarioError(f"unknown key {key} in {source}; known: title, base, [scenario], [[rung]]")
    rungs = [_rung(row, told.get("scenario", {}), changes or {}, durations) for row in rows]
    if not rungs:
        raise ScenarioError(f"wanted at least one [[rung]] with name and policy in {source}, got none; add one")
    return str(told.get("title", source)), str(told.get("base", rungs[0].name)), rungs


def select(rungs: Sequence[Rung], wanted: Sequence[str], base: str) -> list[Rung]:
    """The base and the wanted rungs, each by its name; another name is a policy, run on the base's scenario."""
    if not wanted:
        return list(rungs)
    by_name = {one.name: one for one in rungs}
    if base not in by_name:
        raise ScenarioError(f"wanted a base among {', '.join(by_name)}, got {base}; correct it")
    chosen = {base: by_name[base]}
    for name in wanted:
        other = Rung(name=name, scenario=by_name[base].scenario, policy=name, settings={})
        chosen[name] = by_name.get(name, other)
    return list(chosen.values())


def _rung(
    row: Mapping[str, Any], scenario: Mapping[str, Any], changes: Mapping[str, Any], durations: Durations | None
) -> Rung:
    known = {"name", "about", "policy", "settings", "changes", "published_h", "published_ratio"}
    if not {"name", "policy"} <= set(row) <= known:
        raise ScenarioError(f"wanted a [[rung]] of {', '.join(sorted(known))}, got {', '.join(row)}; correct it")
    published = row.get("published_ratio")
    return Rung(
        name=row["name"],
        about=row.get("about", ""),
        policy=row["policy"],
        settings=row.get("settings", {}),
        scenario=rung(scenario, {**row.get("changes", {}), **changes}, durations),
        published_h=row.get("published_h"),
        published_ratio=None if published is None else (float(published[0]), float(published[1])),
    )


def compare(
    rungs: Sequence[Rung],
    *,
    seeds: Sequence[int],
    base: str | None = None,
    title: str = "",
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run every rung on every seed. The base is the rung that ratios are taken against, by default the first."""
    names = [one.name for one in rungs]
    if base is not None and base not in names:
        raise ScenarioError(f"wanted a base among {', '.join(names)}, got {base}; correct it")
    runs: dict[str, tuple[Measured, ...]] = {}
    for one in rungs:
        if progress:
            progress(one.name)
        chosen = policy(one.policy, one.settings)
        runs[one.name] = tuple(simulate(one.scenario, chosen, seed=seed, trace=seed == seeds[0]) for seed in seeds)
    against = runs[base or names[0]]
    outcomes = []
    for one in rungs:
        mine = runs[one.name]
        outcomes.append(
            Outcome(
                rung=one,
                runs=mine,
                hours=interval([run.hours for run in mine]),
                ratio=interval([a.hours / b.hours for a, b in zip(mine, against, strict=True)]),
                work_ratio=statistics.fmean(run.hours / run.work_bound_h for run in mine),
                path_ratio=statistics.fmean(run.hours / max(1e-9, run.critical_path_h) for run in mine),
            )
        )
    return Comparison(title=title, base=base or names[0], seeds=tuple(seeds), outcomes=tuple(outcomes))


def _finite(value: Interval) -> dict[str, float | None]:
    return {"mean": value.mean, "half": value.half if math.isfinite(value.half) else None}
