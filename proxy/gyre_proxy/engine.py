"""One inference engine, spoken to over SGLang's native HTTP API: ids in, ids and log-probs out.

What is guaranteed: every id of a chunk has its log-prob, no id is given twice, ids outside the vocabulary never leave
this process (an engine dies of them), and whatever goes wrong on the hop is an EngineError.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import orjson
from httpx_aiohttp import AiohttpTransport

from gyre_data.errors import ConfigError, EngineError
from gyre_data.types import Floats, Ints

from .experts import ExpertShape

__all__ = ["Chunk", "ChunkReader", "EngineClient", "EngineInfo", "EngineRefusedError", "http_client"]

log = logging.getLogger(__name__)

_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_STREAM_INTERVAL = 8
"""Tokens per event that an engine is asked for. Its first token comes at once all the same, and so does the last."""
_HELD_UP = 0.05
"""Most that a token may be held up, as a share of the time that its reply has taken."""
_FINISHES = ("stop", "length", "abort")


class EngineRefusedError(EngineError):
    """The engine understood the request and will not serve it; another try gives the same answer."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunk:
    """New tokens of a reply. `versions` are (weight version, start, end) over all tokens of this request so far."""

    token_ids: Ints
    logprobs: Floats
    finish: str | None = None
    matched: int | str | None = None
    message: str | None = None
    cached_tokens: int | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    experts: str | None = None
    """Routed experts as the engine gives them, with the finish."""


def http_client(max_connections: int = 4096) -> httpx.AsyncClient:
    """A client for engine hops: aiohttp underneath (half the CPU per event), no read timeout, high limits."""

    def session() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=max_connections, socket_factory=_watched_socket),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    timeout = httpx.Timeout(None, connect=10.0)
    return httpx.AsyncClient(transport=AiohttpTransport(client=session), timeout=timeout, trust_env=False)


def _watched_socket(address: Any) -> socket.socket:
    """A socket whose silence the kernel questions: a machine that lost its power never closes a connection."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds_or_count in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):  # not on every system
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds_or_count)
    return made


class ChunkReader:
    """Turns the chunks of one `/generate` stream into new tokens, whether they are cumulative or deltas.

    The engine's own `completion_tokens` decides how many tokens are new, so a closing chunk that repeats everything
    adds nothing. Ids that run ahead of their log-probs wait for them; a finish without them is an error.
    """

    def __init__(self) -> None:
        self._ids = self._logprobs = 0  # taken so far
        self._waiting_ids: list[int] = []
        self._waiting_logprobs: list[list[Any]] = []
        self._new_ids: list[int] = []
        self._new_logprobs: list[float] = []
        self._spans: list[tuple[str, int, int]] = []
        self._given = 0
        self._meta: dict[str, Any] = {}

    def read(self, *payloads: dict[str, Any]) -> Chunk:
        """One chunk of all `payloads`; raise EngineError when ids and log-probs cannot be aligned."""
        for payload in payloads:
            self.take(payload)
        return self.chunk()

    def take(self, payload: dict[str, Any]) -> None:
        """Take in one event; what it added is in the next `chunk`, also when a later event is an error."""
        if "error" in payload:
            error = payload["error"]
            refused = isinstance(error, dict) and _is_refusal(error.get("code"))
            kind = EngineRefusedError if refused else EngineError
            raise kind(f"the engine ended the reply with an error: {_error_text(error)}")
        meta = payload.get("meta_info") or {}
        ended = meta.get("finish_reason") or {}
        if ended.get("type") == "abort" and _is_refusal(ended.get("status_code")):
            # In a stream SGLang says so like this, beside a token that means nothing and has no log-prob.
            raise EngineRefusedError(f"the engine refused the request: {ended.get('message')}")
        if ended and ended.get("type") not in _FINISHES:
            raise EngineError(
                f"wanted a finish of {', '.join(_FINISHES)}, got {ended.get('type')!r:.80}; use an SGLang engine"
            )
        ids = payload.get("output_ids") or []
        total = meta.get("completion_tokens", self._ids if not ids else None)
        if total is None:
            raise EngineError("wanted meta_info.completion_tokens beside output_ids, got none; use an SGLang engine")
        self._waiting_ids += _fresh(ids, self._ids, total, "output_ids")
        self._ids = max(self._ids, total)
        logprobs = meta.get("output_token_logprobs") or []
        have = meta.get("output_token_logprobs_length", total) if logprobs else self._logprobs
        self._waiting_logprobs += _fresh(logprobs, self._logprobs, have, "output_token_logprobs")
        self._logprobs = max(self._logprobs, have)
        self._align(bool(meta.get("finish_reason")))
        self._note_versions(meta)
        self._meta = meta

    def chunk(self) -> Chunk:
        """What was taken in since the last chunk."""
        finish = self._meta.get("finish_reason") or {}
        ids, logprobs = self._new_ids, self._new_logprobs
        self._new_ids, self._new_logprobs = [], []
        return Chunk(
            token_ids=np.array(ids, np.int32) if ids else _NO_IDS,
            logprobs=np.array(logprobs, np.float32) if ids else _NO_LOGPROBS,
            finish=finish.get("type"),
            matched=finish.get("matched"),
            message=finish.get("message"),
            cached_tokens=self._meta.get("cached_tokens"),
            versions=tuple(self._spans),
            experts=self._meta.get("routed_experts") if finish else None,
        )

    def _align(self, finished: bool) -> None:
        ids, pairs = self._waiting_ids, self._waiting_logprobs
        if len(ids) != len(pairs):
            if finished:
                raise EngineError(
                    f"wanted a log-prob for every sampled id, got {self._logprobs} for {self._ids} ids; "
                    "the call is not recorded"
                )
            count = min(len(ids), len(pairs))
            self._waiting_ids, ids = ids[count:], ids[:count]
            self._waiting_logprobs, pairs = pairs[count:], pairs[:count]
        else:
            self._waiting_ids, self._waiting_logprobs = [], []
        if [pair[1] for pair in pairs] != ids:
            raise EngineError("the engine's log-probs are for other ids than its output_ids; the call is not recorded")
        self._new_ids += ids
        self._new_logprobs += [pair[0] for pair in pairs]
        self._given += len(ids)

    def _note_versions(self, meta: dict[str, Any]) -> None:
        spans = meta.get("weight_versions")
        if spans:
            whole = [(str(s["version"]), int(s["start"]), min(int(s["end"]), self._given)) for s in spans]
            self._spans = [span for span in whole if span[1] < span[2]]
        covered = self._spans[-1][2] if self._spans else 0
        version = meta.get("weight_version")
        if version is None or covered >= self._given:
            return
        if self._spans and self._spans[-1][0] == version:
            self._spans[-1] = (version, self._spans[-1][1], self._given)
        else:
            self._spans.append((str(version), covered, self._given))


def _fresh(items: list[Any], taken: int, total: int, what: str) -> list[Any]:
    new = total - taken
    if new <= 0:
        return []
    if len(items) == total:
        return items[taken:]
    if len(items) == new:
        return items
    raise EngineError(
        f"wanted {new} new or {total} cumulative {what}, got {len(items)}; the engine's stream lost tokens, "
        "the call is not recorded"
    )


class EngineClient:
    """The calls that the proxy makes of one engine.

    A reply's stream is looked at every `coalesce_s` seconds at most, since tokens cost less together than one by one;
    sooner while the reply is young: no token is held up by more than a twentieth of the time that its reply has taken.
    """

    def __init__(self, url: str, http: httpx.AsyncClient, coalesce_s: float = 0.0) -> None:
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
        try:
            request = self._http.build_request(
                "POST", self.url + "/generate", content=body, headers={"content-type": "application/json"}
            )
            response = await self._http.send(request, stream=True)
            try:
                await self._refuse(response)
                async for payloads in _payloads(response):
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
                    await asyncio.sleep(min(self._coalesce_s, _HELD_UP * (time.monotonic() - begun)))
            finally:
                await response.aclose()
        except EngineError:
            raise
        except (httpx.HTTPError, orjson.JSONDecodeError, OSError) as error:
            raise EngineError(f"engine {self.url} failed in mid-reply: {_name_of(error)}") from error
        raise EngineError(f"engine {self.url} ended its stream before the reply was finished")

    async def abort(self, rid: str) -> None:
        """Ask the engine to stop; silence from an engine that is gone is as good as an answer."""
        try:
            await self._http.post(self.url + "/abort_request", json={"rid": rid}, timeout=5)
        except (httpx.HTTPError, OSError):
            return

    async def tokenize(self, text: str) -> list[int] | None:
        """The engine's own ids of `text`; None when it has no such call."""
        try:
            response = await self._http.post(
                self.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}, timeout=10
            )
            tokens = response.json().get("tokens") if response.status_code == 200 else None
        except (httpx.HTTPError, OSError, ValueError, AttributeError):
            return None
        return tokens if isinstance(tokens, list) else None

    async def _get(self, path: str, optional: bool = False, seconds: float = 10.0) -> dict[str, Any]:
        try:
            response = await self._http.get(self.url + path, timeout=seconds)
        except (httpx.HTTPError, OSError) as error:
            raise EngineError(
                f"wanted an engine at {self.url}, got {_name_of(error)}; "
                "start one (`gyre engine`, or SGLang) or mend --engine"
            ) from error
        if response.status_code in (404, 405) and optional:
            return {}
        if response.status_code in (404, 405):
            raise ConfigError(
                f"wanted SGLang's native API at {self.url}, got {response.status_code} to {path}; "
                "give the address of an SGLang or `gyre engine`, without /v1"
            )
        if response.status_code != 200:
            raise EngineError(f"engine {self.url} answered {response.status_code} to {path}; see its log")
        try:
            value = response.json()
        except ValueError:
            value = {}
        return value if isinstance(value, dict) else {}

    async def _refuse(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        text = (await response.aread()).decode("utf-8", "replace")[:2000]
        with suppress(orjson.JSONDecodeError, AttributeError):
            text = _error_text(orjson.loads(text).get("error", text))
        kind = EngineRefusedError if _is_refusal(response.status_code) else EngineError
        raise kind(f"engine {self.url} answered {response.status_code}: {text}")


async def _payloads(response: httpx.Response) -> AsyncIterator[list[dict[str, Any]]]:
    """The events of a stream, those that arrived together in one list."""
    held: list[bytes] = []  # an unfinished line: cumulative chunks span many pieces
    async for piece in response.aiter_raw():
        held.append(piece)
        if b"\n" not in piece:
            continue
        *lines, rest = b"".join(held).split(b"\n")
        held = [rest]
        data = [line[5:].strip() for line in lines if line[:5] == b"data:"]
        ended = b"[DONE]" in data
        if ended:
            del data[data.index(b"[DONE]") :]
        if data:
            yield [orjson.loads(line) for line in data]
        if ended:
            return


def _is_refusal(status: Any) -> bool:
    """Whether a status says that another try is of no use; 408 and 429 ask for one."""
    return isinstance(status, int) and 400 <= status < 500 and status not in (408, 429)


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


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
