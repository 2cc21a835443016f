"""Tags and leases: manifests whose files must stay, though newer manifests no longer name them.

A tag is a dataset version: `tags/NAME.json` names a manifest for as long as the file is there. A lease lasts as long as
the process that took it: a file in `leases/`, locked by its holder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from . import manifest as manifests
from .errors import ConfigError, CorruptError
from .lock import is_locked
from .segment import fsync_folder

__all__ = [
    "LEASES",
    "TAGS",
    "Tag",
    "check_tagged",
    "delete_tag",
    "find_tag",
    "lease",
    "leased",
    "parse_tag",
    "pinned_manifests",
    "split_tag",
    "tag",
    "tags",
]

TAGS, LEASES = "tags", "leases"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """A dataset version: a name for manifest `manifest` of a run."""

    name: str
    manifest: int
    created_at: str
    note: str | None = None
    sha256: str | None = None
    """Of that manifest; None in a tag that was made before tags kept it."""


def tag(path: str | Path, name: str, note: str | None = None) -> Tag:
    """Name what the run holds now as a dataset version: `open("RUN@NAME")` shows it for ever, whatever comes later.

    Takes the run's lock, or raises ConfigError that says who writes it: only what is sealed can be named. ConfigError
    when the name is taken.
    """
    from .rewrite import owned  # which asks this module what to keep

    with owned(Path(path), "tag") as current:
        return _write_tag(Path(path), name, current, note)


def delete_tag(path: str | Path, name: str) -> Tag:
    """Give a tag up; what only it named goes with the next `compact`. ConfigError when there is none."""
    from .rewrite import owned

    with owned(Path(path), "tag"):
        gone = _read_tag(Path(path), name)
        (Path(path) / TAGS / f"{name}.json").unlink()
        fsync_folder(Path(path) / TAGS)
    return gone


def split_tag(arg: str | Path) -> tuple[Path, str | None]:
    """RUN@NAME as run folder and tag; no tag when there is a folder of that very name, or no @."""
    folder, at, name = str(arg).rpartition("@")
    return (Path(arg), None) if not at or not folder or Path(arg).exists() else (Path(folder), name)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"wanted a tag of letters, digits, dot, dash and _, got {name!r}; it becomes a file name")


def _write_tag(run: Path, name: str, manifest: manifests.Manifest, note: str | None) -> Tag:
    _check_name(name)
    made = Tag(
        name=name,
        manifest=manifest.number,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        note=note,
        sha256=manifest.sha256,
    )
    folder = run / TAGS
    folder.mkdir(mode=0o700, exist_ok=True)
    temporary = folder / f".{secrets.token_hex(6)}.tmp"
    try:
        _write(temporary, {"format": "gyre-tag", **asdict(made)})
        os.link(temporary, folder / f"{name}.json")
    except FileExistsError:
        there = _read_tag(run, name).manifest
        raise ConfigError(
            f"{run}: wanted to tag manifest {made.manifest} as {name}, that tag names manifest {there}; "
            "take another name"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    fsync_folder(folder)
    fsync_folder(run)
    return made


def _write(path: Path, document: dict[str, object]) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(fd)


def tags(run: Path) -> list[Tag]:
    """All tags of a run, by name."""
    folder = run / TAGS
    names = sorted(path.stem for path in folder.glob("[!.]*.json")) if folder.is_dir() else []
    return [find_tag(run, name) for name in names]


def find_tag(run: Path, name: str) -> Tag:
    """The tag `name`; ConfigError that lists the tags when there is none.

    CorruptError when the manifest of its number is gone or not the one that was tagged.
    """
    found = _read_tag(run, name)
    check_tagged(found, manifests.read(manifests.manifest_path(run, found.manifest)), str(run))
    return found


def check_tagged(tag: Tag, manifest: manifests.Manifest, run: str) -> None:
    """CorruptError unless `manifest` is the one that `tag` was made for."""
    if tag.sha256 not in (None, manifest.sha256):
        raise CorruptError(
            f"{run}: wanted the manifest {tag.manifest} that the tag {tag.name} was made for, got another of that "
            "number; restore both from a copy, or give the tag up: `gyre tag RUN NAME --delete`"
        )


def _read_tag(run: Path, name: str) -> Tag:
    _check_name(name)
    path = run / TAGS / f"{name}.json"
    try:
        return parse_tag(path.read_bytes(), name, str(path))
    except FileNotFoundError:
        known = ", ".join(one.stem for one in sorted((run / TAGS).glob("[!.]*.json"))) or "none"
        raise ConfigError(f"{run}: wanted the tag {name}, it has {known}; make one with `gyre tag`") from None


def parse_tag(data: bytes, name: str, where: str) -> Tag:
    """The tag in `data`, as read from the file `where` of that name; CorruptError when it is none."""
    try:
        said = json.loads(data)
        found = Tag(**{"name": name} | {field.name: said[field.name] for field in fields(Tag) if field.name in said})
        if found.name == name and type(found.manifest) is int and found.manifest > 0:
            return found
        came = f"a tag {found.name!r} of manifest {found.manifest!r}"
    except (ValueError, TypeError, RecursionError) as error:
        came = repr(error)
    raise CorruptError(f"{where}: wanted the tag {name}, got {came}; restore it, or remove the file and tag again")


@contextmanager
def lease(run: Path, manifest: int) -> Iterator[None]:
    """Keep the files of a manifest in their place until the block ends or the process dies.

    For readers that other hosts or processes take over from by file name; a `Run` in one process needs none, since it
    holds its files mapped.
    """
    folder = run / LEASES
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{os.getpid()}-{secrets.token_hex(6)}.json"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps({"format": "gyre-lease", "manifest": manifest, "pid": os.getpid()}).encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def leased(run: Path) -> list[int]:
    """Manifest numbers that living processes hold; files of dead ones are removed."""
    folder = run / LEASES
    held: list[int] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if not is_locked(path):
            path.unlink(missing_ok=True)
            continue
        try:
            held.append(int(json.loads(path.read_bytes())["manifest"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            held += manifests.numbers(run)[:1]  # being taken this instant: nothing older can be wanted
    return held


def pinned_manifests(run: Path) -> list[manifests.Manifest]:
    """The manifests that tags and leases name."""
    wanted = {*(tag.manifest for tag in tags(run)), *leased(run)}
    return [manifests.read(manifests.manifest_path(run, number)) for number in sorted(wanted)]
