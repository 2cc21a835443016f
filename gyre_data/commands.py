"""`gyre ls` and `gyre verify`: a few lines each over `listing` and `verify`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .checks import ProblemKind
from .errors import ConfigError
from .listing import ExecutionSummary, list_executions, list_runs
from .printable import printable
from .reader import Run
from .salvage import plan_salvage
from .salvage import salvage as salvage_run
from .show.folder_text import salvage_lines
from .show.following import follow_on_screen
from .show.layout import print_json, screen, show
from .show.list_text import execution_line, execution_list, run_list
from .show.target import where_of
from .store import find_run, open
from .training_folder import TrainingFolder, is_training
from .verify import Report
from .verify import verify as verify_run

__all__ = ["ls", "verify"]

_DAMAGE = (ProblemKind.CORRUPT, ProblemKind.MISSING)
_AROUND = 7  # lines that stand around the executions on a screen that is followed
_MAX_SHOWN = 20  # problems of one kind on a screen; --json has them all

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def ls(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without it, the runs here and in ./runs.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until ^C; in a pipe, a line for each change. No RUN: the last one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the executions of a run, or without RUN the runs in this folder and in ./runs.

    One line an execution: task, group, harness, state or end reason, calls, tokens, newest score.
    """
    console = screen()
    if follow:
        _follow(open(find_run(run)), console, as_json)
    found: Sequence[Any] = list_runs() if run is None else list_executions(open(find_run(run)))
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in found], default=str, indent=1))
    elif run is not None and not found and is_training(run):
        runs = " ".join(f"gyre ls {name}" for name in TrainingFolder(run).data_runs)
        show([Text(f"{run} is the folder of a training: gyre view {run}"), Text(f"what it trains on: {runs}")], console)
    elif run is None:
        show(run_list(found, width=console.width), console)
    else:
        show(execution_list(found, where=str(run), width=console.width), console)


def _follow(run: Run, console: Console, as_json: bool) -> None:
    known: dict[str, ExecutionSummary] = {}

    def whole() -> Iterator[Text]:
        found, room = list_executions(run), max(1, console.height - _AROUND)
        if len(found) > room:
            yield Text(f"{len(found) - room:,} earlier ones are not shown", style="dim")
        yield from execution_list(found[-room:], where=where_of(run), width=console.width)

    def told() -> None:
        for one in list_executions(run):
            news = replace(one, num_tokens=0)  # nodes come a moment before their call: no news by themselves
            if known.get(one.execution_id) != news:
                known[one.execution_id] = news
                if as_json:
                    print_json(one)
                else:
                    show([execution_line(one)], console)

    follow_on_screen([run], whole, told, console)


def verify(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without it, the run made last.")] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Show what can be saved of damaged segments; with --yes, save it.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do what --salvage shows.")] = False,
    training: Annotated[
        bool, typer.Option("--training", help="Check instead that packed trees train like independent rows.")
    ] = False,
    model: Annotated[str | None, typer.Option("-m", "--model", help="With --training: a Hugging Face folder.")] = None,
    dtype: Annotated[str, typer.Option(help="With --training: float32 (bound 1e-5) or float64 (1e-9).")] = "float32",
    limit: Annotated[int, typer.Option(min=0, help="With --training: most executions to compare; 0: all.")] = 16,
    as_json: Json = False,
) -> None:
    """Check every byte of a run and whether its rows agree; report damage and, without --salvage --yes, mend nothing.

    With --training --model M: compare loss, log-probs and gradients of the packed trees with those of one row per
    trajectory, and print the largest differences by name.

    Exit status 0: clean, all damage was salvaged, or exact; 1: faults, or not exact; 2: wrong use, or no run folder.
    """
    path = find_run(run)
    if training != (model is not None):
        raise ConfigError("wanted --training and --model together, got one; see `gyre verify --help`")
    if training:
        import_module("gyre_train.commands").verify_training(path, model, dtype=dtype, limit=limit, as_json=as_json)
    if yes and not salvage:
        raise ConfigError("wanted --salvage with --yes, got --yes alone; a check changes nothing")
    if salvage:
        done = (salvage_run if yes else plan_salvage)(path)
        typer.echo(json.dumps(asdict(done), indent=1) if as_json else printable("\n".join(salvage_lines(done))))
        raise typer.Exit(1 if done.broken and (not yes or any(one.left_alone for one in done.broken)) else 0)
    report = verify_run(path)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "exit_status": report.exit_status}, indent=1))
    else:
        _show(report)
    raise typer.Exit(report.exit_status)


def _show(report: Report) -> None:
    shown: Counter[str] = Counter()
    for problem in report.problems:
        shown[problem.kind] += 1
        if shown[problem.kind] <= _MAX_SHOWN:
            typer.secho(printable(f"{problem.kind:10} {problem.where}: {problem.detail}"), fg=typer.colors.RED)
    for kind, count in shown.items():
        if count > _MAX_SHOWN:
            typer.secho(f"{kind:10} and {count - _MAX_SHOWN} more; --json lists all", fg=typer.colors.RED)
    for note in report.notes:
        typer.echo(printable(f"note: {note}"))
    rows = ", ".join(f"{name} {count:,}" for name, count in report.num_rows.items()) or "none"
    verdict = "clean" if not report.problems else f"{len(report.problems)} problems"
    typer.echo(f"{report.path}: {verdict}; manifest {report.manifest}; rows: {rows}")
    if any(problem.kind in _DAMAGE for problem in report.problems):
        typer.echo(f"what can be saved: gyre verify {report.path} --salvage")
