"""What one client may take: bounds on the size, the time and the number of its requests.

uvicorn bounds neither the head of a request nor the time that one takes to arrive, so `BoundedProtocol` does; the
other bounds are kept where they can be answered in the wire's own error shape.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gyre_data.errors import ConfigError

__all__ = ["BoundedProtocol", "Bounds"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Bounds of a proxy, all of them on: the defaults are far above what a harness does."""

    head_bytes: int = 64 << 10
    """Request line and headers together; beyond it 431."""
    body_bytes: int = 256 << 20
    """Request body; beyond it 413."""
    head_s: float = 30.0
    """A connection that has begun a request, or has just opened, must have sent its headers by then."""
    body_s: float = 60.0
    """Longest silence while a body is being sent; beyond it 408."""
    calls: int = 4096
    """Calls in flight; beyond it the wire's `overloaded`."""
    calls_per_execution: int = 256
    """Calls of one execution in flight; beyond it 429."""
    call_s: float = 4 * 3600.0
    """Longest time that one call may be sampled; then it is aborted, and recorded as far as it came."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"wanted a bound above 0 for {name}, got {getattr(self, name)}")


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, closing a connection whose request head is too large or too slow."""

    bounds = Bounds()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(cls, bounds: Bounds) -> type[BoundedProtocol]:
        """The protocol with these bounds."""
        return type("BoundedProtocol", (cls,), {"bounds": bounds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._head_arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse a head that goes on and on; one that came whole is judged when it is complete."""
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            self._judge(self._head_bytes)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; judge it before anything acts on it."""
        self._head_arrived()
        if not self._judge(len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)):
            return
        if self.parser.should_upgrade() and self.parser.get_method() == b"POST":
            # The parser takes what follows for another protocol, and the body would be lost.
            self._refuse(b"400 Bad Request", "HTTP/1.1 without an upgrade header; turn HTTP/2 (h2c) off in the client")
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Bytes of a request that was refused go nowhere."""
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The same for its end."""
        if not self.transport.is_closing():
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_arrived()
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.bounds.head_s, self._too_slow)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _judge(self, num_bytes: int) -> bool:
        if num_bytes <= self.bounds.head_bytes:
            return True
        self._refuse(b"431 Request Header Fields Too Large", f"headers of at most {self.bounds.head_bytes} bytes")
        return False

    def _too_slow(self) -> None:
        self._head_timer = None
        self._refuse(b"408 Request Timeout", f"the headers of a request within {self.bounds.head_s:g} s")

    def _refuse(self, status: bytes, wanted: str) -> None:
        self._head_arrived()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # another reply is on this connection: its bytes may not be mixed with ours
            return
        body = b'{"error":{"type":"invalid_request_error","message":"wanted %s"}}' % wanted.encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
