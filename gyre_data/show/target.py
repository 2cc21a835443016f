"""What a command's words name: `[RUN] [EXECUTION[:CALL[:TOKEN]]]`, the same for every command that looks at one.

RUN is a folder, or `sample`; left out it is the run made last. EXECUTION is the start of an id, left out the newest.
CALL is its number (`c12`) or the start of its id; TOKEN is a place in the call's output, from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_data.errors import ConfigError, DataError
from gyre_data.execution import Execution, executions, find, newest, short_id
from gyre_data.reader import Run
from gyre_data.store import SAMPLE, find_run
from gyre_data.store import open as open_run
from gyre_data.tree import Forest, Tree
from gyre_data.types import Call

__all__ = ["Target", "find_call", "split_run", "targets", "where_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An execution of a run, and maybe a call and a token of it."""

    run: Run
    execution: Execution
    short: str
    """Shortest start of the execution's id that names it."""
    number: int | None = None
    """Number of the call, from 1."""
    token: int | None = None

    @property
    def call(self) -> Call:
        """The call that was named; ConfigError when none was."""
        if self.number is None:
            raise ConfigError(f"wanted a call of execution {self.short}, got none; write {self.short}:c1")
        return self.execution.tree.calls[self.number - 1]

    @property
    def where(self) -> str:
        """The run as the user may write it again."""
        return where_of(self.run)


def where_of(run: Run) -> str:
    """The run as the user may write it again."""
    return "sample" if run.path == SAMPLE else str(run.path)


def split_run(words: Sequence[str], most: int, *, one_is_run: bool = True) -> tuple[Run, list[str]]:
    """The run that the words begin with, or the one made last, and the `most` words after it at most.

    Of `most` words or fewer the first is the run when there is a folder of that name, unless `one_is_run` is False.
    """
    names_run = bool(words) and (len(words) > most or (one_is_run and _is_run(words[0])))
    if len(words) > most + names_run:
        raise ConfigError(f"wanted at most {most + 1} words, got {len(words)}: {' '.join(words)}; see --help")
    try:
        folder = find_run(words[0] if names_run else None)
    except ConfigError as error:
        if names_run or not words:
            raise
        raise ConfigError(f"{error}; {words[0]} is no folder, so it was taken for an execution of one") from None
    return open_run(folder), list(words[names_run:])


def _is_run(word: str) -> bool:
    return word == "sample" or len(Path(word).parts) > 1 or Path(word).exists()


def targets(run: Run, words: Sequence[str | None]) -> list[Target]:
    """The executions (and calls, tokens) that the words name; None or an empty name is the newest execution."""
    known, forest = executions(run), Forest(run)
    found = []
    for word in words:
        name, _, rest = (word or "").partition(":")
        call, _, token = rest.partition(":")
        execution = Execution(run, known[find(known, name) if name else newest(run)], forest)
        if token and not token.isdigit():
            raise ConfigError(f"wanted EXECUTION:CALL:TOKEN with a number for TOKEN, got {word!r}; tokens count from 0")
        found.append(
            Target(
                run=run,
                execution=execution,
                short=short_id(known, execution.execution_id),
                number=find_call(execution.tree, call) if call else None,
                token=int(token) if token else None,
            )
        )
    return found


def find_call(tree: Tree, name: str) -> int:
    """Number of the call named `c12`, `12` or by the start of its id; DataError unless it is one."""
    if match := re.fullmatch(r"c?(\d{1,9})", name):
        if 1 <= int(match[1]) <= len(tree.calls):
            return int(match[1])
        raise DataError(
            f"wanted a call of execution {tree.execution_id}, got {name!r}; it has c1 to c{len(tree.calls)}"
        )
    hits = [n for n, call in enumerate(tree.calls, 1) if call.call_id.startswith(name)]
    if len(hits) != 1:
        came = f"{len(hits)} of its calls start with it" if hits else "none of its calls starts with it"
        raise DataError(
            f"wanted a call of execution {tree.execution_id} for {name!r}, but {came}; "
            f"write c1 to c{len(tree.calls)}, or see `gyre tree --all` for ids"
        )
    return hits[0]
