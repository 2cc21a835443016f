"""Starting `gyre` commands as child processes and waiting until they answer."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import EngineError, GyreError

__all__ = ["answers", "free_port", "gyre_child", "run_gyre", "start_gyre", "stop"]


_PORTS = range(10_000, 32_000)
"""Below those that systems give to outgoing connections, any of which could take it before a child listens."""
_TRIES = 100


def free_port(preferred: int = 0) -> int:
    """A TCP port of the loopback address that nobody listens on now: `preferred` if it is one."""
    # From the system's own source: seeded processes would draw the same ones.
    drawn = random.SystemRandom().sample(_PORTS, _TRIES)
    for port in (*([preferred] if preferred else ()), *drawn, 0):
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


def _command(arguments: Sequence[str], module: str = "gyre_data") -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def run_gyre(arguments: Sequence[str], log: Path) -> str:
    """Run `gyre ARGUMENTS` to its end and return what it printed; stderr goes to `log`. Raise when it fails.

    Whatever interrupts the wait ends the command first.
    """
    with log.open("ab") as errors:
        child = subprocess.Popen(
            _command(arguments), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    with child:
        try:
            printed, _ = child.communicate()
        except BaseException:
            stop(child)
            raise
    if child.returncode != 0:
        tail = (log.read_text(errors="replace") + printed)[-800:].strip()
        raise GyreError(f"`gyre {' '.join(arguments)}` exited {child.returncode}; its log {log} ends:\n{tail}")
    return printed


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


def start_gyre(
    arguments: Sequence[str], log: Path, *, env: Mapping[str, str] | None = None, module: str = "gyre_data"
) -> subprocess.Popen[bytes]:
    """Start `gyre ARGUMENTS`, or another module with them, in a session of its own, which ^C does not reach.

    Its output goes to `log`.
    """
    with open(log, "ab", opener=_private) as output:
        return subprocess.Popen(
            _command(arguments, module),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )


def stop(child: subprocess.Popen[Any]) -> None:
    """End a child that leads a session of its own, and wait until it is gone; what it left there ends with it."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(20)
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group that has ended
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
