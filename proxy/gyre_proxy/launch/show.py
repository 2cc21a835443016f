"""What `gyre run` shows while it works: a table on a terminal, a line per finished execution elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .supervisor import Watched

__all__ = ["Board"]


class Board:
    """A live view of the executions; on no terminal, one line when an execution is done; `quiet` prints nothing."""

    def __init__(self, *, quiet: bool, total: int) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self.total = total
        self._said: set[str] = set()
        self._live = (
            Live(console=self.console, refresh_per_second=4) if self.console.is_terminal and not quiet else None
        )

    def __enter__(self) -> Board:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, watched: Mapping[str, Watched]) -> None:
        """Show the present state of every execution."""
        if self._live:
            self._live.update(self._table(watched))
            return
        for one in watched.values():
            if one.state == "done" and one.id not in self._said:
                self._said.add(one.id)
                score = _score(one)
                done = f"{len(self._said)}/{self.total}"
                said = one.error or f"{one.num_calls} calls  {score}"
                self.console.print(f"{done}  {one.id}  {one.task}  {said}", highlight=False, markup=False)

    def _table(self, watched: Mapping[str, Watched]) -> Table:
        table = Table("id", "task", "state", "calls", "context", "doing", "silent", "score", box=None, pad_edge=False)
        now = time.monotonic()
        for one in watched.values():
            silent = "-" if one.state == "done" else f"{now - one.last_event:.0f} s"
            context = "-" if one.prompt_tokens is None else f"{one.prompt_tokens:,}"
            score = "-" if one.score is None else f"{one.score:.2f}"
            table.add_row(
                one.id[:8], one.task, one.state, str(one.num_calls), context, one.error or one.doing, silent, score
            )
        return table


def _score(one: Watched) -> str:
    if one.unscored:
        lines = one.unscored.strip().splitlines()
        head, tail = lines[0], lines[-1] if len(lines) > 1 else ""
        return f"evaluator failed: {head if not tail else head.split(':')[0] + ': ' + tail}"
    return "no score" if one.score is None else f"score {one.score:.2f}"
