"""`run.json`: when a run was made and with what, and how processes find each other."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import CorruptError
from .schema import MAJOR, MINOR
from .segment import fsync_folder

__all__ = ["INFO", "parse_info", "read_info", "write_info"]

INFO = "run.json"


def read_info(run: Path) -> dict[str, Any]:
    """The object in `run.json` of a run folder; empty when there is none, CorruptError for anything else."""
    path = run / INFO
    try:
        return parse_info(path.read_bytes(), str(path))
    except FileNotFoundError:
        return {}


def parse_info(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`, as read from the `run.json` at `where`; errors as `read_info`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where}: wanted a JSON object, got {error}; mend or remove it") from error
    if not isinstance(found, dict):
        raise CorruptError(f"{where}: wanted a JSON object, got {type(found).__name__}; mend or remove it")
    for name, kind in (("endpoints", dict), ("tokenizer", str), ("read_only", bool)):
        if not isinstance(found.get(name), kind | None):
            wanted = f"wanted {name} to be a {kind.__name__}"
            raise CorruptError(f"{where}: {wanted}, got {found[name]!r}; mend or remove it")
    return found


def write_info(run: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Set fields of `run.json`, replacing the file at once, and return the whole. The caller holds the lock."""
    base = {"format": "gyre", "major": MAJOR, "minor": MINOR, "created_at": datetime.now(UTC).isoformat()}
    info = {**base, **read_info(run), **fields}
    temporary = run / f".run-{secrets.token_hex(6)}.tmp"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(info, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(fd)
        os.rename(temporary, run / INFO)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(run)
    return info
