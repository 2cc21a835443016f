"""Lines that fit a terminal: parts that flow over lines, and long labels that wrap below their own start."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, is_dataclass
from datetime import datetime
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gyre_data.printable import printable, printable_json

__all__ = ["RULER", "flow", "hints", "print_json", "screen", "show", "wrapped"]

_NARROWEST = 20
RULER = Console(width=80, no_color=True)
"""A console that only measures and wraps."""


def screen() -> Console:
    """The console that commands print to: no colour into a pipe or with NO_COLOR, and nothing is cut by it."""
    return Console(soft_wrap=True, highlight=False)


def show(lines: Iterable[Text], console: Console | None = None) -> None:
    """Print lines that are laid out already; control characters in them are shown, not obeyed."""
    console = console or screen()
    for line in lines:
        line.plain = printable(line.plain)
        console.print(line)


def print_json(value: Any) -> None:
    """One line of JSON for programs: records as objects, times in ISO form, what is not known null."""
    sys.stdout.write(printable_json(json.dumps(value, ensure_ascii=False, default=_plain)) + "\n")


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def flow(parts: Sequence[Text], width: int, *, indent: int = 2) -> Iterator[Text]:
    """Parts with two blanks between them, on as many lines as they need; a part longer than a line is wrapped."""
    line = Text()
    for part in parts:
        if len(line) and len(line) + 2 + len(part) > width:
            yield line
            line = Text(" " * indent)
        elif len(line) > indent or (len(line) and not line.plain.isspace()):
            line.append("  ")
        line.append_text(part)
        *full, line = wrapped(line, width, indent=indent)
        yield from full
    if line.plain.strip():
        yield line


def hints(told: Sequence[str], width: int) -> Iterator[Text]:
    """What to type next, dim: on one line when it fits, else a line each; a command is never broken."""
    whole = "  ".join(told)
    for line in [whole] if told and len(whole) <= width else told:
        yield Text(line, style="dim")


def wrapped(text: Text, width: int, *, indent: int = 0, guide: Text | None = None) -> list[Text]:
    """`text` on lines of `width`; lines after the first begin with `guide`, or with `indent` blanks."""
    if len(text) <= width and "\n" not in text.plain:
        return [text]
    head = guide if guide is not None else Text(" " * indent)
    room = max(width - len(head), _NARROWEST)
    first, *rest = text.wrap(RULER, max(width, _NARROWEST)) or [text]
    if not rest:
        return [first]
    for line in rest:
        line.rstrip()
    tail = Text(" ").join(rest)
    lines = [first, *(head + line for line in tail.wrap(RULER, room))]
    for line in lines:
        line.rstrip()
    return lines
