"""One owner for a run folder: an flock on its `lock` file, which also says who holds it.

The kernel drops the lock when the holder dies, so a killed process never leaves a folder locked.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .errors import ConfigError
from .run_info import INFO, read_info

__all__ = ["LOCK", "FolderLock", "is_locked", "refuse_written"]

LOCK = "lock"
_ATTEMPTS, _PAUSE_S = 5, 0.02  # `is_locked` of another process holds the lock for an instant


class FolderLock:
    """Holds the folder from construction to `release`; ConfigError names the holder, or says that it is read-only.

    CorruptError for a damaged `run.json`: whether the folder may be written to is not known then.
    """

    def __init__(self, run: Path) -> None:
        if read_info(run).get("read_only"):
            raise ConfigError(
                f"wanted to write to {run}, its run.json says read_only; make a copy that is not: "
                f"gyre export {run} --no-redact -o COPY"
            )
        # A folder may come from anybody: no link in it leads to a file that would be emptied here.
        self._fd = os.open(run / LOCK, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        for attempt in range(_ATTEMPTS):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt + 1 < _ATTEMPTS:
                    time.sleep(_PAUSE_S)
                    continue
                os.close(self._fd)
                raise _written(run) from None
        try:
            self._say()
        except BaseException:
            self.release()
            raise

    def _say(self) -> None:
        said = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(said).encode() + b"\n", 0)

    def release(self) -> None:
        """Let the next owner in. The file stays; only the lock counts."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def refuse_written(run: Path) -> None:
    """ConfigError that names who writes `run`, if somebody does; takes no lock, so it needs no right to write."""
    if is_locked(run / LOCK):
        raise _written(run)


def _written(run: Path) -> ConfigError:
    return ConfigError(f"{run} is being written by {_holder(run)}; use that one or another run folder")


def _holder(run: Path) -> str:
    said = _read_json(run / LOCK)
    text = f"pid {said.get('pid', 'unknown')}"
    proxy = (_read_json(run / INFO).get("endpoints") or {}).get("proxy")
    port = urlsplit(proxy).port if isinstance(proxy, str) else None
    return f"{text}, port {port}" if port else text


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one: a message must not fail over the details it adds."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_locked(path: Path) -> bool:
    """True while some process holds an flock on `path` (a folder's lock file or a segment's commit log)."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
