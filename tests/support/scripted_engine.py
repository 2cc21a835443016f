"""A scripted stand-in for an SGLang server, in the test's own event loop: for replies and faults a model cannot give.

A script is a list of replies, taken in order (the last one repeats), in the form of the cases in tests/data/cases:
{"deltas": [{"ids": [..], "lps": [..], "weight_version"?}, ..], "finish": {"type": "stop"}, "weight_version"?}, or
{"raw_chunks": [..]}. Faults: "die_after": n drops the connection after n deltas; "refuse": (status, message).
`hold(n)` makes each reply wait before its n-th delta until `release`. `down` drops requests and breaks replies, `deaf`
ignores aborts, and while `flow` is cleared nothing is answered at all, as by a stopped process.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

__all__ = ["ScriptedEngine", "serve_app"]


class ScriptedEngine:
    def __init__(
        self, script: list[dict[str, Any]], *, incremental: bool = False, version: str = "base:0", vocab: int = 512
    ) -> None:
        self.script, self.incremental, self.version, self.vocab = script, incremental, version, vocab
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.clients_gone = 0
        self.context_length: int | None = None
        self.down = False
        self.deaf = False
        self.facts: dict[str, Any] = {}
        self.flow = asyncio.Event()
        self.flow.set()
        self.url = ""
        self._hold_at: int | None = None
        self._released = asyncio.Event()
        self._aborts: dict[str, asyncio.Event] = {}
        self.waiting = asyncio.Event()

    def hold(self, delta: int = 0) -> None:
        """Replies stop before their `delta`-th delta until `release`."""
        self._hold_at = delta
        self._released.clear()
        self.waiting.clear()

    def release(self) -> None:
        self._hold_at = None
        self._released.set()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        await self.flow.wait()
        if self.down:
            return  # dropped without an answer
        if path == "/generate":
            await self._generate(json.loads(body), receive, send)
            return
        if path == "/abort_request":
            rid = json.loads(body)["rid"]
            self.aborted.append(rid)
            if not self.deaf:
                self._aborts.setdefault(rid, asyncio.Event()).set()
            await _json(send, {})
            return
        answer: dict[str, Any] = {
            "model_path": "toy",
            "weight_version": self.version,
            "vocab_size": self.vocab,
        } | self.facts
        if self.context_length:
            answer["context_length"] = self.context_length
        await _json(send, answer, 404 if path in ("/tokenize", "/v1/models") else 200)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        """The script for this request."""
        return self.script[min(len(self.requests), len(self.script) - 1)]

    async def _generate(self, body: dict[str, Any], receive: Any, send: Any) -> None:
        reply = self.reply(body)
        self.requests.append(body)
        if "refuse" in reply:
            status, text = reply["refuse"]
            await _json(send, {"error": {"message": text}}, status)
            return
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        await send(start)
        async for chunk in self._chunks(reply, body):
            if chunk is None:
                return  # the connection breaks
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + json.dumps(chunk).encode() + b"\n\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _chunks(self, reply: dict[str, Any], body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        if "raw_chunks" in reply:
            for chunk in reply["raw_chunks"]:
                yield chunk
            return
        rid, ids, lps = body["rid"], [], []
        deltas, version = reply["deltas"], reply.get("weight_version", self.version)
        for index, delta in enumerate(deltas):
            if self._hold_at == index:
                self.waiting.set()
                if await self._held(rid):
                    yield self._chunk(body, ids, lps, [], [], {"type": "abort", "message": "aborted"}, version)
                    return
            await self.flow.wait()
            if reply.get("die_after") == index or self.down:
                yield None
                return
            new = [[lp, token, None] for lp, token in zip(delta["lps"], delta["ids"], strict=True)]
            ids, lps = ids + delta["ids"], lps + new
            last = index + 1 == len(deltas)
            finish = reply.get("finish", {"type": "stop"}) if last and "die_after" not in reply else None
            yield self._chunk(body, ids, lps, delta["ids"], new, finish, delta.get("weight_version", version))
        if reply.get("die_after") == len(deltas):
            yield None

    def _chunk(
        self, body: Any, ids: Any, lps: Any, new_ids: Any, new_lps: Any, finish: Any, version: str
    ) -> dict[str, Any]:
        meta = {
            "id": body["rid"],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "finish_reason": finish,
            "output_token_logprobs": new_lps if self.incremental else lps,
            "output_token_logprobs_length": len(lps),
            "weight_version": version,
        }
        return {"text": "", "output_ids": new_ids if self.incremental else ids, "meta_info": meta}

    async def _held(self, rid: str) -> bool:
        """Wait for release; True when the request was aborted instead."""
        aborted = self._aborts.setdefault(rid, asyncio.Event())
        waits = [asyncio.ensure_future(event.wait()) for event in (self._released, aborted)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return aborted.is_set() and not self._released.is_set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedEngine]:
        async with serve_app(self) as url:
            self.url = url
            yield self


async def _json(send: Any, value: Any, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})


@asynccontextmanager
async def serve_app(
    app: Any, listener: socket.socket | None = None, http: Any = "httptools", **config_options: Any
) -> AsyncIterator[str]:
    """Serve an ASGI application on loopback; gives its URL."""
    if listener is None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        ws="none",
        log_config=None,
        lifespan="off",
        access_log=False,
        timeout_graceful_shutdown=1,
        http=http,
        **config_options,
    )
    server = uvicorn.Server(config)
    port = listener.getsockname()[1]
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
