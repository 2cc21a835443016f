"""`gyre query`: a few lines over `gyre_data.sql`."""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from gyre_data.errors import ConfigError
from gyre_data.frame import rows
from gyre_data.printable import printable
from gyre_data.query import batches, describe
from gyre_data.scores import known_weights
from gyre_data.store import find_run
from gyre_data.store import open as open_run

from .layout import screen, show
from .query_text import Writes, save, table_lines, view_lines, write_csv, write_json

__all__ = ["query"]

_SHOWN = 100  # rows on a terminal


def query(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN...] [SQL]", help="Run folders (left out, the last), one SELECT.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Save to a .parquet, .arrow, .csv or .json file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Rows shown as text; 0 for all. Left out, 100 on a terminal.")
    ] = None,
    j_max: Annotated[int, typer.Option("--j-max", help="Trajectories kept per execution; 0 keeps all.")] = 5,
    evaluator: Annotated[
        list[str] | None, typer.Option(metavar="NAME[=WEIGHT]", help="Evaluator of the reward; may repeat.")
    ] = None,
) -> None:
    """Ask runs anything by SQL (DuckDB); without SQL, list the views and their columns.

    Views: executions, calls, nodes, messages, tool_calls, paths, trainable_tokens, scores, admission, excluded, and
    every stored table. SQL reads the runs and nothing else: no other file, and nothing is changed.
    """
    runs, sql = (words[:-1], words[-1]) if words and _is_sql(words[-1]) else (words or [], None)
    if (out is not None) + as_json + as_csv > 1:
        raise ConfigError("wanted one of --json, --csv and -o, got several; a file's ending says what it holds")
    folders = [find_run(run) for run in runs]
    console = screen()
    if sql is None:
        if out is not None or as_csv:
            raise ConfigError("wanted SQL with -o and --csv, got none; write it in quotes, with blanks in it")
        if as_json:
            told = {name: {"doc": doc, "columns": columns} for name, (doc, columns) in describe().items()}
            typer.echo(json.dumps(told, indent=1))
            return
        show(view_lines(describe(), " ".join(runs) or "RUN", console.width), console)
        return
    opened = [open_run(folder) for folder in folders or [find_run()]]
    reader = batches(opened, sql, j_max=j_max or None, evaluators=known_weights(evaluator, opened))
    if out is not None:
        typer.echo(f"{out}: {save(reader, out):,} rows")
    elif as_json or as_csv:
        (write_json if as_json else write_csv)(reader, _Signs(sys.stdout) if sys.stdout.isatty() else sys.stdout)
    else:
        shown = limit if limit is not None else _SHOWN if console.is_terminal else 0
        every = (row for batch in reader for row in rows(batch))
        found = list(islice(every, shown + 1 if shown else None))
        more = bool(shown) and len(found) > shown
        width = console.width if console.is_terminal else None
        show(table_lines(reader.schema.names, found[: shown or None], width=width, more=more), console)


class _Signs:
    """A terminal that is shown control characters and never given one."""

    def __init__(self, out: Writes) -> None:
        self._out = out

    def write(self, text: str, /) -> int:
        """Write `text` with signs in it."""
        return self._out.write(printable(text))


def _is_sql(word: str) -> bool:
    """A query has blanks in it, and is no folder's name."""
    return len(word.split()) > 1 and not os.path.exists(word)
