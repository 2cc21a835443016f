"""Publish by files: engines reload a Hugging Face folder from a disk they share with the trainer."""

from __future__ import annotations

from pathlib import Path

from gyre_data.types import PolicyVersion

from .control import Deadline, EngineControl

__all__ = ["FileCarrier"]


class FileCarrier:
    """Names the folder to the engine, which loads it whole or stays with what it has (`update_weights_from_disk`)."""

    whole = True

    def stage(self, number: int, folder: Path, version: PolicyVersion, deadline: Deadline) -> str:
        """Nothing to do: the folder is there."""
        del number, version, deadline
        return str(folder)

    def swap(self, engine: EngineControl, staged: str, version: PolicyVersion, deadline: Deadline) -> None:
        """Load and flush."""
        engine.load(staged, str(version), deadline)
