"""Servers of an event loop beside tests that wait for processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

__all__ = ["held_in_a_thread"]


@contextmanager
def held_in_a_thread(serving: AbstractAsyncContextManager[Any]) -> Iterator[None]:
    """Hold `serving` on a loop of its own until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def done(work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result()

    async def left() -> None:
        await serving.__aexit__(None, None, None)

    async def entered() -> None:
        await serving.__aenter__()

    try:
        done(entered())
        try:
            yield
        finally:
            done(left())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
