"""Starting `gyre` commands as child processes and waiting until they answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import EngineError, GyreError

__all__ = ["answers", "free_port", "gyre_child", "run_gyre", "start_gyre", "stop"]


def free_port(preferred: int = 0) -> int:
    """A TCP port of the loopback address that nobody listens on now: `preferred` if it is one."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise EngineError("wanted a free port on 127.0.0.1, the system has none left; stop something that listens")


def answers(url: str) -> bool:
    """True when `url` gives any HTTP answer within two seconds."""
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "gyre_data", *arguments]


def run_gyre(arguments: Sequence[str], log: Path) -> str:
    """Run `gyre ARGUMENTS` to its end and return what it printed; stderr goes to `log`. Raise when it fails."""
    with log.open("ab") as errors:
        done = subprocess.run(_command(arguments), stdout=subprocess.PIPE, stderr=errors, text=True, check=False)
    if done.returncode != 0:
        tail = (log.read_text(errors="replace") + done.stdout)[-800:].strip()
        raise GyreError(f"`gyre {' '.join(arguments)}` exited {done.returncode}; its log {log} ends:\n{tail}")
    return done.stdout


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextmanager
def gyre_child(
    arguments: Sequence[str],
    log: Path,
    ready_url: str,
    *,
    wait_s: float = 60.0,
    is_ready: Callable[[str], bool] = answers,
    env: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run `gyre ARGUMENTS` until the block ends; enter it once `is_ready(ready_url)`. Its output goes to `log`.

    `env` is added to its environment: the place for secrets, since arguments can be seen by everybody.
    `is_ready` must tell the child from somebody else who answers at that address.
    """
    child = start_gyre(arguments, log, env=env)
    try:
        deadline = time.monotonic() + wait_s
        while not is_ready(ready_url):
            if child.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-800:].strip()
                raise EngineError(f"`gyre {arguments[0]}` did not come up at {ready_url}; its log {log} ends:\n{tail}")
            time.sleep(0.1)
        yield
    finally:
        stop(child)


def start_gyre(arguments: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `gyre ARGUMENTS` in a session of its own, which ^C does not reach; its output goes to `log`."""
    with open(log, "ab", opener=_private) as output:
        return subprocess.Popen(
            _command(arguments),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )


def stop(child: subprocess.Popen[bytes]) -> None:
    """End a child that `start_gyre` started, and wait until it is gone."""
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
