"""Ending what an execution started, children that left its process group included.

Each process of an execution inherits its id in GYRE_EXECUTION. On Linux that finds those that made a session of their
own, which a signal to the group does not reach; elsewhere the group is all there is.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

__all__ = ["end_marked", "signal_group"]


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group; one that is gone is fine."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def end_marked(execution: str) -> int:
    """Kill every process that carries this execution's id in its environment; return how many there were."""
    mark, found = f"GYRE_EXECUTION={execution}".encode(), 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                found += 1
        except OSError:  # gone, or somebody else's
            continue
    return found
