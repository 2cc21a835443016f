"""The settings of publishing, and which of them have an effect."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from gyre_data.errors import ConfigError

__all__ = ["PublishConfig", "check_publish"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishConfig:
    """Engines that get the new weights."""

    engines: tuple[str, ...] = ()
    """Base URLs; each is paused (retract), loaded, flushed, confirmed and continued."""
    method: Literal["files", "broadcast", "mooncake"] = "files"
    """How weights travel: a disk that engines share, torch.distributed, or Mooncake's transfer engine."""
    proxy: str | None = None
    """Base URL of the proxy that is told the new version, and which engines are out of service."""
    every: int = 1
    """Steps between publishes; the last step is always published."""
    timeout_s: float = 600.0
    """Longest a publish takes, whatever engines do; one that hangs is reported, training goes on."""
    confirm: Literal["digests", "version"] = "digests"
    """What an engine must show: the digest of every tensor (SGLang on CPU, tp 1), or only the version."""
    host: str = "127.0.0.1"
    """Address of this machine as engines reach it (broadcast, mooncake)."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the broadcast; `nccl` needs GPUs on both sides (written, not yet verified)."""
    receivers: tuple[str, ...] = ()
    """Base URLs of `gyre receive` beside each engine, in the order of `engines` (mooncake)."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Of Mooncake; `rdma` is not yet verified."""
    device: str = ""
    """RDMA device of Mooncake; empty: it chooses."""


_PUBLISH_METHODS = {
    "host": ("broadcast", "mooncake"),
    "backend": ("broadcast",),
    **dict.fromkeys(("receivers", "protocol", "device"), ("mooncake",)),
}
"""Which methods a setting has an effect on."""


_OF_CELLS = ("method", "proxy", "timeout_s", "host", "protocol", "device")
"""Settings that have an effect where a controller of cells says when an engine gets weights."""


def check_publish(publish: PublishConfig, *, by_controller: bool = False) -> None:
    """Refuse what cannot work and settings that would have no effect. `by_controller`: one of cells has the engines."""
    for f in fields(PublishConfig):
        if getattr(publish, f.name) == f.default or f.name == "engines":
            continue
        if by_controller and f.name not in _OF_CELLS:
            raise ConfigError(f"publish.{f.name} has no effect where a controller has the engines; remove it")
        if not publish.engines and not by_controller:
            raise ConfigError(f"publish.{f.name} has no effect without engines; set publish.engines or remove it")
    if by_controller and publish.method == "broadcast":
        raise ConfigError(
            'publish.method = broadcast cannot reach engines of cells; set "mooncake", or "files" for the checkpoints'
        )
    for f in fields(PublishConfig):
        methods = _PUBLISH_METHODS.get(f.name)
        if methods and getattr(publish, f.name) != f.default and publish.method not in methods:
            raise ConfigError(
                f"publish.{f.name} has no effect with publish.method = {publish.method}; "
                f"choose {' or '.join(methods)}, or remove it"
            )
    if publish.device and publish.protocol != "rdma":
        raise ConfigError('publish.device has no effect with publish.protocol = tcp; set it to "rdma" or remove it')
    if publish.method == "mooncake" and not by_controller and len(publish.receivers) != len(publish.engines):
        raise ConfigError(
            f"publish.receivers: wanted one beside each of {len(publish.engines)} engines, got "
            f"{len(publish.receivers)}; start `gyre receive` on each engine's machine and name them in the same order"
        )
