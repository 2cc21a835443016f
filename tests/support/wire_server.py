"""A real HTTP server that speaks every wire with our dialects and replies with a scripted text."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gyre_proxy.dialects import BadRequest, Dialect, ReplyContext, load
from gyre_proxy.message import Request as CanonicalRequest
from gyre_proxy.message import Usage
from gyre_proxy.parse import ReplyParser, parse_reply

PATHS = {
    "/v1/messages": "anthropic",
    "/v1/chat/completions": "openai_chat",
    "/v1/responses": "openai_responses",
}


@dataclass(kw_only=True, slots=True)
class Script:
    """What the server does next, and what it has seen."""

    text: str = ""
    finish: str = "stop"
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=30, output_tokens=8, cached_tokens=20))
    error: tuple[str, str] | None = None
    """Refuse with this kind and message before the headers."""
    fail_after: int | None = None
    """Send an error event after this many characters."""
    stop_sequence: str | None = None
    seen: list[CanonicalRequest] = field(default_factory=list)

    def context(self, request: CanonicalRequest) -> ReplyContext:
        return ReplyContext(
            call_id=f"c_{len(self.seen):020x}",
            node_id=f"n_{len(self.seen):020x}",
            model=request.model,
            created=1,
            prompt_tokens=self.usage.prompt_tokens,
            include_usage=request.include_usage,
            namespaces=request.namespaces,
            echo=request.echo,
        )


async def _streamed(script: Script, dialect: Dialect, call: ReplyContext) -> AsyncIterator[bytes]:
    encoder = dialect.stream(call)
    parser = ReplyParser()
    yield encoder.start()
    for i, character in enumerate(script.text):
        if i == script.fail_after:
            yield encoder.error("overloaded", "the engine went away")
            return
        if i % 5 == 0:
            yield encoder.keep_alive()
        for event in parser.feed(character):
            yield encoder.event(event)
    for event in parser.finish():
        yield encoder.event(event)
    yield encoder.finish(script.finish, script.usage, script.stop_sequence)


def _app(script: Script) -> Starlette:
    async def reply(request: Request) -> Response:
        dialect = load(PATHS[request.url.path])
        if script.error is not None:
            kind, message = script.error
            status = dialect.statuses[kind]
            return Response(dialect.error(status, kind, message), status, media_type="application/json")
        try:
            parsed = dialect.parse(await request.body(), request.headers)
        except BadRequest as bad:
            body = dialect.error(400, "invalid_request", str(bad), bad.param)
            return Response(body, 400, media_type="application/json")
        script.seen.append(parsed)
        call = script.context(parsed)
        if parsed.stream:
            return StreamingResponse(_streamed(script, dialect, call), media_type="text/event-stream")
        body = dialect.batch(call, parse_reply(script.text, script.finish), script.usage, script.stop_sequence)
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route(path, reply, methods=["POST"]) for path in PATHS])


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Base URL of a server on loopback, stopped at the end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(_app(script), ws="none", log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
