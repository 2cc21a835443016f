"""The trainer's output folder: what may be one, its checkpoints, the names of the weights, what a session left.

Version numbers never go back: the folder's run.json holds the newest one that was ever saved, so that a step taken
again after a checkpoint was deleted does not give its old name to other weights.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_data import manifest as manifests
from gyre_data.errors import ConfigError, CorruptError
from gyre_data.run_info import read_info
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter
from gyre_data.types import PolicyVersion

from .config import TrainingConfig
from .lineage import lineage_of
from .metrics import read_metrics

__all__ = [
    "TrainSummary",
    "Versions",
    "check_folder",
    "checkpoints",
    "finished",
    "latest_checkpoint",
    "read_state",
    "saved_checkpoints",
    "stop_file",
]

_NAME = re.compile(r"step-(\d{8})")
_NEWEST = "newest_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """What a session of training left behind."""

    output: str
    version: str
    """Weights of the newest checkpoint."""
    checkpoint: str | None
    step: int
    steps_done: int
    """Steps of this session."""
    loss: float | None
    """Of the last step; None when there was nothing to do."""
    trained_tokens: int
    """In this session."""
    publish_errors: tuple[str, ...]
    stopped: bool
    """Whether it ended because it was asked to."""


def checkpoints(config: TrainingConfig) -> Path:
    """Where a run's checkpoints lie."""
    return Path(config.output.dir) / "checkpoints"


def saved_checkpoints(root: Path) -> list[Path]:
    """The complete checkpoints of a folder, oldest first."""
    return sorted(path for path in root.glob("step-*") if _NAME.fullmatch(path.name)) if root.is_dir() else []


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder, if any."""
    return next(reversed(saved_checkpoints(root)), None)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state of a checkpoint."""
    try:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptError(
            f"checkpoint {folder}: wanted its state.json, got {error}; delete the folder to resume from the one before"
        ) from error
    if not isinstance(state, dict) or not isinstance(state.get("step"), int):
        raise CorruptError(
            f"checkpoint {folder}: wanted its step's number in state.json, got {state!r:.60}; delete the folder "
            "to resume from the one before"
        )
    return state


def finished(config: TrainingConfig) -> TrainSummary | None:
    """Summary of a session that has nothing to do, where folder and config alone tell so; None: it has to be begun.

    Nothing to do is: the last step is saved, nobody is to be told of it (engines, satellites, services that an earlier
    session left), no pass over held-out tasks is due, and the folder is the training of this model.
    """
    newest = latest_checkpoint(checkpoints(config))
    helped = config.stream.satellites and not config.scheduler.cells
    if newest is None or not config.train.steps or config.publish.engines or helped:
        return None
    output, state, every = Path(config.output.dir), read_state(newest), config.rollout.eval_every
    step, info = state["step"], read_info(output)
    if step < config.train.steps or (output / "services.json").exists():
        return None
    passes = [row["step"] for row in read_metrics(output / "evals.jsonl")]
    if every and (config.scheduler.cells or (step % every == 0 and step not in passes)):
        return None  # cells: their proxy knows which passes are under way
    if info.get("base") != str(lineage_of(config.model.path).version):
        return None
    if config.output.policy_id not in (None, info.get("policy_id")):
        return None
    return TrainSummary(
        output=config.output.dir, version=state["version"], checkpoint=str(newest), step=step, steps_done=0, loss=None,
        trained_tokens=0, publish_errors=(), stopped=False,
    )  # fmt: skip


def stop_file(config: TrainingConfig) -> Path:
    """While it exists, training ends after the step under way, with a checkpoint. Ranks in processes see it too.

    A core that a controller starts and ends has one of its own: `stop` is for people, and ends everything.
    """
    return Path(config.output.dir) / ("stop-core" if config.stream.controlled else "stop")


def check_folder(output: Path) -> None:
    """Refuse to train into a recorded run: it would take the run's lock and hide it from `gyre ls`."""
    held = manifests.newest(output)
    if held is not None and (recorded := [name for name in held.tables if TABLES[name].owner == "run"]):
        raise ConfigError(
            f"output.dir: wanted a folder of the trainer's own, {output} is a recorded run (it holds "
            f"{', '.join(recorded)}); use another folder"
        )


class Versions:
    """Names of the weights of one folder: `base` is what its training began from, `present` what there is now."""

    def __init__(self, config: TrainingConfig, writer: RunWriter, base: PolicyVersion) -> None:
        """Decide the folder's policy on first use; ConfigError when it is the training of something else."""
        self._writer, self.base, self.present = writer, base, base
        info = writer.update_info({})
        if "base" not in info:
            stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(config.output.dir).resolve().name) or "run"
            policy_id = config.output.policy_id or f"{stem}-{secrets.token_hex(3)}"
            info = writer.update_info({"policy_id": policy_id, "base": str(base)})
        if info["base"] != str(base):
            raise ConfigError(
                f"output.dir: {config.output.dir} holds the training of {info['base']}, model.path holds "
                f"{base}; use a new output.dir, or the model it was started from"
            )
        if config.output.policy_id not in (None, info["policy_id"]):
            raise ConfigError(
                f"output.policy_id: {config.output.dir} makes versions of {info['policy_id']}, got "
                f"{config.output.policy_id}; remove the setting or use a new output.dir"
            )
        self.policy_id = str(info["policy_id"])
        self._newest = int(info.get(_NEWEST, 0))

    def remember(self) -> None:
        """The present version was saved: its number is taken, whatever becomes of its checkpoint."""
        self._newest = max(self._newest, self.present.n)
        self._writer.update_info({_NEWEST: self._newest})

    def next(self) -> PolicyVersion:
        """What the next step makes: above the present one and every one that was saved."""
        present = self.present.n if self.present.policy_id == self.policy_id else 0
        return PolicyVersion(policy_id=self.policy_id, n=max(present, self._newest) + 1)
