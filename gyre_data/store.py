"""The door to runs on disk: `open` reads one, `RunWriter` makes one, `find_run` says which one a command means."""

from __future__ import annotations

import json
from pathlib import Path

from . import manifest as manifests
from .errors import ConfigError
from .object_store import RemoteRun, remote_url
from .pins import find_tag, split_tag
from .reader import Run
from .writer import RunWriter

__all__ = ["SAMPLE", "Run", "RunWriter", "find_run", "open", "run_folders"]

SAMPLE = Path(__file__).with_name("sample")
"""A small recorded run that comes with every release, read-only; commands call it `sample`."""


def open(path: str | Path) -> Run:
    """Open the run folder at `path` for reading, live or finished. ConfigError when it is not a run folder.

    `RUN@NAME` opens the dataset version that `gyre tag` made: what the run held then, whatever came later. A URL opens
    the sealed part of a run on an object store or elsewhere; that needs the extra `remote`.
    """
    if (url := remote_url(path)) is not None:
        return RemoteRun(url)
    folder, tag = split_tag(path)
    if not folder.exists():
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(f"wanted a run folder, there is no {folder}{where}; see `gyre ls`")
    return Run(folder, None if tag is None else find_tag(folder, tag).manifest)


def find_run(arg: str | Path | None = None, root: str | Path | None = None) -> Path:
    """The run folder a command means: `arg`, or without it the run made last under `root` (see `run_folders`).

    `sample` is the run that comes with the release, unless there is a folder of that name.
    """
    if arg is not None:
        if str(arg) == "sample" and not Path(arg).exists():
            return SAMPLE
        if remote_url(arg) is not None:
            return Path(arg)
        folder, tag = split_tag(arg)
        manifests.check_run(folder)
        if tag is not None:
            find_tag(folder, tag)
        return Path(arg)
    found = [(_created_at(path / "run.json"), path) for path in run_folders(root) if (path / "run.json").is_file()]
    if not found:
        places = "none is here or in ./runs" if root is None else f"{root} holds no run"
        raise ConfigError(
            f"wanted a run folder, got none and {places}; record one with `gyre demo`, or look at `sample`"
        )
    return max(found)[1]


def run_folders(root: str | Path | None = None) -> list[Path]:
    """Run folders directly under `root`, unread; without it those under ./runs and those in this folder.

    `gyre record` makes runs in ./runs; `gyre demo` and live training leave theirs where they are started.
    """
    places = (Path("runs"), Path()) if root is None else (Path(root),)
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    return [path for path in found if _is_run(path)]


def _is_run(path: Path) -> bool:
    try:
        return manifests.is_recording(path)
    except PermissionError:  # somebody else's, where this folder is one that many use
        return False


def _created_at(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes()).get("created_at", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""
