"""What the owner of a folder does with segments that a crash left open.

The verified prefix becomes a sealed segment of the same stem. A pair whose every byte is in that sealed file is
removed; any other pair goes to `quarantine/` as it is. Nothing is appended to, and no byte that was not copied is
deleted.
A crash during recovery is recovered from like any other.
"""

from __future__ import annotations

import logging
import os
import re
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import manifest as manifests
from .errors import ConfigError
from .growing import OpenSegment, read_open
from .lock import is_locked
from .schema import TABLES
from .segment import Sealed, adopt_sealed, fsync_folder, write_sealed

__all__ = ["QUARANTINE", "REWRITERS", "Recovered", "free_name", "leftovers", "lost_manifest", "recover"]

QUARANTINE = "quarantine"
REWRITERS = ("compact", "purge", "merge", "salvage")
"""Writer names that changes of a folder use for their segments; nobody records under them."""
_ATTEMPTS, _PAUSE_S = 50, 0.02
_NUMBER = re.compile(r"\d{6,18}", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """What became of one left-over segment. `intact`: every byte of it was committed and is in the sealed file."""

    table: str
    stem: str
    num_rows: int
    intact: bool
    detail: str


def leftovers(run: Path, writer: str | None = None) -> list[tuple[str, str]]:
    """(table, stem) of every segment open in the newest manifest or lying open on disk; of `writer` only if given.

    Also of those that were finished and that the manifest never heard of, since the one that named them is lost.
    """
    files = _files(run)
    current = manifests.newest(run) or manifests.EMPTY
    found = {(table, stem) for table, stems in current.open.items() for stem in stems}
    found |= {(table, path.stem) for table, path in files if path.suffix in (".open", ".commit")}
    found |= _unheard(files, current)
    return sorted(pair for pair in found if writer is None or pair[1].rpartition("-")[0] == writer)


def _files(run: Path) -> list[tuple[str, Path]]:
    folders = [run / name for name in TABLES]
    return [(folder.name, path) for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def _unheard(files: Iterable[tuple[str, Path]], current: manifests.Manifest) -> set[tuple[str, str]]:
    """Finished segments of recorders with numbers that `current` never heard of: it names a segment before it grows."""
    known, found = current.known_numbers, set()
    for table, path in files:
        writer, _, number = path.stem.rpartition("-")
        is_recorders = path.suffix == ".arrow" and writer not in REWRITERS and _NUMBER.fullmatch(number)
        if is_recorders and int(number) > known.get(writer, 0):
            found.add((table, path.stem))
    return found


def lost_manifest(run: Path) -> str | None:
    """How the folder shows that its newest manifest was not the last one, and what to do; None when nothing shows it.

    One that only hid executions leaves no trace. May be asked while somebody writes.
    """
    files = _files(run)  # before the manifest, which must know all that was there by then
    current = manifests.newest(run) or manifests.EMPTY
    here, named = {(table, path.name) for table, path in files}, set(current.stems())
    sealed = {
        (table, stem)
        for table, stems in current.open.items()
        for stem in stems
        if (table, f"{stem}.crc") in here and (table, f"{stem}.commit") not in here
    }
    found = sorted(_unheard(files, current) | sealed)
    mend = "restore it from a copy; without one, the next writer of this folder takes in what is there"
    if not current.number or _lacks_files(run, current):
        rewritten = {
            (table, path.stem)
            for table, path in files
            if path.suffix == ".arrow" and path.stem.rpartition("-")[0] in REWRITERS
        }
        if rewritten - named:
            found, mend = sorted(rewritten - named), "restore it from a copy: what these replaced is gone"
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    what = f"{'/'.join(found[0])}.arrow{more}"
    return f"wanted the newest manifest to know {what}, number {current.number} does not: a newer one is lost; {mend}"


def _lacks_files(run: Path, newest: manifests.Manifest) -> bool:
    """Whether segments that the newest manifest names are gone. While it is the newest, nobody removes them."""
    named = [run / table / one.name for table, many in newest.sealed.items() for one in many]
    if all(path.exists() for path in named):
        return False
    now = manifests.newest(run)
    return now is not None and now.number == newest.number


def recover(run: Path, pairs: Iterable[tuple[str, str]], writer: str) -> list[Recovered]:
    """Seal the verified prefixes of `pairs`, publish them in one manifest, and put the pairs away."""
    pairs = list(pairs)
    if not pairs:
        return []
    for table, stem in pairs:
        if _stays_locked(run / table / f"{stem}.commit"):
            raise ConfigError(
                f"{run}: wanted to recover {table}/{stem}, but a process still writes it; stop that worker first"
            )
    published = {
        (t, s.name.removesuffix(".arrow")): s
        for t, many in (manifests.newest(run) or manifests.EMPTY).sealed.items()
        for s in many
    }
    done = {(table, stem): _seal_prefix(run / table, stem, published.get((table, stem))) for table, stem in pairs}

    def change(base: manifests.Manifest) -> manifests.Manifest:
        for (table, stem), (sealed, _) in done.items():
            base = base.closed(table, stem, sealed)
        return base

    manifests.publish(run, change, writer)
    return [_put_away(run, table, stem, sealed, found) for (table, stem), (sealed, found) in done.items()]


def _stays_locked(path: Path) -> bool:
    """Whether a process holds `path`, and not only for as long as the kernel takes to clear away a killed one."""
    for _ in range(_ATTEMPTS):
        if not is_locked(path):
            return False
        time.sleep(_PAUSE_S)
    return True


def _seal_prefix(folder: Path, stem: str, published: Sealed | None) -> tuple[Sealed | None, OpenSegment | None]:
    """Write `<stem>.arrow` from the verified prefix of the pair. No prefix when there is no data file of a pair.

    A sealed file alone is what the manifest says of it; if none does (the manifest that named it is gone), it is taken
    in as it is, since everything in it was acknowledged.
    """
    data, log, final = (folder / f"{stem}{suffix}" for suffix in (".open", ".commit", ".arrow"))
    if not data.exists() and final.exists() and log.exists():
        os.rename(final, data)  # sealed but maybe not published: take it back and do it again
    if not data.exists():
        return published or (adopt_sealed(final) if final.exists() else None), None
    found = read_open(data, log.read_bytes() if log.exists() else b"")
    if not found.num_rows or found.schema is None:
        return None, found
    return write_sealed(final, found.schema, found.batches()), found


def _put_away(run: Path, table: str, stem: str, sealed: Sealed | None, found: OpenSegment | None) -> Recovered:
    data, log = run / table / f"{stem}.open", run / table / f"{stem}.commit"
    intact = found is not None and found.damage is None and not found.log_tail
    if intact and found is not None and found.data_tail:
        # Bytes after the last commit are known only if they are the footer of the sealed file.
        intact = sealed is not None and data.stat().st_size == sealed.num_bytes and _crc32(data) == sealed.crc32
    if found is None:
        intact = sealed is not None or (log.exists() and not log.stat().st_size)
        if not intact and not log.exists():
            detail = "the manifest names it, but all its files are gone; restore them from a copy"
            _log.warning("%s/%s: %s", table, stem, detail)
            return Recovered(table=table, stem=stem, num_rows=0, intact=False, detail=detail)
    num_rows = found.num_rows if found else sealed.num_rows if sealed else 0
    detail = "every byte was committed"
    if intact:
        data.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
    else:
        target = run / QUARANTINE / table
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in (data, log):
            if path.exists():
                os.rename(path, free_name(target / path.name))
        fsync_folder(target)
        tail = f"{found.data_tail} bytes of data and {found.log_tail} of log after it" if found else "no data file"
        detail = f"{(found.damage if found else None) or 'uncommitted tail'}; {tail} are in {target}"
        _log.warning("%s/%s: recovered %d committed rows; %s", table, stem, num_rows, detail)
    fsync_folder(run / table)
    return Recovered(table=table, stem=stem, num_rows=num_rows, intact=intact, detail=detail)


def free_name(path: Path) -> Path:
    """`path`, or `path` with a number when a file of that name was quarantined before."""
    number, free = 1, path
    while free.exists():
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free


def _crc32(path: Path) -> int:
    crc32 = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            crc32 = zlib.crc32(piece, crc32)
    return crc32
