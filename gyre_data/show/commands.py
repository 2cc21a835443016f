"""`gyre stats` and `gyre score`: a few lines each over the library calls of the same name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from gyre_data.breakdown import by_evaluator, by_role
from gyre_data.execution import executions, find
from gyre_data.hosted import Prices
from gyre_data.run_stats import stats as count_runs
from gyre_data.store import find_run
from gyre_data.store import open as open_run

from .remote import append_score
from .stats_text import breakdown_lines, stats_lines

__all__ = ["By", "score", "stats"]


class By(StrEnum):
    """What `gyre stats --by` cuts by."""

    ROLE = "role"
    EVALUATOR = "evaluator"


Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JMax = Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")]


def stats(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; left out, the run made last.")] = None,
    by: Annotated[
        By | None, typer.Option(help="Cut the counts by role, or the verdicts by evaluator and group.")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="Price table for hosted models (TOML); left out, the dated one of this release.")
    ] = None,
    as_json: Json = False,
    j_max: JMax = 5,
) -> None:
    """Count what runs hold: executions, nodes and tokens, how much is shared, roles, forks, evaluators, hosted cost."""
    opened = [open_run(find_run(path)) for path in runs] if runs else [open_run(find_run())]
    if by is not None:
        rows = by_role(opened, j_max=j_max or None) if by is By.ROLE else by_evaluator(opened)
        if as_json:
            _print_json([asdict(row) for row in rows])
        else:
            _print(breakdown_lines(rows))
        return
    found = count_runs(opened, j_max=j_max or None, prices=Prices.load(prices))
    if as_json:
        _print_json(found.to_json())
        return
    _print(stats_lines(found, where=" ".join(str(run.path) for run in opened)))


def score(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    execution: Annotated[str, typer.Argument(help="Start of an execution's id.")],
    value: Annotated[float | None, typer.Argument(help="The score; left out with --failed.")] = None,
    evaluator: Annotated[str, typer.Option(help="NAME or NAME@VERSION.")] = "manual",
    partial: Annotated[bool, typer.Option("--partial", help="The work judged was not finished.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The evaluator failed: recorded, never a zero.")] = False,
    detail: Annotated[str | None, typer.Option(help="Text or JSON from the evaluator.")] = None,
) -> None:
    """Append an evaluator's verdict; through the proxy that records the run, if one does."""
    opened = open_run(find_run(run))
    execution_id = find(executions(opened), execution)
    through = append_score(
        opened,
        execution_id,
        value,
        evaluator=evaluator,
        status="failed" if failed else "scored",
        partial=partial or None,
        detail=detail,
        key=os.environ.get("GYRE_KEY"),
    )
    verdict = "failed" if failed else f"{value:g}{' partial' if partial else ''}"
    typer.echo(f"{execution_id}: {verdict} by {evaluator}" + (f", through {through}" if through else ""))


def _print(lines: Iterable[Text]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for line in lines:
        console.print(line)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))
