"""`gyre tree` and its kin: a few lines each over the library calls that they show."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gyre_data.execution import executions

from .layout import screen, show
from .outline import outline
from .target import split_run, targets
from .tree_json import tree_json
from .tree_text import tree_lines

__all__ = ["tree"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
JMax = Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")]


def tree(
    run: Annotated[str | None, typer.Argument(help="Run folder, or sample; left out, the run made last.")] = None,
    execution: Annotated[
        str | None, typer.Argument(help="Start of an id, or EXECUTION:CALL; left out, the newest execution.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=0, help="Fold what lies deeper; left out, what fits.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Give every call a line, with its id and tools.")] = False,
    as_json: Json = False,
    j_max: JMax = 5,
) -> None:
    """Show an execution as a tree: agents, branches, compactions, retries, what is trained and what is not."""
    opened, rest = split_run([word for word in (run, execution) if word is not None], 1)
    (found,) = targets(opened, rest or [None])
    shown = outline(found.execution, j_max=j_max or None)
    if as_json:
        _print_json(tree_json(shown))
        return
    console = screen()
    lines = tree_lines(
        shown, short=found.short, where=found.where, width=console.width, depth=depth, every=every,
        others=len(executions(opened)) - 1,
    )  # fmt: skip
    show(lines, console)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))
