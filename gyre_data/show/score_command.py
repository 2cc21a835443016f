"""`gyre score`: a few lines over `gyre_data.score`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gyre_data.errors import ConfigError
from gyre_data.execution import executions, find
from gyre_data.printable import printable
from gyre_data.remote import append_scores
from gyre_data.schema import ScoreStatus
from gyre_data.scores import make_score, scores_by_execution
from gyre_data.store import find_run
from gyre_data.store import open as open_run
from gyre_data.verdicts import read_verdicts

__all__ = ["score"]


def score(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    execution: Annotated[str | None, typer.Argument(help="Start of an execution's id.")] = None,
    value: Annotated[float | None, typer.Argument(help="The score; left out with --failed or --skipped.")] = None,
    evaluator: Annotated[str, typer.Option(help="NAME or NAME@VERSION.")] = "manual",
    partial: Annotated[bool, typer.Option("--partial", help="The work judged was not finished.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The evaluator failed: recorded, never a zero.")] = False,
    skipped: Annotated[bool, typer.Option("--skipped", help="It was not run, on purpose: never a zero.")] = False,
    detail: Annotated[str | None, typer.Option(help="Text or JSON from the evaluator.")] = None,
    state: Annotated[str | None, typer.Option(help="Id of the environment state that was judged.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Many verdicts: a JSON object a line, with execution and value.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the stored rows as JSON.")] = False,
) -> None:
    """Append an evaluator's verdict; through the proxy that records the run, if one does.

    Verdicts are never changed: the last scored one of each evaluator counts. A key that the proxy wants is taken from
    GYRE_KEY. Lines of --from are like {"execution": "e7f3", "value": 0.5, "evaluator": "pytest@3", "partial": true}.
    """
    opened = open_run(find_run(run))
    if (source is None) == (execution is None):
        raise ConfigError("wanted EXECUTION and a value, or --from FILE for many, got both or neither; see --help")
    if source is not None:
        if value is not None or partial or failed or skipped or detail or state:
            raise ConfigError("wanted --from FILE and at most --evaluator, got a verdict too; write it into the file")
        rows = read_verdicts(opened, source, evaluator=evaluator)
    else:
        execution_id = find(executions(opened), execution or "")
        rows = [
            make_score(
                execution_id, value, evaluator=evaluator, status=_status(failed, skipped), partial=partial or None,
                detail=detail, state_id=state,
            )
        ]  # fmt: skip
    stored, through = append_scores(opened, rows, key=os.environ.get("GYRE_KEY"))
    if as_json:
        typer.echo(json.dumps([{**asdict(row), "at": row.at.isoformat()} for row in stored]))
        return
    for row in stored:
        verdict = row.status.value if row.value is None else f"{row.value:g}{' partial' if row.partial else ''}"
        name = row.evaluator + (f"@{row.evaluator_version}" if row.evaluator_version else "")
        typer.echo(printable(f"{row.execution_id}: {verdict} by {name}" + (f", through {through}" if through else "")))
    if source is not None:
        typer.echo(f"{len(stored)} verdicts; next: gyre stats {run} --by evaluator")
        return
    opened.refresh()
    known = sorted({row.evaluator for rows in scores_by_execution(opened).values() for row in rows})
    several = len(known) > 1
    if several:
        typer.echo(f"verdicts of {', '.join(known)}: whoever trains on it names the reward")
    flag = f" --evaluator {stored[0].evaluator}" if several else ""
    typer.echo(f"is it trained: gyre explain {run} {stored[0].execution_id}{flag}")


def _status(failed: bool, skipped: bool) -> ScoreStatus:
    if failed and skipped:
        raise ConfigError("wanted --failed or --skipped, got both; an evaluator that was not run cannot fail")
    return ScoreStatus.FAILED if failed else ScoreStatus.SKIPPED if skipped else ScoreStatus.SCORED


# A score may be negative: -0.5 is no option.
score.context_settings = {"ignore_unknown_options": True}  # type: ignore[attr-defined]
