"""One request through to a hosted API and its answer back, byte for byte, as they come.

Bodies are neither decoded nor joined on the way. The upstream's error is the client's error; an upstream that breaks
off breaks the client's connection at the same place; a client that leaves ends the upstream's work.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

import httpx
from starlette.types import Receive, Scope, Send

from gyre_data.errors import GyreError
from gyre_proxy.address import Address
from gyre_proxy.dialects import load
from gyre_proxy.exchange import BrokenReplyError
from gyre_proxy.faults import kind_of
from gyre_proxy.observe.bodies import Secrets
from gyre_proxy.observe.exchange import Body, Exchange
from gyre_proxy.observe.service import Observer
from gyre_proxy.observe.upstream import Target, passed_on, target_of, wire_of

__all__ = ["Relay", "refuse"]


class _ClientBody(httpx.AsyncByteStream):
    """The request's body as it arrives, and after its end the client's leaving."""

    def __init__(self, receive: Receive, body: Body) -> None:
        self._receive, self._body = receive, body
        self._over = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            more = True
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise httpx.WriteError("the client went away while it sent its request")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                self._body.take(chunk)
                if chunk:
                    yield chunk
        finally:
            self._over.set()

    async def left(self) -> None:
        """Return when the client has gone."""
        await self._over.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


@dataclass(kw_only=True, slots=True, eq=False)
class _Passing:
    """The two connections of one exchange."""

    observer: Observer
    exchange: Exchange
    send: Send
    begun: bool = False
    recorded: bool = False
    done: bool = False

    async def record(self) -> None:
        """Once, whatever happens."""
        if self.exchange.wire is not None and not self.recorded:
            self.recorded = True
            await self.observer.record(self.exchange)

    async def run(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        """Pass the request, then the answer. Raises httpx.TransportError when the upstream fails."""
        response = await client.send(request, stream=True)
        try:
            headers = passed_on(response.headers.raw, request=False)
            self.exchange.answered(response.status_code, headers)
            self.begun = True
            await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
            async for chunk in response.aiter_raw():
                self.exchange.take(chunk)
                if self.exchange.whole:
                    await self.record()
                await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
                self.done = self.exchange.whole  # a client may hang up as soon as it has the last event
        finally:
            await response.aclose()
        await self.record()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        self.done = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Relay:
    """The way through."""

    observer: Observer

    async def serve(self, address: Address, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request below `/x/<execution>`."""
        observer = self.observer
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        wire = wire_of(scope["method"], address.rest)
        try:
            execution = await observer.execution(address, headers)
            if wire is not None:
                await observer.ready()
        except GyreError as error:
            await refuse(wire or _likely_wire(address.rest), kind_of(error), str(error), send)
            return
        target = target_of(observer.settings.upstreams, address.rest, _raw_rest(address, scope), headers)
        limit = observer.settings.bounds.body_bytes if wire is not None else 0
        exchange = Exchange(
            call_id=f"c_{secrets.token_hex(10)}",
            execution_id=execution.execution_id,
            agent=address.agent,
            wire=wire,
            path=_recorded_path(address, scope),
            headers=headers,
            upstream=target.base,
            secrets=Secrets(headers, scope["query_string"].decode("latin-1")),
            request=Body(limit),
            reply=Body(limit),
        )
        body = _ClientBody(receive, exchange.request)
        await self._pass(_Passing(observer=observer, exchange=exchange, send=send), body, target, scope)

    async def _pass(self, passing: _Passing, body: _ClientBody, target: Target, scope: Scope) -> None:
        exchange, observer = passing.exchange, self.observer
        if exchange.wire is not None:
            observer.begin(exchange)
        through = asyncio.create_task(
            passing.run(observer.connections.to(target.url), self._request(target, body, scope))
        )
        leaving = asyncio.create_task(body.left())
        try:
            await asyncio.wait({through, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not through.done():
                exchange.left = True
                through.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await through
        except httpx.TransportError as error:
            exchange.fault = f"{type(error).__name__}: {error}".rstrip(": ")
            await passing.record()
            if passing.begun:
                raise BrokenReplyError from error
            text = f"wanted {target.base}, got {exchange.fault}; check the network, or the --upstream of this proxy"
            await refuse(exchange.wire or "openai_chat", "overloaded", text, passing.send, status=502)
        finally:
            leaving.cancel()
            through.cancel()
            await passing.record()
            observer.ended(exchange, passing.done)

    def _request(self, target: Target, body: _ClientBody, scope: Scope) -> httpx.Request:
        """Built by hand: a client's defaults (headers, cookies, decoding) must not come in."""
        sent = scope["headers"]
        headers = [(b"host", target.url.netloc), *passed_on(sent, request=True)]
        chunked = any(name == b"transfer-encoding" for name, _ in sent)
        if chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        connect = self.observer.settings.connect_s
        timeout = {"connect": connect, "read": None, "write": None, "pool": None}
        return httpx.Request(
            scope["method"],
            target.url,
            headers=headers,
            stream=body,
            extensions={"target": target.raw, "timeout": timeout},
        )


async def refuse(wire: str, kind: str, message: str, send: Send, status: int | None = None) -> None:
    """An error of ours, in the wire's own shape."""
    dialect = load(wire)
    status = status or dialect.statuses[kind]
    data = dialect.error(status, kind, f"gyre: {message}")
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def _likely_wire(rest: str) -> str:
    return "anthropic" if rest.startswith("v1/messages") or not rest.startswith("v1/") else "openai_chat"


def _raw_rest(address: Address, scope: Scope) -> bytes:
    """Path below the execution and query, exactly as they came."""
    skipped = 5 if address.agent else 3  # "", "x", execution, and "a", agent
    path = b"/" + b"/".join(scope["raw_path"].split(b"/")[skipped:])
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _recorded_path(address: Address, scope: Scope) -> str:
    """The path, and of the query what says which API is spoken: a key may stand there too."""
    asked: Mapping[str, str] = dict(parse_qsl(scope["query_string"].decode("latin-1")))
    kept = urlencode([(name, value) for name, value in asked.items() if name in ("beta", "api-version")])
    return f"/{address.rest}" + (f"?{kept}" if kept else "")
