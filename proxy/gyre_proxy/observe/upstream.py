"""Where a request goes, and which of its headers go with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx

from gyre_proxy.observe.settings import Upstreams
from gyre_proxy.settings import is_loopback

__all__ = ["Connections", "Headers", "Target", "passed_on", "target_of", "wire_of"]

Headers = list[tuple[bytes, bytes]]

# RFC 9110 7.6.1, and what belongs to this connection alone.
_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
_WIRES = {
    "v1/messages": "anthropic",
    "v1/chat/completions": "openai_chat",
    "v1/responses": "openai_responses",
}
_OPENAI = ("v1/chat/", "v1/responses", "v1/embeddings", "v1/completions", "v1/moderations", "v1/audio/", "v1/images/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """`base` is the upstream as it is recorded; `raw` the path and query exactly as they are sent."""

    base: str
    url: httpx.URL
    raw: bytes


def wire_of(method: str, rest: str) -> str | None:
    """The wire of a request that is recorded as a call; None for everything else, which only passes."""
    return _WIRES.get(rest) if method == "POST" else None


def target_of(upstreams: Upstreams, rest: str, raw_rest: bytes, headers: Mapping[str, str]) -> Target:
    """The upstream of a request: by its path, else by what its headers say about the client.

    `rest` and `raw_rest` are the path below the execution, decoded and as it came with its query.
    """
    if "chatgpt-account-id" in headers:
        base, raw_rest = upstreams.chatgpt, raw_rest.removeprefix(b"/v1")
    elif rest.startswith(_OPENAI) or not _speaks_anthropic(rest, headers):
        base = upstreams.openai
    else:
        base = upstreams.anthropic
    url = httpx.URL(base)
    return Target(base=base.rstrip("/"), url=url, raw=url.raw_path.rstrip(b"/") + raw_rest)


def _speaks_anthropic(rest: str, headers: Mapping[str, str]) -> bool:
    return (
        rest.startswith("v1/messages")
        or any(name.startswith("anthropic-") or name == "x-api-key" for name in headers)
        or (headers.get("user-agent", "").startswith(("claude-", "axios/", "Bun/")) and not rest.startswith("v1/"))
    )


def passed_on(headers: Iterable[tuple[bytes, bytes]], *, request: bool) -> Headers:
    """The headers for the other side, in order: all but those of this hop; of a request also without ours and Host."""
    headers = [(name.lower(), value) for name, value in headers]
    named = {token.strip().lower() for name, value in headers if name == b"connection" for token in value.split(b",")}
    dropped = _HOP | named | ({b"host"} if request else set())
    return [
        (name, value)
        for name, value in headers
        if name not in dropped and not (request and name.startswith(b"x-gyre-"))
    ]


class Connections:
    """Kept connections to the upstreams, one client per host. This machine's proxy and CA settings hold for them."""

    def __init__(self) -> None:
        self._clients: dict[str, httpx.AsyncClient] = {}

    def to(self, url: httpx.URL) -> httpx.AsyncClient:
        """The client for a host; loopback is never reached through another proxy."""
        origin = f"{url.scheme}://{url.netloc.decode()}"
        if origin not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30.0)
            self._clients[origin] = httpx.AsyncClient(trust_env=not is_loopback(url.host), limits=limits)
        return self._clients[origin]

    async def aclose(self) -> None:
        """Close all of them."""
        for client in self._clients.values():
            await client.aclose()
