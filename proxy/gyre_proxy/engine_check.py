"""One look at an engine before anything is recorded: `gyre doctor`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from .engine import EngineClient, http_client
from .router import Engine, read_version
from .template import ChatTemplate
from .tokenizer_check import check_tokenizer

__all__ = ["check_engine"]


def check_engine(url: str, tokenizer: Path, policy: str | None = None) -> str:
    """Compare a folder's tokenizer and template with an engine's as the proxy would at its start; return its version.

    Raises ConfigError with what differs and what to do, EngineError when the engine does not answer.
    """
    return asyncio.run(_check(url, tokenizer, policy))


async def _check(url: str, tokenizer: Path, policy: str | None) -> str:
    http = http_client()
    try:
        client = EngineClient(url, http)
        info = await client.info()
        version = read_version(info.weight_version, policy)
        template = await asyncio.to_thread(ChatTemplate.load, tokenizer)
        await check_tokenizer(template, Engine(client=client, info=info, version=version, epoch=0), tokenizer)
        return str(version)
    finally:
        await http.close()
