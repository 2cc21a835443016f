"""Connections that move to the process that serves their next request.

Every harness keeps connections open and some use one for many executions, so where a connection belongs is decided
anew by the first line of each request. The socket itself moves; no byte of a reply goes through a second process.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn

from gyre_proxy.limits import BoundedProtocol, Bounds

__all__ = ["Mover", "PlacedProtocol", "execution_of", "path_of", "receive"]

Mover = Callable[[int, bytes], None]
"""Takes an open connection (its descriptor) and the bytes that were read of its next request."""

_MOST_LINE = 8 << 10


class PlacedProtocol(BoundedProtocol):
    """A connection that is given away when the request that begins on it belongs to another process.

    `place` tells of a request's path who takes it; None is this process. A request that comes before the reply to the
    one before it has ended stays here: nobody can take half a connection.
    """

    place: Callable[[str], Mover | None]

    def __init__(self, *args: Any, first: bytes | None = None, **options: Any) -> None:
        """`first` are the bytes that came with a connection that was given to this process."""
        super().__init__(*args, **options)
        self._first = first
        self._begun = b""
        self._receiving = False

    @classmethod
    def placed(cls, bounds: Bounds, place: Callable[[str], Mover | None]) -> type[PlacedProtocol]:
        """The protocol with these bounds and this judgement."""
        return type("PlacedProtocol", (cls,), {"bounds": bounds, "place": staticmethod(place)})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Go on with what was read elsewhere."""
        super().connection_made(transport)
        if self._first is not None:
            super().data_received(self._first)
            self._first = None

    def data_received(self, data: bytes) -> None:
        """Read on, or give the connection away."""
        if not self._receiving and (self.cycle is None or self.cycle.response_complete):
            self._begun += data
            if b"\n" not in self._begun.lstrip(b"\r\n") and len(self._begun) < _MOST_LINE:
                return  # the line is not whole yet; the bound on the head's time runs
            data, self._begun = self._begun, b""
            mover = self.place(path_of(data))
            if mover is not None:
                self._give_away(mover, data)
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._receiving = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """It has been read to its end."""
        self._receiving = False
        super().on_message_complete()

    def _give_away(self, mover: Mover, data: bytes) -> None:
        descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        self.transport.pause_reading()
        self.transport.abort()  # closes this process's descriptor only; the connection lives on in the other
        mover(descriptor, data)


async def receive(server: uvicorn.Server, descriptor: int, data: bytes) -> None:
    """Serve a connection that another process gave away."""
    protocol: Any = server.config.http_protocol_class
    sock = socket.socket(fileno=descriptor)
    sock.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(
        lambda: protocol(
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state, first=data
        ),
        sock,
    )


def execution_of(path: str) -> str | None:
    """The execution that a path names: `/x/<execution>/...`; None for the API and everything else."""
    parts = path.strip("/").split("/", 2)  # as `parse_address` reads it
    return parts[1] if len(parts) > 1 and parts[0] == "x" and parts[1] else None


def path_of(data: bytes) -> str:
    """The path in the request line that `data` begins with, without its query; empty when there is none."""
    words = data.lstrip(b"\r\n").split(b"\n", 1)[0].split(b" ")
    try:  # as the server reads it: a target may be a whole URL
        return unquote((httptools.parse_url(words[1]).path or b"").decode("latin-1")) if len(words) > 2 else ""
    except httptools.HttpParserInvalidURLError:
        return ""
