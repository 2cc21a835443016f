"""`gyre diff` and `gyre search`: a few lines each over the library calls of the same name."""

from __future__ import annotations

from typing import Annotated

import typer

from gyre_data.diff import diff_paths
from gyre_data.errors import ConfigError
from gyre_data.execution import executions, short_id
from gyre_data.path import Path
from gyre_data.search import search as search_run

from .compare_text import diff_lines, hit_lines
from .layout import print_json, screen, show
from .target import Target, split_run, targets, where_of

__all__ = ["diff", "search"]

_ROLES = ("system", "user", "assistant", "tool")
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def diff(
    words: Annotated[
        list[str], typer.Argument(metavar="[RUN] A B", help="Two of EXECUTION or EXECUTION:CALL; RUN before them.")
    ],
    full: Annotated[bool, typer.Option("--full", help="Show long texts whole.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two branches, two calls, or two rollouts of a task: messages, tool arguments, outcome, reward.

    An execution without a call is its main path: `gyre diff e7f3 b02c`. Branches: `gyre diff e7f3:c88 e7f3:c191`.
    """
    run, rest = split_run(words, 2)
    if len(rest) != 2:
        raise ConfigError(f"wanted two executions or calls to compare, got {' '.join(rest) or 'none'}; see --help")
    a, b = targets(run, rest)
    found, console = diff_paths(_path(a), _path(b)), screen()
    if as_json:
        print_json(found)
        return
    names = (_name(a), _name(b))
    show(diff_lines(found, names=names, where=where_of(run), width=console.width, full=full), console)


def _path(found: Target) -> Path:
    return found.execution.main if found.number is None else found.execution.path(found.call.call_id)


def _name(found: Target) -> str:
    calls = found.execution.tree.calls
    number = found.number or next(n for n, c in enumerate(calls, 1) if c is found.execution.main.call)
    return f"{found.short}:c{number}"


def search(
    words: Annotated[list[str], typer.Argument(metavar="[RUN] TEXT", help="What to look for; RUN before it.")],
    role: Annotated[str | None, typer.Option(help=f"Only in messages of this role: {', '.join(_ROLES)}.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Hits shown; 0 shows all.")] = 20,
    as_json: Json = False,
) -> None:
    """Find a text, or the name of a tool, in the messages of a run; case does not matter."""
    run, (text,) = split_run(words, 1, one_is_run=False)
    if role is not None and role not in _ROLES:
        raise ConfigError(f"wanted a role of a message: {', '.join(_ROLES)}; got --role {role}")
    hits = search_run(run, text, role=role, limit=limit or None)
    if as_json:
        print_json(hits)
        return
    known, console = executions(run), screen()
    shorts = {name: short_id(known, name) for name in {hit.execution_id for hit in hits}}
    cut = bool(limit) and len(hits) == limit
    show(hit_lines(hits, text=text, shorts=shorts, where=where_of(run), width=console.width, cut=cut), console)
