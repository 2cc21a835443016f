"""A disk that is full, by the kernel's own ENOSPC: nothing acknowledged is lost, and with room it goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_data.compact import compact
from gyre_data.convert.exporting import export
from gyre_data.errors import CaptureError, GyreError
from gyre_data.pins import tag
from gyre_data.reader import Run
from gyre_data.removal import remove
from gyre_data.scores import score
from gyre_data.store import RunWriter
from gyre_data.verify import verify
from tests.crash.test_runs import whole_calls, write_call


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte and a half, whose kernel says ENOSPC."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root can mount a disk of a size")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1536k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine allows no mounts")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 512)


def test_a_full_disk_loses_no_acknowledged_call(small_disk: Path) -> None:
    path, ballast = small_disk / "run", small_disk / "ballast"
    acknowledged, failed = [], []
    with RunWriter(path) as writer:
        for number in range(3):
            acknowledged.append(write_call(writer, number))
        fill(ballast)
        for number in range(3, 60):
            try:
                acknowledged.append(write_call(writer, number))
            except CaptureError as error:
                failed.append(str(error))
        assert len(failed) > 10
        assert all("No space left" in text and "free space" in text for text in failed)
        assert whole_calls(path) == acknowledged
        ballast.unlink()
        acknowledged.append(write_call(writer, 100))
    assert sorted(whole_calls(path)) == sorted(acknowledged)
    assert verify(path).problems == ()


def test_a_disk_that_is_full_when_a_writer_closes(small_disk: Path) -> None:
    path, ballast = small_disk / "run", small_disk / "ballast"
    writer = RunWriter(path)
    acknowledged = [write_call(writer, number) for number in range(20)]
    fill(ballast)
    with contextlib.suppress(OSError, GyreError):
        writer.close()
    assert whole_calls(path) == acknowledged
    ballast.unlink()
    RunWriter(path).close()
    assert sorted(whole_calls(path)) == sorted(acknowledged)
    assert verify(path).problems == ()


def test_a_disk_that_is_full_when_a_folder_is_changed(small_disk: Path) -> None:
    """The folder is as it was, and the change succeeds when there is room."""
    path, ballast = small_disk / "run", small_disk / "ballast"
    for start in (0, 10):
        with RunWriter(path) as writer:
            acknowledged = [write_call(writer, start + number) for number in range(10)]
    before = {file: file.read_bytes() for file in path.rglob("*.arrow")}
    fill(ballast)
    for change in (
        lambda: compact(path),
        lambda: tag(path, "v1"),
        lambda: remove(path, ["e_1"]),
        lambda: score(path, "e_1", 1.0, evaluator="x"),
        lambda: export(Run(path), small_disk / "copy"),
    ):
        with pytest.raises((OSError, GyreError), match="No space left"):
            change()
        assert {file: file.read_bytes() for file in path.rglob("*.arrow") if not file.name.startswith(".")} == before
        assert verify(path).problems == ()
    assert whole_calls(path)[-10:] == acknowledged
    ballast.unlink()
    compact(path)
    assert len(whole_calls(path)) == 20
    assert verify(path).problems == ()
