"""`gyre doctor`: a few lines over `gyre_data.doctor`."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from gyre_data.doctor import Finding, Level
from gyre_data.doctor import doctor as look
from gyre_data.show.layout import print_json, show

__all__ = ["doctor"]

_STYLE = {Level.OK: "green", Level.MISSING: "dim", Level.WARN: "yellow", Level.FAIL: "red"}
_LABEL = 14
_DEMO = ("train", "local", "proxy")
"""Extras that `gyre demo` needs."""


def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs are to be recorded: its disk is looked at.")] = Path(),
    engine: Annotated[list[str] | None, typer.Option("--engine", metavar="URL", help="Engine URL; may repeat.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder, compared with each engine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Check installation, extras, GPU, RDMA, ports, engines, tokenizer and disk, and say what to do.

    Exit status 1 when something is wrong; what is only missing is no fault.
    """
    found = look(folder, engines=engine or (), tokenizer=tokenizer)
    wrong = [one for one in found if one.level is Level.FAIL]
    if as_json:
        print_json({"ok": not wrong, "findings": found})
    else:
        show(_lines(found, shutil.get_terminal_size().columns))
    if wrong:
        raise typer.Exit(1)


def _lines(found: tuple[Finding, ...], width: int) -> list[Text]:
    lines = []
    for one in found:
        label = Text(f"{one.level:<8}", style=_STYLE[one.level]).append(f"{one.check:<{_LABEL}} ", style="bold")
        lines += _hanging(label, one.found, width)
        if one.do is not None and one.level is not Level.OK:
            lines += _hanging(Text(" " * 8 + " " * _LABEL + " ").append("-> ", style="bold"), one.do, width)
    counts = {level: sum(one.level is level for one in found) for level in Level}
    told = [(f"{counts[Level.FAIL]} wrong", "red"), (f"{counts[Level.WARN]} to look at", "yellow")]
    last = Text()
    for text, style in told:
        last.append(text, style=style if not text.startswith("0") else "").append("  ")
    return [*lines, last.append(f"{counts[Level.OK]} well   next: {_next(found)}")]


def _next(found: tuple[Finding, ...]) -> str:
    """What works here as it is: what is missing has its command above."""
    well = {one.check: one.found for one in found if one.level is Level.OK}
    offered = ["gyre demo"] if well.keys() >= {f"extra {name}" for name in _DEMO} else []
    if "extra proxy" in well:
        offered.append(f"gyre record {well.get('clients', '-- CMD').split(', ')[0]}")
    return " | ".join(offered or ["gyre ls sample"])


def _hanging(label: Text, text: str, width: int) -> list[Text]:
    """Lines of `text` behind `label`, wrapped below their own start."""
    room = max(30, width - len(label.plain))
    parts = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [label.append(parts[0]), *(Text(" " * (8 + _LABEL + 1) + part) for part in parts[1:])]
