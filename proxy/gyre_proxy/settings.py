"""Every setting of a proxy, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gyre_data.errors import ConfigError

from .limits import Bounds
from .message import Sampling
from .sampler import SamplerLimits

__all__ = ["ProxySettings", "RunSampling", "check_listening", "is_loopback"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSampling:
    """How replies are sampled in this run, whatever a client asks for. What it asked for is stored beside it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    """Output limit; None leaves it to the client and the context window."""

    def to_engine(self, asked: Sampling, room: int, seed: int, stop_ids: frozenset[int]) -> dict[str, object]:
        """Sampling parameters of one call with `room` tokens left in the window."""
        wanted = self.max_tokens or asked.max_tokens or room
        out: dict[str, object] = {
            "max_new_tokens": max(1, min(wanted, room)),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "sampling_seed": seed,
            "stop_token_ids": sorted(stop_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if asked.stop:
            out["stop"] = list(asked.stop)
        if asked.json_schema is not None:
            out["json_schema"] = asked.json_schema
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxySettings:
    """What a proxy in front of our own engines was started with."""

    mode: ClassVar[str] = "policy"
    run: Path
    engines: tuple[str, ...]
    tokenizer: Path
    await_engines: bool = False
    """Engines come and go through the API (a scheduler's cells): it starts without one, and calls wait for one."""
    template: Path | None = None
    parser: str = "auto"
    """Reply format of the model family; auto reads it off the chat template."""
    thinking: str = "keep"
    context_window: int | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    """None takes the port of run.json again, or 8765 when it is free."""
    key: str | None = None
    tls_cert: Path | None = None
    """PEM file of the certificate chain to serve HTTPS with."""
    tls_key: Path | None = None
    workers: int = 1
    """Processes that serve calls; above 1 they are children of this one, which keeps the run and the API."""
    policy: str | None = None
    sampling: RunSampling = field(default_factory=RunSampling)
    limits: SamplerLimits = field(default_factory=SamplerLimits)
    grace_s: float = 60.0
    """How long a reply whose client went away goes on, for a retry to attach to."""
    replay_lost: bool = False
    coalesce_s: float = 0.25
    """Longest wait between two looks at an engine's stream, so that tokens are taken together (see `EngineClient`)."""
    keep_alive_s: float = 55.0
    """Longest silence in a stream; clients give up at 300 s and count real events only."""
    json_keep_alive_s: float = 30.0
    bounds: Bounds = field(default_factory=Bounds)
    poll_s: float = 2.0
    """How often each engine is asked for its version; three answers that do not come make it down."""
    probe_s: float = 5.0
    """How long such an answer may take."""
    drain_s: float = 8.0
    """How long calls in flight may take to finish when the proxy stops."""

    def __post_init__(self) -> None:
        check_listening(self.host, self.key, self.tls_cert, self.tls_key)
        if self.workers < 1 or (self.workers > 1 and self.tls_cert is not None):
            raise ConfigError(
                f"wanted --workers of at least 1, and 1 with TLS (an encrypted connection cannot change its process), "
                f"got {self.workers}; leave it out, or put a TLS server in front"
            )
        if self.thinking not in ("keep", "fork"):
            raise ConfigError(f"wanted --thinking keep or fork, got {self.thinking!r}")
        if self.policy is not None and (not self.policy or ":" in self.policy):
            raise ConfigError(
                f"wanted --policy ID, a name for the weights of an engine that has none, got {self.policy!r}; "
                "leave the number out: such weights are ID:0"
            )
        if not self.engines and not self.await_engines:
            raise ConfigError("wanted at least one --engine URL, got none; start one with `gyre engine`")


def check_listening(host: str, key: str | None, tls_cert: Path | None, tls_key: Path | None) -> None:
    """Refuse an address that anyone could use, and half a TLS setting."""
    if not key and not is_loopback(host):
        raise ConfigError(
            f"wanted a key for a proxy that listens on {host}, got none: anyone who reaches it could sample "
            "and read; add --key KEY, or listen on 127.0.0.1"
        )
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("wanted --tls-cert and --tls-key together, got one of them; give both PEM files")
    for file in (tls_cert, tls_key):
        if file is not None and not file.is_file():
            raise ConfigError(f"wanted a PEM file for TLS, got {file}, which is not a file; check the path")


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    return host in ("localhost", "::1") or host.startswith("127.")
