"""A controller in a process of its own; duties go into a file, events come from one: python -m ... FOLDER."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gyre_sched.actions import Event, from_json
from gyre_sched.api import Cell, Params
from gyre_sched.controller import Controller, Duty
from gyre_sched.policies import Waterlevel
from gyre_sched.state import State

STEPS, BATCH, MEMBERS = 6, 2, 2


class Folder:
    """The world as two files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self, after: int) -> Sequence[tuple[int, Event]]:
        lines = (self.path / "events.jsonl").read_text().split("\n")[:-1]
        return [(number, from_json(told)) for number, told in map(json.loads, lines) if number > after]  # type: ignore[misc]

    def do(self, duty: Duty) -> None:
        with (self.path / "duties.jsonl").open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(duty)).encode() + b"\n")


def fresh() -> State:
    cells = [Cell(id=f"c{i}", position=i, capacity=4, core=i == 0) for i in range(3)]
    return State(Params(batch_groups=BATCH, group_size=MEMBERS, microsteps_per_group=2), cells)


def main(path: Path) -> None:
    controller = Controller(fresh(), Waterlevel(burst=2, depth=2.0), Folder(path), path / "ledger.jsonl")
    while controller.state.version < STEPS:
        if not controller.turn():
            time.sleep(0.002)
    controller.close()


if __name__ == "__main__":
    # A killed process leaves what it wrote to the kernel, so the tests need not wait for the disk.
    os.fsync = lambda fd: None  # type: ignore[assignment]
    main(Path(sys.argv[1]))
