"""Ports and child processes."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gyre_data.child import answers, free_port, gyre_child, run_gyre, stop
from gyre_data.errors import EngineError, GyreError
from gyre_sched.cells import ports
from tests.support.engines import wait_until


def test_a_port_that_is_taken_is_not_given() -> None:
    port = free_port()  # below those of outgoing connections, any of which could take it afterwards
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert free_port(port) != port
    assert free_port(port) == port


@pytest.mark.parametrize("port", [free_port, lambda: ports.free_port("127.0.0.1")], ids=["gyre_data", "gyre_sched"])
def test_a_port_is_none_that_an_outgoing_connection_may_get(port: Callable[[], int]) -> None:
    """One given out could be taken before the child listens."""
    found = [port() for _ in range(20)]
    assert max(found) < 32_768
    assert len(set(found)) > 15, "two that ask at once get others"


def test_a_child_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert not answers(nobody)
    with (
        pytest.raises(EngineError, match="nonexistent"),
        gyre_child(["verify", "nonexistent"], tmp_path / "log", nobody),
    ):
        pass
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_an_interrupted_wait_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(child: subprocess.Popen[str]) -> None:
        started.append(child)
        raise KeyboardInterrupt

    started: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_gyre(["receive", str(tmp_path / "in"), "--port", "0"], tmp_path / "log")
    assert started[0].returncode == -signal.SIGTERM


def test_what_a_child_left_in_its_session_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "started"
    rank = f"import time; open({str(started)!r}, 'w').close(); time.sleep(600)"
    leader = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    child = subprocess.Popen([sys.executable, "-c", leader, rank], start_new_session=True)
    try:
        wait_until(started.exists, "the child's own child", 600)
        (rank_process,) = psutil.Process(child.pid).children()
    finally:
        stop(child)
    psutil.wait_procs([rank_process], timeout=600)
    assert not rank_process.is_running()


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(GyreError, match="nonexistent"):
        run_gyre(["verify", "nonexistent"], tmp_path / "log")
    assert "Usage" in run_gyre(["verify", "--help"], tmp_path / "log")
