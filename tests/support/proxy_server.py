"""A whole proxy on loopback inside the test's event loop, with official clients and a look at what was recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai

from gyre_data.arrays import from_table
from gyre_data.store import open as open_run
from gyre_data.types import Call, Delivery, Node
from gyre_data.verify import verify
from gyre_proxy.app import build_app
from gyre_proxy.limits import BoundedProtocol
from gyre_proxy.serve import running
from gyre_proxy.service import Proxy
from gyre_proxy.settings import ProxySettings
from tests.support.scripted_engine import ScriptedEngine, serve_app
from tests.support.toy_template import ToyTemplate

__all__ = ["Served", "calls_of", "check_run", "path_ids", "serve_proxy"]


@dataclass
class Served:
    proxy: Proxy
    url: str
    run: Path
    clients: AsyncExitStack

    def anthropic(self, execution: str = "e1", key: str = "dummy") -> anthropic.AsyncAnthropic:
        """A client that is closed with the proxy."""
        client = anthropic.AsyncAnthropic(base_url=f"{self.url}/x/{execution}", api_key=key, max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    def openai(self, execution: str = "e1", key: str = "dummy") -> openai.AsyncOpenAI:
        """A client that is closed with the proxy."""
        client = openai.AsyncOpenAI(base_url=f"{self.url}/x/{execution}/v1", api_key=key, max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, **options)


@asynccontextmanager
async def serve_proxy(
    run: Path, *engines: Any, template: Any = None, writer: Any = None, tokenizer: Path | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serve a proxy over engines that are serving already: scripted ones, or real ones with their model's folder."""
    urls = tuple(engine.url for engine in engines)
    settings = ProxySettings(run=run, engines=urls, tokenizer=tokenizer or run, drain_s=2.0, **options)
    async with (
        running(settings, template or (None if tokenizer else ToyTemplate()), writer) as proxy,
        serve_app(build_app(proxy), http=BoundedProtocol.of(settings.bounds)) as url,
        AsyncExitStack() as clients,
    ):
        yield Served(proxy, url, run, clients)


def calls_of(run: Path) -> list[Call]:
    return from_table("calls", open_run(run).table("calls"))


def deliveries_of(run: Path) -> list[Delivery]:
    return from_table("deliveries", open_run(run).table("deliveries"))


def nodes_of(run: Path) -> dict[str, Node]:
    return {node.node_id: node for node in from_table("nodes", open_run(run).table("nodes"))}


def path_ids(nodes: dict[str, Node], leaf: str | None) -> list[int]:
    parts: list[list[int]] = []
    while leaf is not None:
        parts.append(nodes[leaf].token_ids.tolist())
        leaf = nodes[leaf].parent_id
    return [token for part in reversed(parts) for token in part]


def check_run(run: Path, *engines: ScriptedEngine) -> list[Call]:
    """What must hold of every recording: verify is clean, every prompt that an engine got is the path of its call."""
    report = verify(run)
    assert not report.problems, report.problems
    calls, nodes, reader = calls_of(run), nodes_of(run), open_run(run)
    sent: dict[str, list[list[int]]] = {}
    for request in (request for engine in engines for request in engine.requests):
        sent.setdefault(request["rid"].rpartition(".")[0], []).append(request["input_ids"])
    for call in calls:
        ids = path_ids(nodes, call.prompt_node)
        assert len(ids) == call.prompt_tokens
        whole = path_ids(nodes, call.output_node or call.prompt_node)
        for given in sent.get(call.call_id, ()):  # the first attempt, and those that went on from a partial output
            assert given == whole[: max(len(given), len(ids))]
        if call.output_node is not None:
            output = nodes[call.output_node]
            assert output.parent_id == call.prompt_node
            assert len(output.token_ids) == len(output.logprobs) == call.output_tokens
            assert output.policy_versions[-1].end == call.output_tokens
            assert np.isfinite(output.logprobs).all()
            assert call.attempts[-1].end == call.output_tokens
        for blob in call.request_blobs or ():
            reader.blob(blob)
    return calls
