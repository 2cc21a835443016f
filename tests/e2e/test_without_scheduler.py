"""Deleting gyre_sched takes nothing away but scheduling: inspection here, recording and training in tests/real."""

from __future__ import annotations

from pathlib import Path

from tests.support.without_scheduler import copied, ran


def test_inspection_works_and_simulate_says_what_is_missing(tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    for command in (("tree", "sample"), ("stats", "sample"), ("verify", "sample")):
        done = ran(tree, "cli.py", *command)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    done = ran(tree, "cli.py", "simulate")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "gyre_sched" in done.stderr
