"""`gyre compact`, `rm`, `tag` and `merge`: a few lines over library calls.

What rewrites or removes shows a plan first; `--yes` does it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from . import compact as compaction
from . import pins
from .merge import merge as merge_runs
from .printable import printable
from .removal import plan_removal, remove
from .show import folder_text
from .store import find_run

__all__ = ["compact", "merge", "rm", "tag"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it the plan is shown.")]
RunFolder = Annotated[Path | None, typer.Argument(help="Run folder; without it, the run made last.")]


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


def rm(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    executions: Annotated[list[str] | None, typer.Argument(help="Starts of execution ids.")] = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Clear their bytes from the disk, and those of all removed before.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove executions: nobody shows them any more. With --purge their bytes go too; there is no way back then.

    Texts that other executions share stay. Exit status 2 while somebody records into the run.
    """
    done = (remove if yes else plan_removal)(find_run(run), executions or (), purge=purge)
    _print(done, as_json, folder_text.removal_lines(done))


def tag(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    name: Annotated[str | None, typer.Argument(help="Name of the dataset version; left out, all are listed.")] = None,
    note: Annotated[str | None, typer.Option(help="A line on what it is for.")] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Give the tag up; the data stays.")] = False,
    as_json: Json = False,
) -> None:
    """Name what a run holds now. RUN@NAME then opens that version wherever a run is taken, whatever comes later."""
    path = find_run(run)
    if name is None:
        known = pins.tags(path)
        typer.echo(
            json.dumps([asdict(one) for one in known], indent=1)
            if as_json
            else printable(folder_text.tags_text(path, known))
        )
        return
    done = pins.delete_tag(path, name) if delete else pins.tag(path, name, note)
    _print(done, as_json, folder_text.tag_lines(path, done, deleted=delete))


def merge(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or RUN@TAG.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder for the merged run.")],
    as_json: Json = False,
) -> None:
    """Make one new run of several. Ids that two of them share must mean the same; the sources stay as they are."""
    done = merge_runs([find_run(run) for run in runs], out)
    _print(done, as_json, folder_text.merge_lines(done))


def _print(record: Any, as_json: bool, lines: Sequence[str]) -> None:
    typer.echo(json.dumps(asdict(record), default=str, indent=1) if as_json else printable("\n".join(lines)))
