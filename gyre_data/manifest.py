"""Manifests: the numbered, immutable list of what a run holds.

`manifest/00000007.json` names every sealed segment (size, rows, CRC-32) and every open one. A reader takes the highest
number and nothing else for truth. Number N + 1 is created by linking a finished temporary file to its name, which fails
if the name exists; so two writers can never both publish the same number, and nobody sees half a manifest.

A manifest may also name executions that were removed: their rows are still in the segments, but nobody may show them.
Such a manifest says major 2, so that a reader that does not know of removals refuses it instead of showing them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .errors import ConfigError, CorruptError, DataError, SchemaError
from .schema import MAJOR, MINOR, TABLES
from .segment import Sealed, fsync_folder

__all__ = [
    "EMPTY",
    "FOLDER",
    "Manifest",
    "check_run",
    "is_recording",
    "manifest_path",
    "newest",
    "numbers",
    "numbers_of",
    "parse",
    "publish",
    "read",
]

FOLDER = "manifest"
_FILE_NAME = re.compile(r"(\d{8}|[1-9]\d{8,})\.json", re.ASCII)
# Names become paths: one that leads out of the folder is not taken, whoever wrote it.
_TABLE_NAME, _STEM = re.compile(r"[a-z_]{1,64}"), re.compile(r"\w{1,64}-\d{1,18}", re.ASCII)
_REMOVALS_MAJOR = 2  # of a manifest that names removed executions; every other one stays at MAJOR


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a run holds, by table: sealed segments in order, and stems of open ones."""

    number: int
    writer: str
    created_at: str
    sealed: Mapping[str, tuple[Sealed, ...]] = field(default_factory=dict)
    open: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    """Executions whose rows nobody may show, sorted."""
    used: Mapping[str, int] = field(default_factory=dict)
    """Highest segment number that each writer ever used here: names are never used twice, even of files long gone."""
    sha256: str = field(default="", compare=False)
    """Of the document, as it says itself."""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of all tables that have a segment."""
        return tuple(sorted({*self.sealed, *self.open}))

    @property
    def known_numbers(self) -> dict[str, int]:
        """`used`, also of a manifest that was written before it was kept."""
        return _used(self)

    def opened(self, table: str, stem: str) -> Manifest:
        """This manifest with one more open segment."""
        return self.with_table(table, self.sealed.get(table, ()), (*self.open.get(table, ()), stem))

    def closed(self, table: str, stem: str, sealed: Sealed | None) -> Manifest:
        """This manifest with `stem` no longer open, and `sealed` in its place unless it held no row."""
        rest = tuple(s for s in self.open.get(table, ()) if s != stem)
        done = tuple(s for s in self.sealed.get(table, ()) if s.name != f"{stem}.arrow")
        return self.with_table(table, (*done, sealed) if sealed else done, rest)

    def with_table(self, table: str, sealed: tuple[Sealed, ...], open_: tuple[str, ...]) -> Manifest:
        """This manifest with exactly these segments of `table`."""
        return replace(self, sealed={**self.sealed, table: sealed}, open={**self.open, table: open_})

    def replaced(self, tables: Mapping[str, tuple[Sealed, ...]], removed: tuple[str, ...]) -> Manifest:
        """This manifest with `tables` holding exactly these sealed segments, and `removed` executions hidden."""
        still_open = {table: stems for table, stems in self.open.items() if table not in tables}
        return replace(self, sealed={**self.sealed, **tables}, open=still_open, removed=removed)

    def stems(self) -> Iterator[tuple[str, str]]:
        """(table, stem) of every segment named, sealed or open."""
        for table, segments in self.sealed.items():
            yield from ((table, one.name.removesuffix(".arrow")) for one in segments)
        for table, stems in self.open.items():
            yield from ((table, stem) for stem in stems)


EMPTY = Manifest(number=0, writer="", created_at="")


def manifest_path(run: Path, number: int) -> Path:
    """Where manifest `number` of `run` lies."""
    return run / FOLDER / f"{number:08d}.json"


def numbers(run: Path) -> list[int]:
    """Numbers of all manifests of `run`, ascending; empty when it has none."""
    try:
        names = os.listdir(run / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return numbers_of(names)


def numbers_of(names: Iterable[str]) -> list[int]:
    """Numbers of those `names` that are names of manifests, ascending."""
    return sorted(int(name[:-5]) for name in names if _FILE_NAME.fullmatch(name))


def newest(run: Path) -> Manifest | None:
    """The manifest of the highest number, or None when there is none yet."""
    found = numbers(run)
    return read(manifest_path(run, found[-1])) if found else None


def check_run(folder: Path) -> None:
    """ConfigError unless a folder is a run."""
    if not numbers(folder):
        came = f"{folder} holds no manifest" if folder.exists() else f"there is no {folder}"
        raise ConfigError(f"wanted a run folder, {came}; `gyre ls` lists the runs here and in ./runs")


def is_recording(run: Path) -> bool:
    """True unless `run` is no run folder, or the own folder of a trainer or scheduler, which looks like one."""
    try:
        current = newest(run)
    except DataError:
        return True  # damaged: whoever opens it says how
    return current is not None and all(name not in TABLES or TABLES[name].owner == "run" for name in current.tables)


def publish(run: Path, change: Callable[[Manifest], Manifest], writer: str) -> Manifest:
    """Publish `change(newest)` as the next number and return it; on a race with another writer, try again on theirs.

    Durable when it returns. `change` may run several times and must only compute.
    """
    folder = run / FOLDER
    temporary = folder / f".{writer}-{secrets.token_hex(6)}.tmp"
    try:
        while True:
            base = newest(run) or EMPTY
            wanted = change(base)
            made = replace(
                wanted,
                number=base.number + 1,
                writer=writer,
                created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
                sealed={t: s for t, s in wanted.sealed.items() if s},
                open={t: s for t, s in wanted.open.items() if s},
                used=_used(base, wanted),
            )
            document = _document(made)
            _write(temporary, json.dumps(document, indent=1).encode() + b"\n")
            try:
                os.link(temporary, manifest_path(run, made.number))
            except FileExistsError:
                continue
            fsync_folder(folder)
            return replace(made, sha256=document["sha256"])
    finally:
        temporary.unlink(missing_ok=True)


def _used(*known: Manifest) -> dict[str, int]:
    used: dict[str, int] = {}
    for one in known:
        for writer, number in one.used.items():
            used[writer] = max(used.get(writer, 0), number)
        for _, stem in one.stems():
            writer, _, digits = stem.rpartition("-")
            if digits.isdigit():
                used[writer] = max(used.get(writer, 0), int(digits))
    return used


def _write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(fd)


def _checksum(document: Mapping[str, Any]) -> str:
    """sha256 of the document without its checksum, as compact JSON with sorted keys."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _document(manifest: Manifest) -> dict[str, Any]:
    document: dict[str, Any] = {
        "format": "gyre-manifest",
        "major": _REMOVALS_MAJOR if manifest.removed else MAJOR,
        "minor": MINOR,
        "number": manifest.number,
        "writer": manifest.writer,
        "created_at": manifest.created_at,
        "tables": {
            table: {
                "sealed": [
                    {"name": s.name, "num_bytes": s.num_bytes, "num_rows": s.num_rows, "crc32": s.crc32}
                    for s in manifest.sealed.get(table, ())
                ],
                "open": list(manifest.open.get(table, ())),
            }
            for table in manifest.tables
        },
    }
    if manifest.used:
        document["used"] = dict(manifest.used)
    if manifest.removed:
        document["removed"] = list(manifest.removed)
    document["sha256"] = _checksum(document)
    return document


def read(path: Path) -> Manifest:
    """Read one manifest; CorruptError when its checksum or number is wrong, SchemaError for a newer major.

    CorruptError, too, when it is gone: none is ever deleted.
    """
    try:
        return parse(path.read_bytes(), path)
    except FileNotFoundError:
        raise CorruptError(
            f"{path}: wanted this manifest, but it is gone; restore it from a copy, or remove the tag that names it"
        ) from None


def parse(data: bytes, path: Path) -> Manifest:
    """The manifest in `data`, as read from `path`; errors as `read`."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"{path}: wanted a JSON manifest, got {error}; see `gyre verify {path.parent.parent}`"
        ) from error
    if not isinstance(document, dict) or document.get("format") != "gyre-manifest":
        raise CorruptError(f"{path}: wanted a manifest of a Gyre run, got other JSON; is this the right folder?")
    if document.get("sha256") != _checksum(document):
        raise CorruptError(f"{path}: its checksum does not match; see `gyre verify {path.parent.parent}`")
    try:
        known = _REMOVALS_MAJOR if document.get("removed") else MAJOR
        if document["major"] > known:
            raise SchemaError(
                f"{path}: format {document['major']}, this release reads up to {known}; upgrade gyre-rl to read it"
            )
        if document["number"] != int(path.stem):
            raise CorruptError(f"{path}: says it is number {document['number']}; it was copied or renamed")
        made = _manifest(document)
        for table, stem in made.stems():
            if not (_TABLE_NAME.fullmatch(table) and _STEM.fullmatch(stem)):
                raise CorruptError(
                    f"{path}: wanted names of segments, got {table}/{stem}; no release of Gyre wrote this"
                )
        return made
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{path}: wanted the fields of a manifest, got {error!r}; restore it from a copy") from error


def _manifest(document: Mapping[str, Any]) -> Manifest:
    tables = document["tables"]
    return Manifest(
        number=document["number"],
        writer=document["writer"],
        created_at=document["created_at"],
        sealed={
            table: tuple(
                Sealed(name=s["name"], num_bytes=s["num_bytes"], num_rows=s["num_rows"], crc32=s["crc32"])
                for s in held["sealed"]
            )
            for table, held in tables.items()
            if held["sealed"]
        },
        open={table: tuple(held["open"]) for table, held in tables.items() if held["open"]},
        removed=tuple(document.get("removed", ())),
        used=document.get("used", {}),
        sha256=document["sha256"],
    )
