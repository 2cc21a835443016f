"""One worker as its supervisor sees it: a child process that is started again whenever it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gyre_data.errors import GyreError

from .link import Link

__all__ = ["WorkerProcess", "prepare"]

log = logging.getLogger(__name__)

_SHORT_LIFE_S, _LONGEST_PAUSE_S = 10.0, 5.0
_PRELOADED = [
    "gyre_proxy.workers.worker",
    "gyre_proxy.dialects.anthropic",
    "gyre_proxy.dialects.openai_chat",
    "gyre_proxy.dialects.openai_responses",
    "uvloop",
]

_context = multiprocessing.get_context("forkserver")


def prepare() -> None:
    """Begin to load, in a process of its own, what workers are forked from: they start at once and share its memory."""
    _context.set_forkserver_preload(_PRELOADED)
    multiprocessing.forkserver.ensure_running()


def _work(sock: socket.socket) -> None:
    from .worker import main

    main(sock)


class WorkerProcess:
    """Keeps one worker running. Connections for it wait here while it is being started again."""

    def __init__(
        self,
        number: int,
        handlers: Mapping[str, Callable[[Any], Any]],
        on_connection: Callable[[int, bytes], Awaitable[None]],
        start_with: Callable[[], object],
        before_calls: Callable[[], Awaitable[None]],
        on_death: Callable[[], None],
    ) -> None:
        """`start_with` gives what a fresh process is told; `before_calls` runs once it has recovered its rows."""
        self.number = number
        self.num_restarts = 0
        self.load = 0
        """Executions that it serves."""
        self._handlers, self._on_connection = handlers, on_connection
        self._start_with, self._before_calls, self._on_death = start_with, before_calls, on_death
        self._link: Link | None = None
        self._pid: int | None = None
        self._lost = asyncio.Event()
        self._waiting: list[tuple[int, bytes]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Its process id; None while there is none."""
        return self._pid if self._link is not None else None

    async def start(self) -> None:
        """Return when it takes calls; raise what kept it from doing so."""
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    def hand_over(self, descriptor: int, data: bytes) -> None:
        """Give it an open connection with what was read from it."""
        if self._stopping:
            os.close(descriptor)
        elif self._link is None:
            self._waiting.append((descriptor, data))
        else:
            self._link.hand_over(descriptor, data)

    async def ask(self, kind: str, value: Any = None) -> Any:
        """Its answer; None when there is no process to ask: a fresh one asks for itself what it needs."""
        if self._link is None:
            return None
        return await self._link.ask(kind, value)

    async def stop(self, seconds: float) -> None:
        """Have it finish, seal what it wrote, and go; it is killed after `seconds`."""
        self._stopping = True
        self._refuse_waiting()
        if self._link is not None:
            self._link.push("stop")
            try:
                await asyncio.wait_for(self._lost.wait(), seconds)
            except TimeoutError:
                log.warning("worker %d did not finish within %.0f s and is killed", self.number, seconds)
                self._kill()
        if self._keeper is not None:
            await self._keeper

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._lost.clear()
        with theirs:
            process = _context.Process(target=_work, args=(theirs,), name=f"gyre-worker-{self.number}", daemon=True)
            await asyncio.to_thread(process.start)
        self._pid = process.pid
        # Its end of the pair is closed when it ends, and not before.
        link = Link(ours, self._handlers, self._on_connection, on_lost=self._lost.set)
        try:
            await link.ask("start", self._start_with())
            await self._before_calls()
        except BaseException:
            link.close()
            self._kill()
            raise
        self._begin_with(link)

    def _begin_with(self, link: Link) -> None:
        self._link = link
        while self._waiting:
            link.hand_over(*self._waiting.pop(0))

    def _refuse_waiting(self) -> None:
        while self._waiting:
            os.close(self._waiting.pop()[0])

    async def _keep(self) -> None:
        while True:
            born = time.monotonic()
            await self._lost.wait()
            if self._link is not None:
                self._waiting += self._link.unsent
            self._link = None
            if self._stopping:
                self._refuse_waiting()
                return
            self._on_death()
            pause = 0.0 if time.monotonic() - born > _SHORT_LIFE_S else 0.2
            log.error("worker %d (pid %s) ended and is started again", self.number, self._pid)
            while not self._stopping:
                await asyncio.sleep(pause)
                try:
                    await self._spawn()
                    self.num_restarts += 1
                    break
                except (GyreError, OSError):
                    pause = min(_LONGEST_PAUSE_S, max(0.2, 2 * pause))
                    log.exception("worker %d cannot be started, trying again in %.1f s", self.number, pause)

    def _kill(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
