"""The publisher that a config asks for."""

from __future__ import annotations

from . import Publisher
from .files import FileCarrier
from .fleet import Carrier, FleetPublisher
from .settings import PublishConfig

__all__ = ["open_publisher"]


def open_publisher(config: PublishConfig) -> Publisher:
    """Make it; engines are first spoken to when something is published."""
    return FleetPublisher(
        config.engines,
        _carrier(config),
        proxy=config.proxy,
        timeout_s=config.timeout_s,
        digests=config.confirm == "digests",
    )


def _carrier(config: PublishConfig) -> Carrier:
    match config.method:
        case "broadcast":
            from .broadcast import BroadcastCarrier

            return BroadcastCarrier(host=config.host, backend=config.backend)
        case "mooncake":
            from .mooncake import MooncakeCarrier

            return MooncakeCarrier(config.receivers, host=config.host, protocol=config.protocol, device=config.device)
    return FileCarrier()
