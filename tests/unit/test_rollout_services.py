"""Services that outlived their trainer are found again by number and start, and nobody else is taken for one."""

import subprocess
import sys
from pathlib import Path

import psutil

from gyre_train.rollout.services import _known_process, _lives, _Service
from tests.support.engines import wait_until


def test_a_controller_says_by_its_status_that_another_start_is_no_use(tmp_path: Path) -> None:
    for status, gave_up in ((3, True), (1, False), (0, False)):
        service = _Service(name="cells", arguments=list, log=tmp_path / "log", ready_url=None, ends=True)
        assert not service.gave_up()
        service.child = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
        service.child.wait()
        assert (service.gave_up(), service.is_done()) == (gave_up, status == 0)


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        created = psutil.Process(child.pid).create_time()
        found = _known_process(child.pid, created)
        assert found is not None
        assert _lives(found)
        assert _known_process(child.pid, created - 5) is None  # the number, given to somebody else since
    finally:
        child.kill()
    wait_until(lambda: not _lives(found), "its end", 20)  # dead, and not taken away yet
    child.wait()
    assert _known_process(child.pid, created) is None
    assert not _lives(None)
