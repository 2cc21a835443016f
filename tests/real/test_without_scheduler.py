"""Deleting gyre_sched leaves recording and live training on fixed pools as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.without_scheduler import copied, ran

pytestmark = pytest.mark.real


def test_what_is_recorded_is_trained_on_live(tmp_path: Path) -> None:
    tree = copied(tmp_path / "tree")
    tests = ["tests/e2e/test_train_live.py", "tests/e2e/test_proxy_embedded.py"]
    done = ran(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
