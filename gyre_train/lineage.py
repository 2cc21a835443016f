"""Which weights a folder holds: untrained ones are `base:0` of a digest, a checkpoint of ours says it itself.

Two versions are of one lineage when one was trained from the other. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError
from gyre_data.types import PolicyVersion

__all__ = ["Lineage", "base_version", "lineage_of"]

_SAMPLE_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """A version and the policy ids it descends from, its own first."""

    version: PolicyVersion
    policy_ids: tuple[str, ...]
    start: PolicyVersion | None = None
    """The weights that this training run began with."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Optimiser steps that each of this run's own versions had seen, by its number."""


def base_version(folder: str | Path) -> PolicyVersion:
    """Return `base-<digest>:0` of a Hugging Face folder: a digest of its config and of every weight file's header,
    size, first and last values, so that fine-tunes of one shape differ. Reads kilobytes, whatever the model's size.
    """
    folder = Path(folder)
    files = sorted(folder.glob("model*.safetensors"))
    if not (folder / "config.json").is_file() or not files:
        raise ConfigError(
            f"model.path: wanted a Hugging Face folder with config.json and safetensors weights, {folder} is none; "
            "give the checkpoint's folder"
        )
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in files:
        with file.open("rb") as opened:
            length = opened.read(8)
            header = opened.read(int.from_bytes(length, "little"))
            first = opened.read(_SAMPLE_BYTES)
            opened.seek(max(0, file.stat().st_size - _SAMPLE_BYTES))
            last = opened.read()
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + header + first + last)
    return PolicyVersion(policy_id=f"base-{digest.hexdigest()[:12]}", n=0)


def lineage_of(folder: str | Path) -> Lineage:
    """Return the version a folder holds; a checkpoint of a training run names itself and its ancestors."""
    state_file = Path(folder) / "state.json"
    if not state_file.is_file():
        version = base_version(folder)
        return Lineage(version=version, policy_ids=(version.policy_id,))
    state: dict[str, Any] = json.loads(state_file.read_text(encoding="utf-8"))
    return Lineage(version=PolicyVersion.parse(state["version"]), policy_ids=tuple(state["policy_ids"]))
