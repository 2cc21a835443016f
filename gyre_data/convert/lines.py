"""Reads source files line by line: nothing is held but the line, damaged lines are named and passed over."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from gyre_data.errors import ConfigError, DataError
from gyre_data.json_values import without_surrogates

from .calls import Report, SourceFile

__all__ = ["Files", "load_json", "parse_time"]


class Files:
    """The files that an import reads. `progress` is told of every piece of bytes that was read."""

    def __init__(self, progress: Callable[[int], None] | None = None) -> None:
        self._progress = progress or (lambda num_bytes: None)

    def records(self, path: Path, report: Report, done: list[SourceFile]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Line number and object of each line. At the end the file is added to `done`."""
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    digest.update(line)
                    size += len(line)
                    self._progress(len(line))
                    if not line.strip():
                        continue
                    try:
                        record = load_json(line)
                    except ValueError as error:
                        report.damaged.append(f"{path.name}:{number}: {error!s:.200}")
                        continue
                    if isinstance(record, dict):
                        yield number, record
                    else:
                        found = type(record).__name__
                        report.damaged.append(f"{path.name}:{number}: a JSON object was wanted, got a {found}")
        except OSError as error:
            raise ConfigError(f"wanted to read {path}, got {error.strerror}; check the path") from error
        done.append(SourceFile(name=path.name, num_bytes=size, sha256=digest.hexdigest()))

    def whole(self, path: Path, done: list[SourceFile]) -> Any:
        """The JSON value that a file holds as a whole; DataError when it holds none."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"wanted to read {path}, got {error.strerror}; check the path") from error
        self._progress(len(data))
        done.append(SourceFile(name=path.name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        try:
            return load_json(data)
        except ValueError as error:
            raise DataError(
                f"{path.name}: wanted a JSON file, got {error!s:.200}; restore it from its source"
            ) from error


def load_json(data: bytes) -> Any:
    """The value of a JSON text; ValueError for what is none.

    A lone surrogate escape, which clients write when they cut a text inside an emoji, becomes U+FFFD.
    """
    try:
        value = json.loads(data, parse_constant=_no_constant)
        if b"\\ud" in data or b"\\uD" in data:
            value = without_surrogates(value)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no UTF-8 text (byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def parse_time(value: Any) -> datetime | None:
    """A moment as sources write it: ISO 8601 (without a zone: UTC), or a number of seconds or milliseconds."""
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            return None
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e14:
        return datetime.fromtimestamp(value / 1000 if value > 1e11 else value, UTC)
    return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
