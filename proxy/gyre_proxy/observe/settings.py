"""Every setting of an observing proxy, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import httpx

from gyre_data.errors import ConfigError
from gyre_proxy.limits import Bounds
from gyre_proxy.settings import check_listening

__all__ = ["ObserveSettings", "Upstreams"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstreams:
    """Base URLs of the hosted APIs, without `/v1`. `chatgpt` is where Codex talks with a ChatGPT login."""

    anthropic: str = "https://api.anthropic.com"
    openai: str = "https://api.openai.com"
    chatgpt: str = "https://chatgpt.com/backend-api/codex"

    def __post_init__(self) -> None:
        for name in self.__slots__:
            given = getattr(self, name)
            try:
                url = httpx.URL(given)
                good = url.scheme in ("http", "https") and bool(url.host) and not url.query and not url.userinfo
            except httpx.InvalidURL:
                good = False
            if not good:
                raise ConfigError(
                    f"wanted --upstream-{name} as http(s)://HOST[/PATH], got {given!r}; "
                    "credentials are the client's own and stay with it"
                )
            if url.path.rstrip("/").endswith("/v1"):
                raise ConfigError(
                    f"--upstream-{name} {given} ends in /v1, which the client's own path adds; leave it out"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ObserveSettings:
    """What an observing proxy was started with."""

    mode: ClassVar[str] = "observe"
    run: Path
    upstreams: Upstreams = field(default_factory=Upstreams)
    tokenizer: Path | None = None
    """Counts tokens; None takes a quarter of the bytes."""
    host: str = "127.0.0.1"
    port: int | None = None
    key: str | None = None
    """Needed to use the API. Clients present the provider's key instead, so with a key only known executions pass."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    bounds: Bounds = field(default_factory=Bounds)
    """Of the head of a request. Bodies pass whatever their size; the first `body_bytes` of each are recorded."""
    connect_s: float = 30.0
    """How long an upstream may take to accept a connection. How long it may take to answer is the client's affair."""
    drain_s: float = 8.0

    def __post_init__(self) -> None:
        check_listening(self.host, self.key, self.tls_cert, self.tls_key)
