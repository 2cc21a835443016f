"""One inference engine, spoken to over SGLang's native HTTP API: ids in, ids and log-probs out.

What is guaranteed: every id of a chunk has its log-prob, no id is given twice, ids outside the vocabulary never leave
this process (an engine dies of them), and whatever goes wrong on the hop is an EngineError.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from gyre_data.errors import ConfigError, EngineError

from .chunks import Chunk, ChunkReader, EngineRefusedError, error_text, is_refusal, payloads_of
from .experts import ExpertShape

__all__ = ["EngineClient", "EngineInfo", "http_client"]

log = logging.getLogger(__name__)

_STREAM_INTERVAL = 8
"""Tokens per event that an engine is asked for. Its first token comes at once all the same, and so does the last."""
_HELD_UP = 0.1
"""Most that a token may be held up, as a share of the time that its reply has taken."""
_JSON = {"content-type": "application/json"}
_FAULTS = (aiohttp.ClientError, OSError)  # a time limit is an OSError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What an engine says about itself. None means that it does not say."""

    weight_version: str
    model_path: str | None = None
    tokenizer_path: str | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    """Most tokens of prompt and output together."""
    max_prompt: int | None = None
    """A prompt must be shorter than this: the window, or the cache if that is smaller."""
    experts: ExpertShape | None = None
    """Shape of a token's routing, for an engine that says which experts it chose."""


def http_client(max_connections: int = 4096) -> aiohttp.ClientSession:
    """A client for engine hops, made where a loop runs: no limit to how long a reply takes, many connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=max_connections, socket_factory=_watched_socket),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept-encoding": "identity"},  # to compress ids costs both sides more than to send them
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
    )


def _watched_socket(address: Any) -> socket.socket:
    """A socket whose silence the kernel questions: a machine that lost its power never closes a connection."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds_or_count in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds_or_count)
    return made


class EngineClient:
    """The calls that the proxy makes of one engine.

    A reply's stream is looked at every `coalesce_s` seconds at most, since tokens cost less together than one by one;
    sooner while the reply is young: no token is held up by more than a tenth of the time that its reply has taken. The
    end is seen as soon as it is there.
    """

    def __init__(self, url: str, http: aiohttp.ClientSession, coalesce_s: float = 0.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"wanted an engine's URL, got {url!r}; write http://{url}")
        self.url = url.rstrip("/")
        self._http, self._coalesce_s = http, coalesce_s

    async def info(self) -> EngineInfo:
        """Everything the engine says about itself; raise EngineError when it is not reachable."""
        model = await self._get("/model_info")
        server = await self._get("/server_info", optional=True)
        models = await self._get("/v1/models", optional=True)
        cards = models.get("data") if isinstance(models.get("data"), list) else []
        path = model.get("model_path") or server.get("model_path")
        return EngineInfo(
            weight_version=str(model.get("weight_version") or "default"),
            model_path=path,
            tokenizer_path=model.get("tokenizer_path") or server.get("tokenizer_path") or path,
            vocab_size=_first_int(model.get("vocab_size"), server.get("vocab_size"), _config(path).get("vocab_size")),
            context_length=_first_int(
                model.get("context_length"),
                server.get("context_length"),
                *(card.get("max_model_len") for card in cards or []),
            ),
            max_prompt=_first_int(server.get("max_req_input_len")),
            experts=_expert_shape(path) if server.get("enable_return_routed_experts") else None,
        )

    async def weight_version(self, seconds: float = 10.0) -> str:
        """The served weights' version, from a light call that also shows that the engine lives."""
        return str((await self._get("/model_info", seconds=seconds)).get("weight_version") or "default")

    async def ready(self, seconds: float = 10.0) -> bool:
        """Whether the engine takes requests. It may answer other calls before that."""
        try:
            await self._get("/ready", optional=True, seconds=seconds)
        except EngineError:
            return False
        return True

    async def generate(
        self, rid: str, input_ids: bytes, sampling: dict[str, Any], extra_key: str, experts_from: int | None = None
    ) -> AsyncGenerator[Chunk]:
        """Sample a reply to `input_ids` (a JSON array), chunk by chunk.

        Ends after the chunk that carries a finish; otherwise raises EngineError. With `experts_from` that chunk also
        carries the routed experts of the positions from there on.
        """
        wanted: dict[str, Any] = {
            "rid": rid,
            "input_ids": orjson.Fragment(input_ids),
            "sampling_params": {**sampling, "stream_interval": _STREAM_INTERVAL},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": True,
            "extra_key": extra_key,
        }
        if experts_from is not None:
            wanted |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        body = orjson.dumps(wanted)
        reader, begun = ChunkReader(), time.monotonic()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            async with self._http.post(
                self.url + "/generate", data=body, headers=_JSON, allow_redirects=False
            ) as response:
                await self._refuse(response)
                response.content.on_eof(partial(_end, ended))
                async for payloads in payloads_of(response.content):
                    try:
                        chunk = reader.read(*payloads)
                    except EngineError:
                        yield reader.chunk()  # what came with the fault, but before it
                        raise
                    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
                        text = f"engine {self.url} sent what is no event of a reply: {_name_of(error)}"
                        raise EngineError(text) from error
                    yield chunk
                    if chunk.finish:
                        return
                    await asyncio.wait([ended], timeout=min(self._coalesce_s, _HELD_UP * (time.monotonic() - begun)))
        except EngineError:
            raise
        except (*_FAULTS, orjson.JSONDecodeError) as error:
            raise EngineError(f"engine {self.url} failed in mid-reply: {_name_of(error)}") from error
        raise EngineError(f"engine {self.url} ended its stream before the reply was finished")

    async def abort(self, rid: str) -> None:
        """Ask the engine to stop; silence from an engine that is gone is as good as an answer."""
        with suppress(*_FAULTS):
            await self._post("/abort_request", {"rid": rid}, seconds=5)

    async def tokenize(self, text: str) -> list[int] | None:
        """The engine's own ids of `text`; None when it has no such call."""
        try:
            status, data = await self._post("/tokenize", {"prompt": text, "add_special_tokens": False}, seconds=10)
            tokens = orjson.loads(data).get("tokens") if status == 200 else None
        except (*_FAULTS, ValueError, AttributeError):
            return None
        return tokens if isinstance(tokens, list) else None

    async def _get(self, path: str, optional: bool = False, seconds: float = 10.0) -> dict[str, Any]:
        try:
            async with self._http.get(self.url + path, timeout=_within(seconds), allow_redirects=False) as response:
                status, data = response.status, await response.read()
        except _FAULTS as error:
            raise EngineError(
                f"wanted an engine at {self.url}, got {_name_of(error)}; "
                "start one (`gyre engine`, or SGLang) or mend --engine"
            ) from error
        if status in (404, 405) and optional:
            return {}
        if status in (404, 405):
            raise ConfigError(
                f"wanted SGLang's native API at {self.url}, got {status} to {path}; "
                "give the address of an SGLang or `gyre engine`, without /v1"
            )
        if status != 200:
            raise EngineError(f"engine {self.url} answered {status} to {path}; see its log")
        try:
            value = orjson.loads(data)
        except ValueError:
            value = {}
        return value if isinstance(value, dict) else {}

    async def _post(self, path: str, value: dict[str, Any], seconds: float) -> tuple[int, bytes]:
        async with self._http.post(
            self.url + path, data=orjson.dumps(value), headers=_JSON, timeout=_within(seconds), allow_redirects=False
        ) as response:
            return response.status, await response.read()

    async def _refuse(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        text = (await response.read()).decode("utf-8", "replace")[:2000]
        with suppress(orjson.JSONDecodeError, AttributeError):
            text = error_text(orjson.loads(text).get("error", text))
        kind = EngineRefusedError if is_refusal(response.status) else EngineError
        raise kind(f"engine {self.url} answered {response.status}: {text}")


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _name_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _first_int(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _config(model_path: str | None) -> dict[str, Any]:
    """The checkpoint's config, when the engine's folder can be read from here."""
    if not model_path:
        return {}
    try:
        value = orjson.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _expert_shape(model_path: str | None) -> ExpertShape | None:
    config = _config(model_path)
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    num_layers, top_k = (_first_int(config.get(name)) for name in ("num_hidden_layers", "num_experts_per_tok"))
    if num_layers is None or top_k is None:
        log.warning(
            "the engine gives routed experts, but %s/config.json does not say how many layers and experts per token "
            "there are; make the checkpoint's folder readable here to have them recorded",
            model_path,
        )
        return None
    return ExpertShape(num_layers=num_layers, top_k=top_k)
