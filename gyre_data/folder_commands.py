"""`gyre compact`: a few lines over `compact`. What changes a folder shows a plan first; `--yes` does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from . import compact as compaction
from .show import folder_text
from .store import find_run

__all__ = ["compact"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it the plan is shown.")]
RunFolder = Annotated[Path | None, typer.Argument(help="Run folder; without it, the last run under ./runs.")]


def compact(
    run: RunFolder = None,
    cold: Annotated[bool, typer.Option(help="Compress: smaller, but no longer mapped without a copy.")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Rewrite a run as few large files, each execution's nodes depth first, and remove the old files.

    No row changes. Files that a tag names stay. Exit status 2 while somebody records into the run.
    """
    path = find_run(run)
    done = compaction.compact(path, cold=cold) if yes else compaction.plan_compaction(path, cold=cold)
    _print(done, as_json, folder_text.compact_lines(done))


def _print(record: Any, as_json: bool, lines: Sequence[str]) -> None:
    typer.echo(json.dumps(asdict(record), default=str, indent=1) if as_json else "\n".join(lines))
