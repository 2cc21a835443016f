"""`gyre simulate`: a few lines over gyre_sched, which imports nothing of ours and gets recorded durations from here."""

from __future__ import annotations

import csv
import json
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import ConfigError, DataError

__all__ = ["simulate"]


def simulate(
    scenario: Annotated[
        str, typer.Argument(help=r"122b, 2.4t, or a TOML file with \[scenario] and [\[rung]].")
    ] = "122b",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", metavar="NAME", help="Only these rungs, or a policy's name or path; may repeat."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Paired seeds; 6 or more to tell differences under 3 %.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps instead of the scenario's.")] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Durations of this run's executions, group by group.")
    ] = None,
    durations: Annotated[
        Path | None, typer.Option(help="Durations from a CSV file with the columns group and seconds.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write one HTML page with the cells over time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs, every seed with it.")] = False,
) -> None:
    """Say what a schedule would take before any GPU is spent: hours, bounds, staleness, idle shares, switches."""
    try:
        experiment = import_module("gyre_sched.experiment")
        errors = import_module("gyre_sched.errors")
    except ModuleNotFoundError as error:
        raise ConfigError(f"wanted the package gyre_sched to simulate with, got {error}; install it again") from error
    try:
        title, base, rungs = experiment.ladder(
            scenario, changes=None if steps is None else {"steps": steps}, durations=_durations(recorded, durations)
        )
        found = experiment.compare(
            experiment.select(rungs, policy or [], base),
            seeds=range(first_seed, first_seed + seeds),
            base=base,
            title=title,
        )
    except errors.SchedulerError as error:
        raise ConfigError(str(error)) from error
    if out is not None:
        out.write_text(import_module("gyre_sched.page").page(found))
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=1))
        return
    typer.echo("\n".join(import_module("gyre_sched.text").lines(found)))
    typer.echo(f"page: {out}" if out is not None else f"cells over time: gyre simulate {scenario} -o cells.html")


def _durations(recorded: Path | None, table: Path | None) -> Any:
    """What --from or --durations tell, as the simulator takes it; None without both."""
    if recorded is not None and table is not None:
        raise ConfigError("wanted --from or --durations, got both; leave one out")
    if recorded is None and table is None:
        return None
    rows = _of_run(recorded) if recorded is not None else _of_table(table)  # type: ignore[arg-type]
    if not rows:
        raise DataError(f"wanted executions that ended, got none in {recorded or table}; record some first")
    return import_module("gyre_sched.durations").grouped(rows)


def _of_run(path: Path) -> list[tuple[str, float]]:
    from .execution import executions
    from .store import find_run, open

    rows = []
    for info in executions(open(find_run(path))).values():
        if info.started_at is not None and info.ended_at is not None and info.ended_at > info.started_at:
            rows.append((info.group_id or info.execution_id, (info.ended_at - info.started_at).total_seconds()))
    return rows


def _of_table(path: Path) -> list[tuple[str, float]]:
    try:
        with path.open(newline="") as file:
            return [(row["group"], float(row["seconds"])) for row in csv.DictReader(file)]
    except FileNotFoundError:
        raise ConfigError(f"wanted a CSV file at {path}, which is not there; correct --durations") from None
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(f"wanted a CSV file with the columns group and seconds at {path}, got: {error!r}") from error
