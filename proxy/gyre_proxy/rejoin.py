"""Engines that a proxy is to have and that may not answer yet: those of its last life, or those of its supervisor.

They are taken in as soon as they answer, and those that were draining drain. One that is removed or drained meanwhile
is waited for no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from gyre_data.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from .router import Engine
    from .service import Proxy

__all__ = ["rejoin"]

_PAUSE_S = 1.0


async def rejoin(proxy: Proxy, add: Callable[[str, bool], Awaitable[Engine]]) -> None:
    """Try all of `proxy.router.awaited` once; go on with the rest beside what the proxy does."""
    await _try(proxy, add)
    if proxy.router.awaited:
        proxy.router.rejoining = asyncio.get_running_loop().create_task(_go_on(proxy, add))


async def _go_on(proxy: Proxy, add: Callable[[str, bool], Awaitable[Engine]]) -> None:
    while proxy.router.awaited and not proxy.draining:
        await asyncio.sleep(_PAUSE_S)
        await _try(proxy, add)


async def _try(proxy: Proxy, add: Callable[[str, bool], Awaitable[Engine]]) -> None:
    await asyncio.gather(*(_take_in(proxy, add, *one) for one in list(proxy.router.awaited.items())))


async def _take_in(proxy: Proxy, add: Callable[[str, bool], Awaitable[Engine]], url: str, drains: bool) -> None:
    with suppress(EngineError, ConfigError):
        await add(url, drains)
