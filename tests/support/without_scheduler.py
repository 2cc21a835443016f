"""The tree as it is when somebody deletes gyre_sched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.engines import ROOT

__all__ = ["copied", "ran"]

_ABSENT = 'raise ModuleNotFoundError("gyre_sched was deleted", name="gyre_sched")\n'


def copied(folder: Path) -> Path:
    """Sources and tests without gyre_sched, which cannot be found elsewhere either, installed or not."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("gyre_data", "gyre_train", "proxy", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("cli.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "gyre_sched.py").write_text(_ABSENT)
    return folder


def ran(tree: Path, *command: str, timeout_s: float = 280) -> subprocess.CompletedProcess[str]:
    """What Python makes of it there."""
    path = os.pathsep.join([str(tree), str(tree / "proxy")])
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
