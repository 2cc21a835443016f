"""The worker process: a proxy without API that serves the connections its supervisor gives it.

It knows an execution from its first call on, when it asks; what the API changes later is pushed to it. Its rows go to
segments of its own. It ends with its supervisor, however that ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from gyre_data.store import RunWriter
from gyre_proxy.app import build_app
from gyre_proxy.events import EventLog
from gyre_proxy.executions import Execution
from gyre_proxy.rejoin import rejoin
from gyre_proxy.serve import run_loop, running, server_config
from gyre_proxy.service import Proxy
from gyre_proxy.settings import ProxySettings

from .known import Known
from .link import Link
from .placed import Mover, PlacedProtocol, execution_of, receive

__all__ = ["StartWith", "main"]

_SUPERVISOR_GONE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWith:
    """What a fresh worker is told. `engines` are URLs with whether they drain."""

    settings: ProxySettings
    number: int
    engines: tuple[tuple[str, bool], ...]


class _RemoteEvents(EventLog):
    """The supervisor's log, seen from here. Each process watches the engines; only weights seen first here are told."""

    def __init__(self, link: Link) -> None:
        super().__init__(capacity=1)
        self._link = link

    def add(self, kind: str, **fields: Any) -> None:
        if kind == "engine.version":
            self._link.push("engine_version", (fields["url"], fields["version"]))
        elif not kind.startswith("engine."):
            self._link.push("event", (kind, fields))


class _WorkerProxy(Proxy):
    """A proxy whose executions are kept by another process."""

    def __init__(self, link: Link, **parts: Any) -> None:
        self._link = link
        self._begun: set[str] = set()
        super().__init__(**parts)

    def load(self) -> None:
        """Nothing is known before it is asked for."""

    async def learn(self, execution_id: str) -> None:
        """Ask the supervisor, once."""
        if self.executions.get(execution_id) is None:
            known: Known | None = await self._link.ask("learn", execution_id)
            if known is not None and self.executions.get(execution_id) is None:
                # A first call may be under way that was told nothing yet: there is one execution of a name.
                execution = self._arriving.get(execution_id) or Execution(execution_id=execution_id)
                known.apply(execution)
                self.executions.add(execution)

    async def begin(self, execution: Execution) -> None:
        """Have the supervisor make it known, durably, before anything of it is recorded."""
        if execution.execution_id not in self._begun:
            known: Known = await self._link.ask("begin", (execution.execution_id, execution.harness))
            known.apply(execution)
            if self.executions.get(execution.execution_id) is None:
                self.executions.add(execution)
            self._begun.add(execution.execution_id)
        await super().begin(execution)

    def place(self, path: str) -> Mover | None:
        """Executions that were never heard of here, and the API, are for the supervisor to place."""
        execution_id = execution_of(path)
        mine = execution_id is not None and self.executions.get(execution_id) is not None
        return None if mine else self._link.hand_over

    async def hear_change(self, known: Known) -> None:
        """The API changed an execution."""
        execution = self.executions.get(known.execution_id)
        if execution is not None:
            known.apply(execution)

    async def hear_end(self, known: Known) -> None:
        """An execution ended."""
        execution = self.executions.get(known.execution_id)
        if execution is not None:
            known.apply(execution)
            await self.finish(execution)
            self._begun.discard(known.execution_id)
            self.executions.discard(execution)

    async def hear_engine(self, change: tuple[str, str, str | None]) -> None:
        """The API changed an engine."""
        action, url, version = change
        match action:
            case "add":
                await self.router.add(url)
            case "drain":
                self.router.drain(url)
            case "remove":
                self.router.remove(url)
            case "version":
                self.router.set_version(url, version or "")

    def figures(self, _: None) -> tuple[dict[str, tuple[int, int]], Any]:
        """Calls in flight and served by engine, and the metrics."""
        self.note_engines()
        return {e.url: (e.in_flight, e.served) for e in self.router.engines}, self.metrics.families()


class _Worker:
    def __init__(self, sock: socket.socket) -> None:
        self._proxy: _WorkerProxy | None = None
        self._server: uvicorn.Server | None = None
        self._ready, self._stop = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._link = Link(
            sock,
            {
                "start": self._start,
                "stop": lambda _: self._stop.set(),
                "changed": lambda known: self._own.hear_change(known),
                "ended": lambda known: self._own.hear_end(known),
                "engine": lambda change: self._own.hear_engine(change),
                "figures": lambda nothing: self._own.figures(nothing),
            },
            self._connected,
            on_lost=lambda: os._exit(_SUPERVISOR_GONE),  # as after kill -9: what was not acknowledged is not kept
        )

    @property
    def _own(self) -> _WorkerProxy:
        assert self._proxy is not None, "the supervisor waits for the answer to `start`"
        return self._proxy

    async def run(self) -> None:
        await self._stop.wait()
        if self._task is not None:
            await self._task

    async def _connected(self, descriptor: int, data: bytes) -> None:
        assert self._server is not None, "the supervisor waits for the answer to `start`"
        with suppress(OSError):  # its client left meanwhile
            await receive(self._server, descriptor, data)

    async def _start(self, told: StartWith) -> None:
        self._task = asyncio.create_task(self._serve(told))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()

    async def _serve(self, told: StartWith) -> None:
        settings, events = told.settings, _RemoteEvents(self._link)
        writer = RunWriter(settings.run, f"w{told.number}", create=False, lock=False)
        make = partial(_WorkerProxy, self._link)
        connect = partial(_connect, engines=dict(told.engines))
        async with running(settings, writer=writer, events=events, make=make, connect=connect) as proxy:
            assert isinstance(proxy, _WorkerProxy)
            self._proxy = proxy
            protocol = PlacedProtocol.placed(settings.bounds, proxy.place)
            self._server = server = uvicorn.Server(server_config(settings, build_app(proxy), protocol))
            serving = asyncio.create_task(server._serve([]))
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            self._ready.set()
            await self._stop.wait()
            await proxy.drain(settings.drain_s)
            server.should_exit = True
            await serving


async def _connect(proxy: Proxy, engines: dict[str, bool]) -> None:
    """Take in the engines; one that is down now comes in when it is back."""
    proxy.router.awaited = engines
    await rejoin(proxy, proxy.router.add)


def main(sock: socket.socket) -> None:
    """Work for the supervisor at the other end of `sock`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a ^C reaches all of a terminal's processes: the supervisor says when
    run_loop(_main(sock))


async def _main(sock: socket.socket) -> None:
    await _Worker(sock).run()
