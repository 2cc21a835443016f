"""Ways to bring new weights to running engines. Every publisher satisfies `Publisher`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_data.types import PolicyVersion

__all__ = ["Published", "Publisher"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What became of one engine; `error` is None when it confirmed that it serves the version."""

    engine: str
    version: PolicyVersion
    seconds: float
    error: str | None = None
    usable: bool = True
    """False: it may hold a mix of old and new weights. It is out of service until the next complete publish."""


class Publisher(Protocol):
    """Brings a version to every engine. It reports failures instead of raising: training goes on without an engine."""

    def publish(self, folder: Path, version: PolicyVersion) -> tuple[Published, ...]:
        """Make the engines serve the weights in `folder` as `version`; return one record per engine."""
        ...

    def close(self) -> None:
        """Let go of engines that hung; each is told to continue once more where that cannot serve a mix."""
        ...
