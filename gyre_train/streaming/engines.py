"""A controlled core brings its weights to where an engine of a cell can load them.

    POST /weights {version, label, receiver}   have the `gyre receive` at this URL fetch the version out of the core's
                                               memory; answers {folder}, where they lie then on the receiver's machine

It answers once every byte is there and right, while the core trains on. Asked again it has nothing more to do. An error
leaves everything as it was: who asked lets the engine load the checkpoint's folder instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_data.errors import ConfigError
from gyre_data.types import PolicyVersion
from gyre_train.config import TrainingConfig
from gyre_train.folder import checkpoints, read_state
from gyre_train.publish.control import Deadline
from gyre_train.publish.mooncake import MooncakeCarrier

__all__ = ["EngineWeights"]


class EngineWeights:
    """By `publish.method`, `host`, `protocol`, `device` and `timeout_s` of the core's config."""

    def __init__(self, config: TrainingConfig) -> None:
        publish = config.publish
        self._checkpoints, self._timeout_s = checkpoints(config), publish.timeout_s
        self._carrier = (
            MooncakeCarrier((), host=publish.host, protocol=publish.protocol, device=publish.device)
            if publish.method == "mooncake"
            else None
        )

    def bring(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the route above; GyreError when it cannot be done."""
        if self._carrier is None:
            raise ConfigError('publish.method: wanted "mooncake" to bring weights to a receiver, got "files"; set it')
        version = PolicyVersion.parse(str(body["label"]))
        folder = self._checkpoints / f"step-{int(body['version']):08}"
        if (saved := read_state(folder)["version"]) != str(version):
            raise ConfigError(
                f"{folder}: wanted {version}, got {saved}; does the label have this training's policy_id?"
            )
        receiver, deadline = str(body["receiver"]), Deadline(self._timeout_s)
        return {"folder": self._carrier.bring(receiver, folder.resolve(), version, deadline)}
