"""The formats that can be read, and which one a file is of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from gyre_data.errors import ConfigError

from . import api_log, atif, chat, claude_code, codex, pi, swe_agent
from .calls import Session
from .lines import Files

__all__ = ["FORMATS", "Importer", "expand", "importer_of"]

_LOOKED_AT = 50  # lines; a session may begin with records that say little
_WHOLE = 64 << 20  # bytes of a file that is looked at as one JSON value
_SUFFIXES = (".jsonl", ".json", ".traj", ".ndjson")


class Importer(Protocol):
    """A module that reads one format."""

    FORMAT: str
    VERSION: int

    def knows(self, record: Mapping[str, Any]) -> bool:
        """Whether a line (or a whole file that is one object) is of this format."""

    def belongs(self, path: Path) -> bool:
        """Whether a file is read with another one, not by itself."""

    def sessions(self, path: Path, files: Files, owners: dict[str, str]) -> Iterator[Session]:
        """The sessions of a file."""


# In the order in which they are asked whether they know a record.
_ALL: tuple[Importer, ...] = (claude_code, codex, pi, atif, swe_agent, api_log, chat)
FORMATS: dict[str, Importer] = {module.FORMAT: module for module in _ALL}


def expand(source: Path) -> list[Path]:
    """The files that a source means: itself, or what lies in the folder, in the order of names."""
    if source.is_dir():
        found = sorted(path for path in source.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
        if not found:
            raise ConfigError(f"wanted sessions in {source}, found no {', '.join(_SUFFIXES)} file; check the path")
        return found
    if not source.is_file():
        raise ConfigError(f"wanted a session file or a folder of them, found nothing at {source}; check the path")
    return [source]


def importer_of(path: Path) -> Importer | None:
    """The importer whose format the file's first records are of; None when no format is known."""
    for record in _first_records(path):
        for module in FORMATS.values():
            if module.knows(record):
                return module
    return None


def _first_records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for _, line in zip(range(_LOOKED_AT), file, strict=False):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
    if path.stat().st_size <= _WHOLE:
        try:
            whole = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return
        if isinstance(whole, dict):
            yield whole
        elif isinstance(whole, list):
            yield from (one for one in whole[:_LOOKED_AT] if isinstance(one, dict))
