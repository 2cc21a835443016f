"""`gyre stats`: a few lines over the library call of the same name."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from gyre_data.breakdown import by_client, by_evaluator, by_role, by_task
from gyre_data.hosted import Prices
from gyre_data.outages import outages
from gyre_data.printable import printable_json
from gyre_data.reader import Run
from gyre_data.run_stats import stats as count_runs
from gyre_data.scores import scores_by_execution
from gyre_data.store import find_run
from gyre_data.store import open as open_run
from gyre_data.tools import by_tool

from .breakdown_text import call_lines, evaluator_lines, task_lines, tool_lines
from .following import follow_on_screen
from .layout import screen, show
from .stats_text import stats_lines
from .target import where_of

__all__ = ["By", "stats"]


class By(StrEnum):
    """What `gyre stats --by` cuts by."""

    ROLE = "role"
    TOOL = "tool"
    TASK = "task"
    EVALUATOR = "evaluator"
    CLIENT = "client"


Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JMax = Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")]


def stats(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; left out, the run made last.")] = None,
    by: Annotated[By | None, typer.Option(help="Cut the counts, or the verdicts by evaluator and group.")] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Forecast training: a model's name or folder."),
    ] = None,
    trainer: Annotated[
        Path | None, typer.Option(help="A training run's output folder: staleness and mismatch of what it consumed.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Price table for hosted models (TOML); left out, the dated one of this release.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until ^C: count anew whenever a run changes.")
    ] = False,
    as_json: Json = False,
    j_max: JMax = 5,
) -> None:
    """Count what runs hold: executions, tokens and how much is shared, tools, forks, evaluators, ages, hosted cost."""
    opened = [open_run(find_run(path)) for path in runs] if runs else [open_run(find_run())]
    console = screen()
    table, trained = Prices.load(prices), None if trainer is None else open_run(trainer)

    def counted() -> tuple[Any, Iterable[Text]]:
        if by is not None:
            return _cut(opened, by, j_max or None, console.width)
        found = count_runs(opened, j_max=j_max or None, prices=table, trainer=trained, model=model)
        where = " ".join(where_of(run) for run in opened)
        return found.to_json(), stats_lines(found, where=where, width=console.width)

    def told() -> None:
        value, lines = counted()
        if as_json:
            _print_json(value)
        else:
            show(lines, console)

    def told_apart() -> None:
        told()
        if not as_json:
            typer.echo()

    if follow:
        follow_on_screen(opened, lambda: counted()[1], told_apart, console)
    told()


def _cut(runs: list[Run], by: By, j_max: int | None, width: int) -> tuple[Any, Iterable[Text]]:
    """The cut as plain values, and its lines."""
    if by is By.TOOL:
        shares = by_tool(runs)
        return asdict(shares), tool_lines(shares, width=width)
    if by is By.TASK:
        tasks = by_task(runs, j_max=j_max)
        return [asdict(row) for row in tasks], task_lines(tasks, width=width)
    if by is By.EVALUATOR:
        groups = by_evaluator(runs)
        windows = [outage for run in runs for outage in outages(scores_by_execution(run))]
        return [asdict(row) for row in groups], evaluator_lines(groups, windows, width=width)
    calls = (by_role if by is By.ROLE else by_client)(runs, j_max=j_max)
    return [row.to_json(by.value) for row in calls], call_lines(calls, by.value, width=width)


def _print_json(value: Any) -> None:
    typer.echo(printable_json(json.dumps(value, ensure_ascii=False)))
