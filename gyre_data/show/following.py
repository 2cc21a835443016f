"""`--follow`: what a command shows, anew whenever a run changes: in place on a terminal, or one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gyre_data.errors import ConfigError
from gyre_data.lock import is_locked
from gyre_data.object_store import RemoteRun
from gyre_data.printable import printable
from gyre_data.reader import Run

__all__ = ["follow_on_screen"]

_LOOK_S = 0.25


def follow_on_screen(
    runs: Sequence[Run], whole: Callable[[], Iterable[Text]], told: Callable[[], None], console: Console
) -> NoReturn:
    """Until ^C: on a terminal the lines of `whole()` in place; into a pipe what `told()` prints, at each change.

    Making them takes half of the time at most, however much the run holds.
    """
    if far := [run for run in runs if isinstance(run, RemoteRun)]:
        raise ConfigError(f"wanted a folder of this machine with --follow, got {far[0].path}; look again without it")
    if not console.is_terminal:
        while True:
            started, writing = time.monotonic(), _writing(runs)
            told()
            sys.stdout.flush()
            _wait(runs, writing, time.monotonic() - started)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            started, writing = time.monotonic(), _writing(runs)
            lines = [*whole()]
            for line in lines:
                line.plain = printable(line.plain)
            live.update(Group(*lines), refresh=True)
            _wait(runs, writing, time.monotonic() - started)


def _writing(runs: Sequence[Run]) -> list[bool]:
    return [is_locked(run.path / "lock") for run in runs]


def _wait(runs: Sequence[Run], writing: list[bool], least_s: float) -> None:
    """Return when a run changed, or when its writer came or went; after `least_s` seconds at the earliest."""
    time.sleep(least_s)
    while True:
        changed = [run.wait(_LOOK_S / len(runs)) for run in runs]
        if any(changed) or writing != _writing(runs):
            return
