"""`gyre tree` and its kin: a few lines each over the library calls that they show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gyre_data.breaks import breaks as find_breaks
from gyre_data.decode import decoder
from gyre_data.execution import executions
from gyre_data.retries import loops as find_loops
from gyre_data.retries import lost_calls

from .layout import print_json, screen, show
from .outline import outline
from .path_text import path_json, path_lines
from .target import Target, split_run, targets
from .tree_json import tree_json
from .tree_text import tree_lines
from .trouble_text import break_lines, retry_lines

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
    full: Annotated[bool, typer.Option("--full", help="EXECUTION:CALL: show every message and text whole.")] = False,
    retries: Annotated[
        bool, typer.Option("--retries", help="List calls that were lost or repeated, and loops.")
    ] = False,
    prefix_breaks: Annotated[
        bool, typer.Option("--breaks", help="Report each prefix break: first difference, both sides, likely cause.")
    ] = False,
    tokenizer: Annotated[str | None, typer.Option(help="--breaks: decode ids with this tokenizer's folder.")] = None,
    as_json: Json = False,
    j_max: JMax = 5,
) -> None:
    """Show an execution as a tree: agents, branches, compactions, retries, what is trained and what is not.

    EXECUTION:CALL (`e7f3:c12`) shows the path to that call as a conversation instead.
    """
    opened, rest = split_run([word for word in (run, execution) if word is not None], 1)
    (found,) = targets(opened, rest or [None])
    if found.number is not None:
        _path(found, full, as_json)
    elif retries:
        _retries(found, as_json)
    elif prefix_breaks:
        _breaks(found, tokenizer, as_json)
    elif as_json:
        print_json(tree_json(outline(found.execution, j_max=j_max or None)))
    else:
        _tree(found, j_max or None, depth, every)


def _tree(found: Target, j_max: int | None, depth: int | None, every: bool) -> None:
    console = screen()
    lines = tree_lines(
        outline(found.execution, j_max=j_max),
        short=found.short,
        where=found.where,
        width=console.width,
        depth=depth,
        every=every,
        others=len(executions(found.run)) - 1,
    )
    show(lines, console)


def _path(found: Target, full: bool, as_json: bool) -> None:
    call, console = found.call, screen()
    path = found.execution.path(call.call_id)
    if as_json:
        print_json(path_json(path))
        return
    show(path_lines(path, call, short=found.short, where=found.where, width=console.width, full=full), console)


def _retries(found: Target, as_json: bool) -> None:
    lost, loops, console = lost_calls(found.execution.tree), find_loops(found.execution), screen()
    if as_json:
        print_json({"lost": [asdict(one) for one in lost], "loops": [asdict(one) for one in loops]})
        return
    show(retry_lines(lost, loops, short=found.short, where=found.where, width=console.width), console)


def _breaks(found: Target, tokenizer: str | None, as_json: bool) -> None:
    broken, console = find_breaks(found.execution), screen()
    if as_json:
        print_json([asdict(one) for one in broken])
        return
    decode = decoder(found.run, tokenizer)
    show(break_lines(broken, short=found.short, where=found.where, width=console.width, decode=decode), console)
