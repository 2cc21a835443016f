"""A worker as its supervisor sees it: what was to go to one that has ended waits for the next."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

from gyre_proxy.workers.link import Link
from gyre_proxy.workers.process import WorkerProcess


async def nothing(*_: Any) -> None:
    pass


async def test_connections_that_a_worker_cannot_take_any_more_go_to_the_next_one() -> None:
    worker = WorkerProcess(1, {}, nothing, lambda: None, nothing, lambda: None)
    (ours, theirs), (next_ours, next_theirs), (one, other) = (socket.socketpair() for _ in range(3))
    taken: list[bytes] = []

    async def takes(descriptor: int, data: bytes) -> None:
        os.close(descriptor)
        taken.append(data)

    async def spawn() -> None:
        worker._lost.clear()
        worker._begin_with(Link(next_ours, {}, nothing, on_lost=worker._lost.set))

    worker._begin_with(Link(ours, {}, nothing, on_lost=worker._lost.set))
    worker._spawn = spawn  # type: ignore[method-assign]
    taking = Link(next_theirs, {}, takes, on_lost=lambda: None)
    keeper = asyncio.create_task(worker._keep())
    theirs.close()  # it ends, and its supervisor has not looked yet
    for number in (b"1", b"2"):
        worker.hand_over(os.dup(one.fileno()), number)
    async with asyncio.timeout(60):
        while len(taken) < 2:
            await asyncio.sleep(0.01)
    assert taken == [b"1", b"2"]
    keeper.cancel()
    with suppress(asyncio.CancelledError):
        await keeper
    for end in (taking, worker._link):
        assert end is not None
        end.close()
    for left in (one, other):
        left.close()
