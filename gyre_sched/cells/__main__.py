"""Run a controller of real cells: python -m gyre_sched.cells SETTINGS.toml

It ends after the last step and ends its cells; killed at any moment, the same command goes on. Exit status 3: the core
does not come up, and whoever starts this again should look at its log first; 1: something else is wrong.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from gyre_sched.errors import CoreError, SchedulerError

from .run import run
from .settings import load

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if len(arguments) != 1:
        print("usage: python -m gyre_sched.cells SETTINGS.toml", file=sys.stderr)
        return 2
    try:
        run(load(Path(arguments[0])))
    except (SchedulerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3 if isinstance(error, CoreError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
