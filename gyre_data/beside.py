"""Files and folders that are there whole or not at all: made beside their place, then put there.

A killed process leaves what it made so far under a hidden name beside the place; the next attempt clears that away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO

from .errors import ConfigError
from .lock import is_locked
from .segment import fsync_folder

__all__ = ["beside", "new_file"]


@contextmanager
def beside(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """An empty file or folder next to `path`, for its owner alone, to be filled and put in its place by the caller.

    It is removed at the end of the block if it is still there, and it is locked until then, so that nobody takes it for
    what a killed process left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    left = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.tmp")
    for one in path.parent.iterdir():
        with contextlib.suppress(PermissionError):  # of somebody else
            if left.fullmatch(one.name) and not is_locked(one):
                _remove(one)
    made = path.parent / f".{path.name}.{token_hex(4)}.tmp"
    if folder:
        made.mkdir(mode=0o700)
    else:
        os.close(os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    fd = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield made
    finally:
        _remove(made)
        os.close(fd)
    fsync_folder(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A file that is there whole and durable, or not at all.

    ConfigError when something is there already, unless `force` lets it be replaced.
    """
    _refuse_existing(path, force=force)
    with beside(path) as made:
        with made.open("r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put: Callable[..., None] = os.replace if force else os.link  # a link never replaces what came in between
        try:
            put(made, path)
        except FileExistsError:
            _refuse_existing(path, force=False)
            raise


def _refuse_existing(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"wanted a file to write, {path} is a folder; name a file in it")
    if path.exists() and not force:
        raise ConfigError(f"wanted a new file to write, {path} is there; name another, or replace it with --force")
