"""`gyre ls`, `gyre verify` and `gyre export`: a few lines each over `listing`, `verify` and `export`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from .export import Exported, export_run
from .listing import ExecutionSummary, RunSummary, list_executions, list_runs
from .show.numbers import dollars
from .store import find_run, open
from .verify import Report
from .verify import verify as verify_run

__all__ = ["export", "ls", "verify"]

_MAX_SHOWN = 20  # problems of one kind on a screen; --json has them all

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def ls(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without it, the runs under ./runs.")] = None,
    as_json: Json = False,
) -> None:
    """List the executions of a run, or without RUN the runs under ./runs.

    One line an execution: task, group, harness, state or end reason, calls, tokens, newest score.
    """
    found: Sequence[Any] = list_runs() if run is None else list_executions(open(find_run(run)))
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in found], default=str, indent=1))
    elif run is None:
        typer.echo(_run_lines(found) if found else "no run under ./runs; record one with: gyre demo")
    else:
        typer.echo(_execution_lines(found) if found else f"{run} holds no execution yet")
        typer.echo(f"look at one: gyre tree {run} EXECUTION")


def verify(
    run: Annotated[Path | None, typer.Argument(help="Run folder; without it, the last run under ./runs.")] = None,
    as_json: Json = False,
) -> None:
    """Check every byte of a run and whether its rows agree; report damage and mend nothing.

    Exit status 0: clean; 1: problems; 2: the run cannot be opened.
    """
    report = verify_run(find_run(run))
    if as_json:
        typer.echo(json.dumps({**asdict(report), "exit_status": report.exit_status}, indent=1))
    else:
        _show(report)
    raise typer.Exit(report.exit_status)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _execution_lines(found: Sequence[ExecutionSummary]) -> str:
    heads = ("execution", "task", "group", "harness", "state", "calls", "tokens", "sampled", "score", "list price")
    rows: list[tuple[str, ...]] = [heads]
    for e in found:
        bad = f" ({e.num_bad_calls} bad)" if e.num_bad_calls else ""
        score = "-" if e.score_status is None else e.score_status
        if e.score is not None:
            score = f"{e.score:.2f}{' partial' if e.partial else ''} ({e.evaluator})"
        group = "-" if e.group_id is None else e.group_id
        rows.append(
            (
                e.execution_id,
                e.task_id or "-",
                group if e.sample_index is None else f"{group} #{e.sample_index}",
                e.harness or "-",
                e.end_reason or e.state.value,
                f"{e.num_calls}{bad}",
                f"{e.num_tokens:,}",
                f"{e.num_sampled_tokens:,}",
                score,
                "-" if e.cost is None else dollars(e.cost),
            )
        )
    if all(e.cost is None for e in found):
        rows = [row[:-1] for row in rows]
    return _columns(rows)


def _run_lines(found: Sequence[RunSummary]) -> str:
    rows = [("run", "made", "executions", "calls", "tokens", "")]
    for r in found:
        state = r.problem or ("being written" if r.writing else "")
        made = (r.created_at or "-")[:19].replace("T", " ")
        rows.append((r.path, made, str(r.num_executions), str(r.num_calls), f"{r.num_tokens:,}", state))
    return _columns(rows)


def _show(report: Report) -> None:
    shown: Counter[str] = Counter()
    for problem in report.problems:
        shown[problem.kind] += 1
        if shown[problem.kind] <= _MAX_SHOWN:
            typer.secho(f"{problem.kind:10} {problem.where}: {problem.detail}", fg=typer.colors.RED)
    for kind, count in shown.items():
        if count > _MAX_SHOWN:
            typer.secho(f"{kind:10} and {count - _MAX_SHOWN} more; --json lists all", fg=typer.colors.RED)
    for note in report.notes:
        typer.echo(f"note: {note}")
    rows = ", ".join(f"{name} {count:,}" for name, count in report.num_rows.items()) or "none"
    verdict = "clean" if not report.problems else f"{len(report.problems)} problems"
    typer.echo(f"{report.path}: {verdict}; manifest {report.manifest}; rows: {rows}")


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Argument(help="New folder for the copy.")],
    redact: Annotated[bool, typer.Option(help="Take secrets out of the copy.")] = True,
    pattern: Annotated[list[str] | None, typer.Option(help="Regular expression of another secret; may repeat.")] = None,
    as_json: Json = False,
) -> None:
    """Copy a run to a folder that may be given away: secrets are taken out, with the token ids that would tell them.

    Known forms are found (keys with a prefix, PEM blocks, Authorization headers, passwords in URLs and environment
    files); for others give --pattern. What was sampled after a redacted message is not trained from the copy.
    """
    done = export_run(open(find_run(run)), out, redact=redact, patterns=pattern or ())
    if as_json:
        typer.echo(json.dumps({**asdict(done), "path": str(done.path)}, indent=1))
    else:
        typer.echo(_export_line(done, redact))


def _export_line(done: Exported, redact: bool) -> str:
    calls, nodes = done.num_rows.get("calls", 0), done.num_rows.get("nodes", 0)
    head = f"{done.path}: {calls:,} calls, {nodes:,} nodes"
    if not redact:
        return f"{head}; secrets were left in it"
    if not done.secrets:
        return f"{head}; no secret of a known form found, others need --pattern"
    found = ", ".join(f"{kind} {count}" for kind, count in sorted(done.secrets.items()))
    return f"{head}; taken out: {found} ({done.num_nodes_redacted:,} nodes lost their token ids)"
