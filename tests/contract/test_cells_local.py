"""Cells as processes of this machine, against the contract; and what only these can be put through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_sched.cells.local import LocalProcesses
from tests.contract.cells_contract import CellsContract, Make, running, sleeper
from tests.support.engines import ROOT


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens the same folder of cells."""
    yield lambda: LocalProcesses(tmp_path / "cells")
    place = LocalProcesses(tmp_path / "cells")
    for cell in ("c0", "c1"):
        place.end(cell, grace_s=0.0)


class TestLocalCells(CellsContract):
    """The contract."""


def test_an_id_that_was_given_to_another_process_is_not_taken_for_the_cell(tmp_path: Path, make: Make) -> None:
    place = make()
    slot = place.start("c0", sleeper())
    born = tmp_path / "cells" / "c0" / "born"
    place.end("c0", grace_s=1.0)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        born.write_text(f"{other.pid}\n{born.read_text().splitlines()[1]}0\n")
        found = make().slot("c0")
        assert found is not None
        assert not found.running
        assert make().end("c0", grace_s=0.1)
        assert other.poll() is None  # it is not ours to end
        assert slot.pid != other.pid
    finally:
        other.kill()
        other.wait()


CONTROLLER = """
import os, signal, sys
from pathlib import Path
from gyre_sched.cells import local
from gyre_sched.cells.processes import Program
real = local.subprocess.Popen
def dies(*arguments, **more):
    real(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)
local.subprocess.Popen = dies
program = Program(kind="rollout", epoch=0, command=(sys.executable, "-S", "-c", "import time; time.sleep(600)"))
local.LocalProcesses(Path(sys.argv[1])).start("c0", program)
"""


def test_a_controller_killed_as_it_starts_a_cell_leaves_one_that_the_next_finds(tmp_path: Path, make: Make) -> None:
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", CONTROLLER, str(tmp_path / "cells")], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        slot = make().start("c0", sleeper())
        assert running(make()) == slot
        mine = [pid for pid in os.listdir("/proc") if pid.isdigit() and _cell_of(int(pid), tmp_path)]
        assert mine == [str(slot.pid)]
        make().end("c0", grace_s=1.0)


def _cell_of(pid: int, folder: Path) -> bool:
    """Whether a process writes into this test's folder of cells."""
    try:
        return os.readlink(f"/proc/{pid}/fd/1") == str(folder / "cells" / "c0" / "log")
    except OSError:
        return False
