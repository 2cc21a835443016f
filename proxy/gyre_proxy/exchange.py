"""One model call over HTTP: from the request's bytes to the last byte of its reply.

Rules of the wire: headers and the opening event at once; never a clean end before the reply is complete and recorded;
silence is broken by events that clients count; a fault before the headers is the wire's own error, a fault after them
an error event and a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from gyre_data.errors import GyreError

from .address import Address, AddressError
from .dialects.base import BadRequest, Dialect, ReplyContext, StreamEncoder
from .faults import CallError, kind_of
from .generation import Follower, Generation
from .limits import Bounds
from .message import Request, TokenLogprob
from .service import Proxy

__all__ = ["BrokenReplyError", "read_body", "serve_call"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wire:
    """The connection of one call."""

    dialect: Dialect
    scope: Scope
    receive: Receive
    send: Send

    async def head(self, status: int, content_type: str, extra: Mapping[str, str], length: int | None = None) -> None:
        headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-cache")]
        headers += [(name.encode(), value.encode()) for name, value in extra.items()]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, data: bytes, extra: Mapping[str, str]) -> None:
        await self.head(status, "application/json", extra, len(data))
        await self.body(data, more=False)

    async def refuse(self, kind: str, message: str, param: str | None = None, extra: Mapping[str, str] = {}) -> None:
        status = self.dialect.statuses[kind]
        if kind in ("rate_limit", "overloaded"):
            extra = {**extra, "retry-after": "1"}
        if kind in ("too_large", "timeout"):
            extra = {**extra, "connection": "close"}  # what is left of the body is no next request
        await self.whole(status, self.dialect.error(status, kind, message, param), extra)


async def serve_call(
    proxy: Proxy, address: Address | AddressError, scope: Scope, receive: Receive, send: Send, wire: str
) -> None:
    """Answer one POST to a model endpoint."""
    out = _Wire(dialect=proxy.dialects[wire], scope=scope, receive=receive, send=send)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    try:
        body = await read_body(receive, proxy.settings.bounds)
        if body is None:
            return
        if isinstance(address, AddressError):
            await out.refuse("not_found", str(address))
            return
        _refuse_compressed(headers)
        if address.only_counts:
            num_tokens = await proxy.count(address, out.dialect, body, headers)
            await out.whole(200, b'{"input_tokens":%d}' % num_tokens, {})
            return
        generation, request = await proxy.accept(address, out.dialect, body, headers, _path_of(address, scope))
    except GyreError as error:
        kind = kind_of(error)
        proxy.metrics.refused.labels(kind).inc()
        await out.refuse(kind, str(error), error.param if isinstance(error, BadRequest) else None)
    except Exception as error:
        log.exception("%s failed inside the proxy before it was sampled", scope["path"])
        proxy.metrics.refused.labels("internal").inc()
        await out.refuse("internal", f"the proxy failed on this request: {type(error).__name__}; see its log")
    else:
        await _reply(proxy, out, generation, request)


def _refuse_compressed(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise CallError(
            "invalid_request",
            f"wanted a plain request body, got one with content-encoding {encoding:.80}; "
            "turn the compression of requests off in the client",
        )


async def _reply(proxy: Proxy, out: _Wire, generation: Generation, request: Request) -> None:
    follower = generation.attach()
    watch = asyncio.get_running_loop().create_task(_watch(out.receive, follower))
    delivered = False
    try:
        delivered = await (_stream if request.stream else _batch)(proxy, out, generation, follower, request)
    finally:
        generation.detach(follower, delivered)
        watch.cancel()


async def _stream(proxy: Proxy, out: _Wire, generation: Generation, follower: Follower, request: Request) -> bool:
    encoder = out.dialect.stream(_context(proxy, generation, request))
    await out.head(200, "text/event-stream; charset=utf-8", _ids(generation))
    await out.body(encoder.start(), more=True)
    seen, spoke = 0, time.monotonic()
    while not follower.gone:
        fresh = generation.events[seen:]
        if fresh:
            seen, spoke = seen + len(fresh), time.monotonic()
            data = b"".join(encoder.event(event) for event in fresh)
            if data:
                await out.body(data, more=True)
            continue
        if generation.done:
            return await _finish_stream(out, generation, encoder, follower)
        left = spoke + proxy.settings.keep_alive_s - time.monotonic()
        if left <= 0:
            spoke = time.monotonic()
            await out.body(encoder.keep_alive(), more=True)
            continue
        await follower.wait(left)
    return False


async def _finish_stream(out: _Wire, generation: Generation, encoder: StreamEncoder, follower: Follower) -> bool:
    if generation.failure is not None:
        # The response is left without its end on purpose: some clients take a clean end for a finished turn.
        await out.body(encoder.error(kind_of(generation.failure), str(generation.failure)), more=True)
        raise BrokenReplyError
    await out.body(encoder.finish(generation.finish, generation.usage, generation.text.stopped), more=True)
    delivered = not follower.gone
    await out.body(b"", more=False)
    return delivered


async def _batch(proxy: Proxy, out: _Wire, generation: Generation, follower: Follower, request: Request) -> bool:
    started, begun = time.monotonic(), False
    while not generation.done:
        if follower.gone:
            return False
        left = started + proxy.settings.json_keep_alive_s - time.monotonic()
        if left <= 0:
            started = time.monotonic()
            if not begun:
                begun = True
                await out.head(200, "application/json", _ids(generation))
            await out.body(b" ", more=True)
            continue
        await follower.wait(left)
    if follower.gone:
        return False
    if generation.failure is not None:
        if begun:
            raise BrokenReplyError
        await out.refuse(kind_of(generation.failure), str(generation.failure), extra=_ids(generation))
        return False
    data = out.dialect.batch(
        _context(proxy, generation, request), generation.reply, generation.usage, generation.text.stopped
    )
    if begun:
        await out.body(data, more=False)
    else:
        await out.whole(200, data, _ids(generation))
    return not follower.gone


class BrokenReplyError(Exception):
    """Raised through the server so that it drops the connection without ending the response."""


def _context(proxy: Proxy, generation: Generation, request: Request) -> ReplyContext:
    def logprobs() -> Sequence[TokenLogprob]:
        sampled, fresh = generation.sampler, proxy.reply_text(generation.facts.plan, request)
        return fresh.visible(sampled.output_ids, sampled.logprobs)

    return ReplyContext(
        call_id=generation.call_id,
        node_id=generation.facts.output_node_id,
        model=request.model,
        created=int(generation.facts.started_at.timestamp()),
        prompt_tokens=len(generation.facts.plan.prompt_ids),
        include_usage=request.include_usage,
        logprobs=logprobs if request.logprobs else None,
        namespaces=request.namespaces,
        echo=request.echo,
    )


def _ids(generation: Generation) -> dict[str, str]:
    return {"request-id": generation.call_id, "x-request-id": generation.call_id, "x-gyre-call": generation.call_id}


def _path_of(address: Address, scope: Scope) -> str:
    """The path below the base URL; of the query only names that say which API is spoken: a key may stand there too."""
    asked = parse_qsl(scope["query_string"].decode("latin-1"))
    kept = urlencode([(name, value) for name, value in asked if name in ("beta", "api-version")])
    return f"/{address.rest}" + (f"?{kept}" if kept else "")


async def read_body(receive: Receive, bounds: Bounds) -> bytes | None:
    """The request's body; None when the client left before it was whole. Raises CallError beyond the bounds."""
    pieces, size = [], 0
    while True:
        try:
            async with asyncio.timeout(bounds.body_s):
                message = await receive()
        except TimeoutError:
            raise CallError("timeout", f"wanted the request's body, got nothing more for {bounds.body_s:g} s") from None
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        more = message.get("more_body", False)
        if size > bounds.body_bytes:
            pieces.clear()
            # A client that is still sending would meet a closed connection instead of the answer.
            if not more or size > 4 * bounds.body_bytes:
                limit = bounds.body_bytes
                raise CallError("too_large", f"wanted a request body of at most {limit} bytes, got more; send less")
        elif not more:
            return b"".join(pieces)


async def _watch(receive: Receive, follower: Follower) -> None:
    message: AsgiMessage = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
    follower.leave()
