"""`gyre train` on rollouts of its own, as a process: its tasks, and whether what it started is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.engines import ROOT

__all__ = ["MINI", "is_there", "python", "wait_until", "write_tasks"]

MINI = (sys.executable, str(ROOT / "tests" / "support" / "mini_harness.py"), "1")
_JUDGE = """import json, os
json.dump({"value": float(os.environ["GYRE_SAMPLE_INDEX"])}, open(os.environ["GYRE_SCORE_FILE"], "w"))
"""


def write_tasks(folder: Path, command: Sequence[str] = MINI) -> Path:
    """Tasks t0, t1 and t2, whose evaluator `check` gives each execution its number in the group."""
    (folder / "check.py").write_text(_JUDGE)
    tables = [
        f'[[task]]\nid = "t{n}"\nprompt = "p{n}"\ncommand = {json.dumps(list(command))}\n'
        f"evaluator = {json.dumps([sys.executable, str(folder / 'check.py')])}\n"
        for n in range(3)
    ]
    (folder / "tasks.toml").write_text("\n".join(tables))
    return folder / "tasks.toml"


def python(*command: str, **env: str) -> subprocess.Popen[str]:
    """`python -m COMMAND` of this checkout; its stderr is kept."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
    return subprocess.Popen(
        [sys.executable, "-m", *command], env={**os.environ, "PYTHONPATH": path, **env}, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def is_there(pid: int) -> bool:
    """Whether a process lives; one that is dead and not yet taken away does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], trainer: subprocess.Popen[str], seconds: float) -> None:
    """Until it is so; the trainer must live meanwhile."""
    deadline = time.monotonic() + seconds
    while not true():
        assert trainer.poll() is None, trainer.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
