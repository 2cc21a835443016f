"""Run the embedded engine as a server process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from gyre_data.errors import ConfigError

from .loop import EngineLoop, LoopSettings
from .model import Model
from .server import build_app

__all__ = ["EngineSettings", "build_loop", "serve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What `gyre engine` was asked for."""

    model_dir: str
    weight_version: str = "base:0"
    max_running: int = 16
    max_queued: int = 256
    context_length: int | None = None
    """None means the model's own."""
    cache_bytes: int = 2 << 30
    """Memory for keys and values, running and cached together."""
    threads: int | None = None
    """None means all cores but one, which is left to the proxy and the harnesses."""


def build_loop(settings: EngineSettings) -> EngineLoop:
    """Load the model and make its loop, not yet started."""
    model = Model(settings.model_dir)
    context = settings.context_length or model.context_length
    if not 16 <= context <= model.context_length:
        raise ConfigError(
            f"the context length must lie in [16, {model.context_length}] for {settings.model_dir}, got {context}"
        )
    for name, value in (("max_running", settings.max_running), ("max_queued", settings.max_queued)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    return EngineLoop(
        model,
        LoopSettings(
            context_length=context,
            max_running=settings.max_running,
            max_queued=settings.max_queued,
            max_total_tokens=max(context, settings.cache_bytes // model.kv_bytes_per_token),
            threads=settings.threads or max(1, (os.cpu_count() or 1) - 1),
        ),
        settings.weight_version,
    )


def serve(settings: EngineSettings, *, host: str, port: int, on_bound: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM; open requests then end with what they have.

    `on_bound` is called once the model is loaded and the address is ours. Raise ConfigError when either is not so.
    """
    loop = build_loop(settings)
    listener = _bind(host, port)
    on_bound()
    loop.start()
    config = uvicorn.Config(
        build_app(loop),
        host=host,
        port=port,
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=2,
        access_log=False,
    )
    try:
        _Server(config, loop).run(sockets=[listener])
    finally:
        loop.close()
        listener.close()


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"wanted to listen on {host}:{port}, got {error}; stop what listens there or give another --port"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """Ends open requests before it waits for their connections, so that their clients get what was sampled."""

    def __init__(self, config: uvicorn.Config, loop: EngineLoop) -> None:
        super().__init__(config)
        self._loop = loop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop.abort(None)
        await super().shutdown(sockets)
