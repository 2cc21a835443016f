"""Ports and child processes."""

import socket
from pathlib import Path

import pytest

from gyre_data.child import answers, free_port, gyre_child, run_gyre
from gyre_data.errors import EngineError, GyreError


def test_a_port_that_is_taken_is_not_given() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port
    assert free_port(port) == port


def test_a_child_that_does_not_come_up_shows_its_log(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    assert not answers(nobody)
    with (
        pytest.raises(EngineError, match="nonexistent"),
        gyre_child(["verify", "nonexistent"], tmp_path / "log", nobody),
    ):
        pass
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(GyreError, match="nonexistent"):
        run_gyre(["verify", "nonexistent"], tmp_path / "log")
    assert "Usage" in run_gyre(["verify", "--help"], tmp_path / "log")
