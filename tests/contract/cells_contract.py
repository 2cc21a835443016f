"""What a place for cells must do, as tests that the test module of each subclasses.

The subclass gives `make`, which opens the place again each time it is called, as controllers that come back do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gyre_sched.cells.processes import Processes, Program, Slot, SlotTakenError
from tests.support.engines import wait_until

Make = Callable[[], Processes]
SERVES = """
import http.server, sys
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), http.server.BaseHTTPRequestHandler).serve_forever()
"""


def sleeper(epoch: int = 0, kind: str = "rollout", code: str = "import time; time.sleep(600)") -> Program:
    return Program(kind=kind, epoch=epoch, command=(sys.executable, "-S", "-c", code))


def running(place: Processes, cell: str = "c0") -> Slot:
    slot = place.slot(cell)
    assert slot is not None
    assert slot.running
    return slot


class CellsContract:
    """Subclassed by a test module for each place; `pid` below is of the machine where the cell runs, here this one."""

    def test_a_cell_is_started_once_and_found_by_the_next_controller(self, make: Make) -> None:
        first = make()
        assert first.slot("c0") is None
        slot = first.start("c0", sleeper())
        assert (slot.kind, slot.epoch, slot.running) == ("rollout", 0, True)
        assert first.start("c0", sleeper()) == slot
        second = make()
        assert running(second) == slot
        assert second.start("c0", sleeper()) == slot
        os.kill(slot.pid, 0)

    def test_a_taken_cell_is_not_given_away(self, make: Make) -> None:
        place = make()
        slot = place.start("c0", sleeper())
        for other in (sleeper(epoch=1), sleeper(kind="train")):
            with pytest.raises(SlotTakenError, match="end it first"):
                place.start("c0", other)
        assert running(place) == slot
        assert place.end("c0", grace_s=5.0)
        later = place.start("c0", sleeper(epoch=1))
        assert later.epoch == 1
        assert later.pid != slot.pid

    def test_the_command_is_told_where_to_listen_and_others_reach_it_there(self, make: Make) -> None:
        import http.client

        place = make()
        program = Program(
            kind="train", epoch=3, command=(sys.executable, "-S", "-c", SERVES, "{host}", "{port}"), env={"A": "b"}
        )
        host, _, port = place.start("c1", program).address.partition(":")

        def answers() -> bool:
            try:
                connection = http.client.HTTPConnection(host, int(port), timeout=5)
                connection.request("GET", "/")
                return connection.getresponse().status == 501
            except OSError:
                return False

        wait_until(answers, "an answer")

    def test_a_killed_cell_is_seen_and_may_be_started_again(self, make: Make) -> None:
        place, later = make(), make()
        slot = place.start("c0", sleeper())
        os.kill(slot.pid, signal.SIGKILL)
        for one in (place, later):
            wait_until(lambda one=one: not one.slot("c0").running, "its end to be seen")  # type: ignore[union-attr]
        again = later.start("c0", sleeper())
        assert again.running
        assert again.pid != slot.pid

    def test_one_that_will_not_end_is_killed_with_its_children(self, make: Make, tmp_path: Path) -> None:
        place = make()
        code = (
            "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "child = subprocess.Popen(['sleep', '600']); "
            f"open({str(tmp_path / 'child')!r} + '.new', 'w').write(str(child.pid)); "
            f"os.rename({str(tmp_path / 'child')!r} + '.new', {str(tmp_path / 'child')!r}); time.sleep(600)"
        )
        place.start("c0", sleeper(code=code))
        wait_until((tmp_path / "child").exists, "the child")
        assert not place.end("c0", grace_s=0.2)
        slot = place.slot("c0")
        assert slot is not None
        assert not slot.running
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: gone(child), "its child to be gone")

    def test_a_stopped_cell_is_killed_all_the_same(self, make: Make) -> None:
        place = make()
        slot = place.start("c0", sleeper())
        os.kill(slot.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(slot.pid) == "T", "it to stop")
        assert not place.end("c0", grace_s=0.1)
        assert gone(slot.pid)

    def test_what_cannot_be_started_says_so(self, make: Make) -> None:
        place = make()
        with pytest.raises(OSError, match="no-such-program"):
            place.start("c0", Program(kind="train", epoch=0, command=("no-such-program",)))

    def test_a_place_that_was_given_back_can_be_taken_again(self, make: Make) -> None:
        place = make()
        slot = place.start("c0", sleeper())
        place.release("c0")
        assert gone(slot.pid)
        place.release("c0")
        assert place.start("c0", sleeper(epoch=1)).running

    def test_ending_what_is_not_there_does_nothing(self, make: Make) -> None:
        place = make()
        assert place.end("c0", grace_s=0.1)
        place.start("c0", sleeper(code="pass"))
        wait_until(lambda: not place.slot("c0").running, "its end")  # type: ignore[union-attr]
        assert place.end("c0", grace_s=900.0)  # a test has less time than that


def state_of(pid: int) -> str:
    """As the kernel names it; X for one that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def gone(pid: int) -> bool:
    return state_of(pid) in "ZX"
