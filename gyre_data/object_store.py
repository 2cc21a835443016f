"""Runs on an object store or any other file system that fsspec knows: sealed files only, read-only.

A run is recorded on a local disk. Once it is sealed its folder can be copied anywhere, segments first and manifests
last, and opened there by its URL. A segment is fetched when its table is first asked for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from . import manifest as manifests
from .errors import ConfigError, CorruptError, GyreError
from .growing import OpenSegment
from .installing import pip_install
from .pins import TAGS, check_tagged, parse_tag
from .reader import Batches, Run
from .run_info import INFO, parse_info
from .segment import Sealed, iter_sealed

__all__ = ["RemoteRun", "remote_url"]

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
_BY_ARROW = ("s3", "gs", "gcs", "hdfs", "abfs")  # pyarrow reaches these itself when fsspec lacks the package for it
_LOOK_S = 1.0


def remote_url(arg: str | Path) -> str | None:
    """The URL that `arg` is, also when a `Path` has lost one of its slashes; None for a path of this machine."""
    found = _URL.fullmatch(str(arg))
    if found is None or Path(arg).exists():
        return None
    scheme, rest = found.groups()
    return f"{scheme}://{'/' if scheme in ('file', 'local') else ''}{rest}"


class RemoteRun(Run):
    """A snapshot of a run whose manifests and sealed segments lie behind a URL; `URL@TAG` opens a dataset version.

    Open segments are left out: what a live writer has not sealed is not there. ConfigError when there is no run.
    """

    def __init__(self, url: str) -> None:
        base, at, tag = url.rpartition("@")
        tagged = bool(at) and "/" not in tag
        self.url = (base if tagged else url).rstrip("/")
        self._fs, self._root = _file_system(self.url)
        super().__init__(Path(self.url), self._tagged(tag) if tagged else None)

    @property
    def info(self) -> dict[str, Any]:
        """What `run.json` says; empty when there is none."""
        try:
            return parse_info(self._read(INFO), f"{self.url}/{INFO}")
        except FileNotFoundError:
            return {}

    def wait(self, timeout_s: float | None = None) -> bool:
        """Look once a second whether another manifest is there; see `Run.wait`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.refresh():
            rest = _LOOK_S if deadline is None else min(_LOOK_S, deadline - time.monotonic())
            if rest <= 0:
                return False
            time.sleep(rest)
        return True

    def _read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def _tagged(self, name: str) -> int:
        try:
            path = f"{TAGS}/{name}.json"
            tag = parse_tag(self._read(path), name, f"{self.url}/{path}")
        except FileNotFoundError:
            raise ConfigError(f"{self.url}: wanted the tag {name}, found none of that name in {TAGS}/") from None
        check_tagged(tag, self._manifest_of(tag.manifest), self.url)
        return tag.manifest

    def _current(self) -> manifests.Manifest | None:
        number = self._pinned or self._newest()
        if number is None:
            return None
        return replace(self._manifest_of(number), open={})

    def _manifest_of(self, number: int) -> manifests.Manifest:
        name = f"{manifests.FOLDER}/{number:08d}.json"
        try:
            return manifests.parse(self._read(name), Path(f"{self.url}/{name}"))
        except FileNotFoundError:
            raise CorruptError(f"{self.url}/{name}: wanted this manifest, it is not there; copy it there") from None

    def _newest(self) -> int | None:
        self._fs.invalidate_cache()
        try:
            names = self._fs.ls(f"{self._root}/{manifests.FOLDER}", detail=False)
        except FileNotFoundError:
            return None
        return max(manifests.numbers_of(name.rpartition("/")[2] for name in names), default=None)

    def _is_newest(self, number: int) -> bool:
        return True  # whatever it names is there: manifests are copied last

    def _read_open(self, current: manifests.Manifest) -> dict[tuple[str, str], OpenSegment]:
        return {}

    def check_bytes(self, tables: Collection[str] | None = None) -> None:
        """Nothing to do: every segment is checked when it is fetched."""

    def _map_sealed(self, current: manifests.Manifest) -> dict[tuple[str, str], pa.Buffer]:
        return {}  # nothing is fetched before its table is asked for

    def _open_sealed(
        self, name: str, sealed: Sealed, columns: Collection[str] | None = None, lengths_of: Collection[str] = ()
    ) -> Batches:
        where = f"{self.url}/{name}/{sealed.name}"
        try:
            data = pa.py_buffer(self._read(f"{name}/{sealed.name}"))
        except FileNotFoundError:
            raise CorruptError(
                f"{where}: manifest {self.manifest_number} names this segment, but it is not there; copy it there"
            ) from None
        return iter_sealed(data, sealed, where, full=True, columns=columns, lengths_of=lengths_of)


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, with fsspec's interface, and the path in it."""
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise GyreError(
            f"wanted to read {url}, which needs fsspec, and it is not installed; run: {pip_install('remote')}"
        ) from error
    scheme = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        if scheme not in _BY_ARROW:
            raise ConfigError(f"wanted to read {url}, got: {error}; install that package") from error
        from fsspec.implementations.arrow import ArrowFSWrapper
        from pyarrow import fs as arrow_fs

        inner, root = arrow_fs.FileSystem.from_uri(url)
        fs = ArrowFSWrapper(inner)
    except ValueError as error:
        raise ConfigError(f"wanted a run folder or a URL that fsspec knows, got {url}: {error}") from error
    return fs, str(root).rstrip("/")
