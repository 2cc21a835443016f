"""One request and its answer as they pass: what is known of them, and nothing that could disturb them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gyre_proxy.observe.bodies import Secrets
from gyre_proxy.observe.events import StreamEnd
from gyre_proxy.observe.upstream import Headers

__all__ = ["Body", "Exchange"]


class Body:
    """Bytes that pass, the first `limit` of them kept."""

    def __init__(self, limit: int) -> None:
        self._limit, self.kept, self.num_bytes = limit, bytearray(), 0

    def take(self, chunk: bytes) -> None:
        """Some bytes went by."""
        self.num_bytes += len(chunk)
        if (room := self._limit - len(self.kept)) > 0:
            self.kept += chunk[:room]

    @property
    def cut(self) -> bool:
        """Whether not all of it was kept."""
        return self.num_bytes > len(self.kept)


@dataclass(kw_only=True, slots=True, eq=False)
class Exchange:
    """A call under way. `wire` None: it only passes and is not recorded."""

    call_id: str
    execution_id: str
    agent: str | None
    wire: str | None
    path: str
    headers: Mapping[str, str]
    """Of the request, with lower-case names; the credential is among them."""
    upstream: str
    secrets: Secrets
    request: Body
    reply: Body
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    first_byte_at: datetime | None = None
    ended_at: datetime | None = None
    status: int | None = None
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    stream_end: StreamEnd = field(default_factory=StreamEnd)
    whole: bool = False
    """The last event or the last announced byte of the reply has come."""
    fault: str | None = None
    """Why the reply is not whole, or never came."""
    left: bool = False
    """The client went away."""

    def answered(self, status: int, headers: Headers) -> None:
        """The upstream's head is there."""
        self.status = status
        self.reply_headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}

    def take(self, chunk: bytes) -> None:
        """Some of the reply is there."""
        if self.first_byte_at is None:
            self.first_byte_at = datetime.now(UTC)
        self.reply.take(chunk)
        if "content-encoding" not in self.reply_headers:
            self.whole = self.whole or self.stream_end.reached(self.reply.kept)
        if (length := self.reply_headers.get("content-length", "")).isdigit():
            self.whole = self.whole or self.reply.num_bytes >= int(length)
