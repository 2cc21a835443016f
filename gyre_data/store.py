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

__all__ = ["SAMPLE", "Run", "RunWriter", "find_run", "open"]

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
    return Run(folder, None if tag is None else find_tag(folder, tag).manifest)


def find_run(arg: str | Path | None = None, root: str | Path = "runs") -> Path:
    """The run folder a command means: `arg`, or without it the run made last under `root`, by its `run.json`.

    `sample` is the run that comes with the release, unless there is a folder of that name.
    """
    if arg is not None:
        if str(arg) == "sample" and not Path(arg).exists():
            return SAMPLE
        if remote_url(arg) is not None:
            return Path(arg)
        folder, tag = split_tag(arg)
        if not manifests.numbers(folder):
            raise ConfigError(f"wanted a run folder, {arg} holds no manifest; `gyre ls` lists the runs under ./{root}")
        if tag is not None:
            find_tag(folder, tag)
        return Path(arg)
    found = [(_created_at(path), path) for path in Path(root).glob("*/run.json")]
    found = [(created_at, path) for created_at, path in found if manifests.is_recording(path.parent)]
    if not found:
        raise ConfigError(
            f"wanted a run folder, got none and ./{root} holds no run; record one with `gyre demo`, or look at `sample`"
        )
    return max(found)[1].parent


def _created_at(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes()).get("created_at", ""))
    except (ValueError, AttributeError, RecursionError):
        return ""
