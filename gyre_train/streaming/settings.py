"""The settings of streaming training, and which of them have an effect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gyre_data.errors import ConfigError

__all__ = ["StreamConfig", "check_stream"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamConfig:
    """Satellites that help with the open step."""

    satellites: bool = False
    """Whether others may join and claim micro-steps (`python -m gyre_train.streaming.satellite`)."""
    parts: int = 4
    """Micro-steps that a group of executions is cut into."""
    controlled: bool = False
    """Whether a scheduler's controller says who computes what; else whoever is idle takes the next one."""
    host: str = "127.0.0.1"
    """Address that satellites reach; off loopback GYRE_PUBLISH_KEY must be set."""
    port: int = 0
    """Port of that address; 0: any, told by `stream.json` in `output.dir`."""
    lease_s: float = 30.0
    """A satellite that is silent for so long is taken for dead, and what it held is computed again."""
    method: Literal["files", "mooncake"] = "files"
    """How weights and gradients travel: `output.dir` on a disk that all see, or memory to memory by Mooncake."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Of Mooncake; `rdma` is not yet verified."""


def check_stream(stream: StreamConfig) -> None:
    """Refuse what cannot work and settings that would have no effect."""
    for f in fields(StreamConfig):
        if getattr(stream, f.name) != f.default and not stream.satellites:
            raise ConfigError(
                f"stream.{f.name} has no effect without satellites; set stream.satellites = true or remove it"
            )
    if stream.protocol != "tcp" and stream.method != "mooncake":
        raise ConfigError(
            f'stream.protocol = {stream.protocol} has no effect with stream.method = {stream.method}; set '
            'stream.method = "mooncake" or remove it'
        )  # fmt: skip
    if not 0 <= stream.port < 65536:
        raise ConfigError(f"stream.port: wanted a number from 0 to 65535, got {stream.port}; set one")
