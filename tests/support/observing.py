"""An observing proxy on loopback inside the test's event loop, and raw clients to compare it with no proxy at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_data.store import open as open_run
from gyre_data.types import Call
from gyre_data.verify import verify
from gyre_proxy.limits import BoundedProtocol
from gyre_proxy.observe.app import build_observe_app
from gyre_proxy.observe.service import Observer, observing
from gyre_proxy.observe.settings import ObserveSettings, Upstreams
from tests.support.provider import Provider
from tests.support.proxy_server import calls_of
from tests.support.scripted_engine import serve_app

__all__ = ["Got", "Watched", "checked_calls", "messages_on", "raw_call", "read_answer", "serve_observer"]


@dataclass(kw_only=True, slots=True)
class Watched:
    observer: Observer
    url: str
    run: Path

    def base(self, execution: str = "e1") -> str:
        return f"{self.url}/x/{execution}"


@asynccontextmanager
async def serve_observer(run: Path, provider: Provider, writer: Any = None, **options: Any) -> AsyncIterator[Watched]:
    """An observing proxy whose upstreams are all `provider`, unless `upstreams` says otherwise."""
    everywhere = Upstreams(anthropic=provider.url, openai=provider.url, chatgpt=f"{provider.url}/backend-api/codex")
    settings = ObserveSettings(run=run, drain_s=2.0, **{"upstreams": everywhere, **options})
    async with observing(settings, writer) as observer:
        app, http = build_observe_app(observer), BoundedProtocol.of(settings.bounds)
        async with serve_app(app, http=http, date_header=False, server_header=False) as url:
            yield Watched(observer=observer, url=url, run=run)


@dataclass(frozen=True, kw_only=True, slots=True)
class Got:
    """An answer as it came off the socket; `whole` False when the connection broke before its end."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    whole: bool


async def raw_call(
    base: str, method: str, target: str, headers: list[tuple[str, str]], body: bytes = b"", *, chunked: bool = False
) -> Got:
    """One request written by hand, on a connection of its own."""
    url = urlsplit(base)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 26)
    try:
        framing = (
            [("Transfer-Encoding", "chunked")] if chunked else [("Content-Length", str(len(body)))] if body else []
        )
        lines = [f"{method} {url.path}{target} HTTP/1.1", f"Host: {url.netloc}"]
        lines += [f"{name}: {value}" for name, value in [*headers, *framing]]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        if chunked:
            half = len(body) // 2
            for piece in (body[:half], body[half:]):
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            writer.write(body)
        return await read_answer(reader, method)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader, method: str) -> Got:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    headers = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
    told, body, whole = dict(headers), b"", True
    status = int(first.split(" ")[1])
    try:
        if method == "HEAD" or status in (204, 304):
            pass
        elif told.get("transfer-encoding") == "chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            wanted = int(told.get("content-length", 0))
            while len(body) < wanted and (piece := await reader.read(wanted - len(body))):
                body += piece
            whole = len(body) == wanted
    except (asyncio.IncompleteReadError, ConnectionError):
        whole = False
    return Got(status=status, headers=headers, body=body, whole=whole)


def checked_calls(run: Path) -> list[Call]:
    """The calls of a run that `gyre verify` finds clean."""
    report = verify(run)
    assert not report.problems, report.problems
    return calls_of(run)


def messages_on(run: Path, execution: str, call: Call) -> list[Any]:
    """The messages along a call's path, its output last."""
    opened = open_run(run)
    tree = opened[execution].tree
    leaf = tree.leaf(next(one for one in tree.calls if one.call_id == call.call_id))
    return [json.loads(opened.blob(blob)) for i in tree.path(leaf) for blob in tree.message_blobs(int(i))]
