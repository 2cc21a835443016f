"""Starting `gyre` commands as child processes and waiting until they answer."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gyre_data.errors import EngineError

__all__ = ["answers", "gyre_child"]


def answers(url: str) -> bool:
    """True when `url` gives any HTTP answer within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


@contextmanager
def gyre_child(arguments: Sequence[str], log: Path, ready_url: str, wait_s: float = 60.0) -> Iterator[None]:
    """Run `gyre ARGUMENTS` until the block ends; enter it once `ready_url` answers. Its output goes to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "gyre_data", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + wait_s
        while not answers(ready_url):
            if child.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-800:].strip()
                raise EngineError(f"`gyre {arguments[0]}` did not come up at {ready_url}; its log {log} ends:\n{tail}")
            time.sleep(0.1)
        yield
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
