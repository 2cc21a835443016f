"""Runs a proxy as a process: opens the run, checks the engines, listens, and leaves the folder sealed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import uvicorn
from starlette.types import ASGIApp

from gyre_data.errors import ConfigError, EngineError
from gyre_data.store import Run, RunWriter
from gyre_data.store import open as open_run

from .app import build_app
from .collector import start_up_kept
from .engine import EngineClient, http_client
from .events import EventLog
from .limits import BoundedProtocol
from .metrics import Metrics
from .observe.app import build_observe_app
from .observe.service import Observer, observing
from .observe.settings import ObserveSettings
from .recorder import Recorder
from .rejoin import rejoin
from .restore import same_recording
from .router import Engine, Router
from .service import Proxy
from .settings import ProxySettings
from .template import ChatTemplate, Template
from .workers.placed import PlacedProtocol
from .workers.process import prepare

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["DEFAULT_PORT", "run_loop", "running", "serve", "server_config"]

log = logging.getLogger(__name__)

DEFAULT_PORT = 8765
_ENGINE_WAIT_S = 15.0


async def _connect(proxy: Proxy) -> None:
    """Take in the engines given at start, waiting a moment for one that is still starting, and those added later."""
    deadline = asyncio.get_running_loop().time() + _ENGINE_WAIT_S
    for url in proxy.settings.engines:
        drains = proxy.router.awaited.get(url.rstrip("/"), False)
        while True:
            try:
                await proxy.add_engine(url, drains)
                break
            except EngineError:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.3)

    async def add(url: str, drains: bool) -> Engine:
        engine = await proxy.add_engine(url, drains)
        for action in ("add", "drain") if drains else ("add",):
            await proxy.engine_changed(action, engine.url, None)
        return engine

    await rejoin(proxy, add)


@asynccontextmanager
async def running(
    settings: ProxySettings,
    template: Template | None = None,
    writer: RunWriter | None = None,
    *,
    events: EventLog | None = None,
    make: Callable[..., Proxy] = Proxy,
    connect: Callable[[Proxy], Awaitable[None]] = _connect,
) -> AsyncIterator[Proxy]:
    """A proxy with its run open and its engines checked, closed and sealed at the end. It does not listen yet.

    A process that is one of several passes its own `events`, kind of proxy (`make`) and way to its engines (`connect`).
    """
    writer = writer or RunWriter(settings.run)
    metrics, events = Metrics(), events or EventLog()
    recorder = Recorder(writer, metrics.commit_s.observe)
    http = http_client()
    started = False
    try:
        proxy = _build(settings, template, writer, recorder, open_run(settings.run), http, events, metrics, make)
        await connect(proxy)
        proxy.router.start()
        started = True
        try:
            with start_up_kept():
                yield proxy
        finally:
            await proxy.drain(settings.drain_s)
    finally:
        await http.close()
        await asyncio.to_thread(recorder.close)
        if not started:
            writer.discard()


def _build(
    settings: ProxySettings,
    template: Template | None,
    writer: RunWriter,
    recorder: Recorder,
    run: Run,
    http: aiohttp.ClientSession,
    events: EventLog,
    metrics: Metrics,
    make: Callable[..., Proxy],
) -> Proxy:
    def changed(engine: Engine, what: str) -> None:
        events.add("engine." + what, url=engine.url, state=engine.state, version=str(engine.version))
        if what in ("added", "removed", "draining", "up") and writer.is_owner:
            engines = {"engines": [one.url for one in router.engines]}
            info = {
                "endpoints": {**run.info.get("endpoints", {}), **engines},
                "kept_engines": router.told(settings.engines),
            }
            if any(run.info.get(key) != value for key, value in info.items()):
                writer.update_info(info)

    if template is None:
        # A template that prints the date prints the run's first day for ever: a restart renders the same tokens.
        created_at = run.info.get("created_at")
        now = datetime.fromisoformat(created_at) if created_at else None
        template = ChatTemplate.load(settings.tokenizer, settings.template, now=now)
    same_recording(run, settings.mode, template.fingerprint)
    router = Router(
        lambda url: EngineClient(url, http, settings.coalesce_s),
        settings.policy,
        poll_s=settings.poll_s,
        probe_s=settings.probe_s,
        on_change=changed,
    )
    if writer.is_owner:
        router.awaited = dict(run.info.get("kept_engines") or {})
    return make(
        settings=settings, template=template, router=router, recorder=recorder, run=run, events=events, metrics=metrics
    )


def serve(
    settings: ProxySettings | ObserveSettings, on_ready: Callable[[str, str], None] = lambda url, how: None
) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is in flight, seal the run, and return.

    `on_ready` is told the address, and how it records in words.
    """
    run_loop(_serve(settings, on_ready))


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end on the fastest loop that this system has."""
    try:
        import uvloop
    except ImportError:  # no build for some systems
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _serve(settings: ProxySettings | ObserveSettings, on_ready: Callable[[str, str], None]) -> None:
    if isinstance(settings, ProxySettings) and settings.workers > 1:
        prepare()
    writer = RunWriter(settings.run)
    try:
        listener = _listen(settings, open_run(settings.run).info)
    except ConfigError:
        writer.discard()
        raise
    with listener:
        await _serve_on(listener, settings, writer, on_ready)


async def _serve_on(
    listener: socket.socket,
    settings: ProxySettings | ObserveSettings,
    writer: RunWriter,
    on_ready: Callable[[str, str], None],
) -> None:
    from .workers.supervisor import Supervisor  # its workers are made of this module

    async with _opened(settings, writer, Supervisor) as proxy:
        url = _url(settings, listener.getsockname()[1])
        writer.update_info(_info(proxy, url))
        app = build_observe_app(proxy) if isinstance(proxy, Observer) else build_app(proxy)
        protocol = BoundedProtocol.of(settings.bounds)
        if isinstance(proxy, Supervisor):
            protocol = PlacedProtocol.placed(settings.bounds, proxy.place)
        server = uvicorn.Server(server_config(settings, app, protocol))
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        if isinstance(proxy, Supervisor):
            proxy.server = server
            await proxy.start()
        task = asyncio.create_task(_run_server(server, listener))
        on_ready(url, "observe mode" if isinstance(proxy, Observer) else f"policy mode   {proxy.parser} replies")
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        await proxy.drain(settings.drain_s)
        server.should_exit = True
        await task
        stopped.cancel()


def _opened(
    settings: ProxySettings | ObserveSettings, writer: RunWriter, supervisor: type[Proxy]
) -> AbstractAsyncContextManager[Proxy | Observer]:
    if isinstance(settings, ObserveSettings):
        return observing(settings, writer)
    return running(settings, writer=writer, make=supervisor if settings.workers > 1 else Proxy)


async def _run_server(server: uvicorn.Server, listener: socket.socket) -> None:
    # uvicorn would install signal handlers of its own and re-raise the signal at the end.
    await server._serve([listener])


def server_config(
    settings: ProxySettings | ObserveSettings, app: ASGIApp, protocol: type[BoundedProtocol]
) -> uvicorn.Config:
    """How `app` is served."""
    # A reply that is broken on purpose looks like a fault of the application to the server.
    logging.getLogger("uvicorn.error").addFilter(_not_broken_reply)
    return uvicorn.Config(
        app,
        http=protocol,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
        backlog=4096,
        server_header=False,
        date_header=settings.mode == "policy",  # a hosted API's own passes
    )


def _not_broken_reply(record: logging.LogRecord) -> bool:
    return record.getMessage() != "ASGI callable returned without completing response."


def _listen(settings: ProxySettings | ObserveSettings, info: dict[str, Any]) -> socket.socket:
    """The port asked for; else that of run.json, so that harnesses survive a restart; else the usual or a free one."""
    known = _known_port(info)
    if settings.port is not None or known is not None:
        port = settings.port if settings.port is not None else known or 0
        try:
            return _bind(settings.host, port)
        except OSError as error:
            raise ConfigError(
                f"wanted to listen on {settings.host}:{port}, got {error.strerror}; "
                "stop what listens there or give another --port"
            ) from error
    try:
        return _bind(settings.host, DEFAULT_PORT)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"wanted to listen on {settings.host}, got {error.strerror}; give another --host"
            ) from error
    return _bind(settings.host, 0)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(False)
    return listener


def _known_port(info: dict[str, Any]) -> int | None:
    proxy = (info.get("endpoints") or {}).get("proxy")
    try:
        return httpx.URL(proxy).port if isinstance(proxy, str) else None
    except httpx.InvalidURL:
        return None


def _url(settings: ProxySettings | ObserveSettings, port: int) -> str:
    host, scheme = settings.host, "https" if settings.tls_cert else "http"
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{name}:{port}"


def _info(proxy: Proxy | Observer, url: str) -> dict[str, Any]:
    endpoints = {"proxy": url, "engines": [engine.url for engine in proxy.router.engines]}
    known = {"endpoints": endpoints, "pid": os.getpid(), "mode": proxy.settings.mode}
    return {**known, **(proxy.info() if isinstance(proxy, Observer) else _policy_info(proxy))}


def _policy_info(proxy: Proxy) -> dict[str, Any]:
    settings = proxy.settings
    return {
        "policy": str(proxy.version) if proxy.version else None,
        "tokenizer": str(settings.tokenizer.resolve()),
        "template": str(settings.template.resolve()) if settings.template else None,
        "fingerprint": proxy.template.fingerprint,
        "parser": proxy.parser,
        "thinking": settings.thinking,
        "late_system": str(proxy.late_system),
        "context_window": proxy.context_window,
    }
