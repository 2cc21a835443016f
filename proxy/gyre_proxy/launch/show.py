"""What `gyre run` shows while it works: a table on a terminal, a line per finished execution elsewhere."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gyre_data.show.numbers import duration

from .supervisor import Watched
from .tasks import Task
from .workspace import GitSource

__all__ = ["Board", "described"]

_ROWS = 24


class Board:
    """A live view of the executions; on no terminal, one line when an execution is done; `quiet` prints nothing.

    `total` is the number of executions there will be, None where others decide it.
    """

    def __init__(self, *, quiet: bool, total: int | None, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=quiet)
        self.total, self._header, self._jobs = total, "", 0
        self._said: set[str] = set()
        self._started = time.monotonic()
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

    def about(self, header: str, jobs: int) -> None:
        """Say what runs: a line over the table, and how many run at once."""
        self._header, self._jobs = header, jobs

    def update(self, watched: Mapping[str, Watched]) -> None:
        """Show the present state of every execution."""
        if self._live:
            self._live.update(self.view(watched))
            return
        for one in watched.values():
            if one.state == "done" and one.id not in self._said:
                self._said.add(one.id)
                done = f"{len(self._said)}/{self.total}" if self.total is not None else str(len(self._said))
                said = one.error or f"{one.num_calls} calls  {_score(one)}"
                self.console.print(f"{done}  {one.id}  {one.task}  {said}", highlight=False, markup=False)

    def view(self, watched: Mapping[str, Watched]) -> Group:
        """Header, those that are at work before the newest that are done, who waits for whom, and how far it is."""
        at_work = [one for one in watched.values() if one.state != "done"]
        done = [one for one in watched.values() if one.state == "done"]
        header = Text(f"{self._header}  {sum(o.state == 'running' for o in at_work)} of {self._jobs} running")
        room = max(0, _ROWS - len(at_work))
        table = _table([*at_work[:_ROWS], *(done[-room:] if room else [])])
        hidden = len(watched) - table.row_count
        lines = [Text(f"and {hidden} more", style="dim")] if hidden else []
        return Group(header, table, *lines, _waiting(at_work), self._progress(done))

    def _progress(self, done: Sequence[Watched]) -> Text:
        ends = Counter(one.end_reason for one in done)
        lost = ends["infra_fault"] + ends["cancelled"]
        counted = len(done) - lost
        text = Text(f"{counted}/{self.total} done" if self.total is not None else f"{counted} done")
        if self.total is not None and 0 < counted < self.total:
            each = (time.monotonic() - self._started) / counted
            text.append(f", ETA {duration(each * (self.total - counted))}")
        told = [(sum(o.score is not None for o in done), "scored", "")]
        told += [(ends["harness_timeout"] + ends["overall_timeout"], "timed out", ""), (ends["crashed"], "crashed", "")]
        told += [(sum(bool(o.unscored) for o in done), "evaluator failed", "red"), (lost, "lost", "red")]
        for index, (count, name, style) in enumerate([one for one in told if one[0]]):
            text.append(": " if not index else ", ").append(f"{count} {name}", style=style)
        return text


def _table(shown: Sequence[Watched]) -> Table:
    table = Table("id", "task", "state", "calls", "context", "doing", "silent", "score", box=None, pad_edge=False)
    now = time.monotonic()
    for one in shown:
        silent = "-" if one.state == "done" else f"{now - one.last_event:.0f} s"
        context = "-" if one.prompt_tokens is None else f"{one.prompt_tokens:,}"
        score = Text("failed", style="red") if one.unscored else "-" if one.score is None else f"{one.score:.2f}"
        doing = Text(one.error, style="red", overflow="ellipsis", no_wrap=True) if one.error else Text(one.doing)
        state = one.state if one.state != "done" else str(one.end_reason or "done").replace("harness_", "")
        table.add_row(Text(one.id[:8]), Text(one.task), state, str(one.num_calls), context, doing, silent, score)
    return table


def _waiting(at_work: Sequence[Watched]) -> Text:
    """Who waits for whom."""
    waits = [
        (sum(bool(one.in_flight) for one in at_work if one.state == "running"), "engine"),
        (sum(one.state == "evaluating" for one in at_work), "evaluator"),
        (sum(one.state == "to judge" for one in at_work), "a free evaluator"),
    ]
    told = ", ".join(f"{name} {count}" for count, name in waits if count) or "the harnesses themselves"
    silent = max((time.monotonic() - one.last_event for one in at_work), default=0.0)
    return Text(f"waiting on: {told}; longest silence {silent:.0f} s" if at_work else "")


def _score(one: Watched) -> str:
    if one.unscored:
        lines = one.unscored.strip().splitlines()
        head, tail = lines[0], lines[-1] if len(lines) > 1 else ""
        return f"evaluator failed: {head if not tail else head.split(':')[0] + ': ' + tail}"
    return "no score" if one.score is None else f"score {one.score:.2f}"


def described(tasks: Sequence[Task], as_json: bool) -> str:
    """Tasks as they are understood, for `--dry-run`."""
    rows = [
        {
            "id": task.id,
            "workspace": _source(task),
            "command": list(task.command or task.worker or ()),
            "evaluator": list(task.evaluator or ()),
            "container": task.container is not None,
            "timeout_s": task.timeout_s,
        }
        for task in tasks
    ]
    if as_json:
        return json.dumps({"tasks": rows}) + "\n"
    lines = [f"{row['id']}  workspace {row['workspace']}  harness {row['timeout_s']:.0f} s" for row in rows]
    return "\n".join([*lines, f"{len(rows)} tasks   next: the same without --dry-run", ""])


def _source(task: Task) -> str:
    if isinstance(task.workspace, GitSource):
        return f"{task.workspace.repository}@{task.workspace.ref}"
    return str(task.workspace) if task.workspace else "empty"
