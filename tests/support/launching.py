"""A proxy over a scripted engine, and `gyre run`'s supervisor at work on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gyre_proxy.launch.client import ProxyClient
from gyre_proxy.launch.supervisor import RunResult, Supervisor
from gyre_proxy.launch.tasks import Task

from .proxy_server import Served, serve_proxy
from .scripted_engine import ScriptedEngine, serve_app

REPLY = {"deltas": [{"ids": [111, 107], "text": "ok", "lps": [-0.1, -0.2]}], "finish": {"type": "stop"}}


@asynccontextmanager
async def serving_scripted(run: Path) -> AsyncIterator[Served]:
    engine = ScriptedEngine([REPLY])
    async with serve_app(engine) as url:
        engine.url = url
        async with serve_proxy(run, engine) as proxy:
            yield proxy


async def supervise(served: Served, *tasks: Task, **options: Any) -> RunResult:
    async with ProxyClient(served.url, patience_s=5) as client:
        return await Supervisor(client, served.run, tasks, **options).run()
