"""Engine and clients of the proxy's benchmark, in a process of their own, so that the CPU measured is the proxy's.

Run by `Load`; as a program it serves three engines (one paced like a real one, with an event for each token; the same
with as many tokens an event as it is asked for; one as fast as it can) and then runs the loads it is asked for, one
JSON object a line.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

__all__ = ["GAP_S", "Load", "serving"]

_NO_TLS = ssl.create_default_context()  # one for all clients: it is not used, and making one takes 20 ms
GAP_S = 0.025
"""Between two tokens of one reply: 40 tokens a second, as a big model gives them."""


def engine_app(vocab: int, gap_s: float, *, heeds_interval: bool = False) -> Starlette:
    """An engine whose replies are `max_new_tokens` printable tokens, the last of them the stop token.

    An event each; or, if it heeds `stream_interval`, as SGLang does: the first token at once, then whenever so many are
    unsent, and the rest with the last.
    """

    async def generate(request: Request) -> Response:
        body = orjson.loads(await request.body())
        return StreamingResponse(events(body), media_type="text/event-stream")

    async def events(body: dict[str, Any]) -> AsyncIterator[bytes]:
        number, stop = body["sampling_params"]["max_new_tokens"], body["sampling_params"]["stop_token_ids"][0]
        rng = np.random.default_rng(body["sampling_params"]["sampling_seed"])
        ids = [int(token) for token in rng.integers(300, vocab - 20, number - 1)] + [stop]
        interval = body["sampling_params"].get("stream_interval") or 1 if heeds_interval else 1
        begun, sent = asyncio.get_running_loop().time(), 0
        for index in range(number):
            last = index + 1 == number
            if not last and sent and index + 1 - sent < interval:
                continue
            fresh, sent = ids[sent : index + 1], index + 1
            if gap_s:
                await asyncio.sleep(begun + index * gap_s - asyncio.get_running_loop().time())
            meta = {
                "id": body["rid"],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": index + 1,
                "cached_tokens": 0,
                "finish_reason": {"type": "stop", "matched": stop} if last else None,
                "output_token_logprobs": [[-0.5, token, None] for token in fresh],
                "output_token_logprobs_length": index + 1,
                "weight_version": "bench:0",
            }
            yield b"data: " + orjson.dumps({"text": "", "output_ids": fresh, "meta_info": meta}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def info(request: Request) -> Response:
        return JSONResponse({"weight_version": "bench:0", "vocab_size": vocab})

    routes = [Route("/generate", generate, methods=["POST"])]
    routes += [Route(path, info) for path in ("/model_info", "/server_info", "/ready")]
    return Starlette(routes=routes)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """`app` on a port of loopback; gives its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    # A busy machine may keep a connection idle for longer than the usual 5 s.
    config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, timeout_keep_alive=75)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def _serve(vocab: int) -> None:
    reader = asyncio.StreamReader(limit=1 << 30)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with (
        serving(engine_app(vocab, GAP_S)) as paced,
        serving(engine_app(vocab, GAP_S, heeds_interval=True)) as coalescing,
        serving(engine_app(vocab, 0.0)) as fast,
    ):
        print(json.dumps([paced, coalescing, fast]), flush=True)
        while line := await reader.readline():
            asked = json.loads(line)
            started = time.perf_counter()
            seen = await asyncio.gather(*(_client(asked, i) for i in range(asked["clients"])))
            took = time.perf_counter() - started
            print(json.dumps({"wall_s": took, "calls": [call for calls in seen for call in calls]}), flush=True)


async def _client(asked: dict[str, Any], number: int) -> list[tuple[float, float]]:
    """Calls one after another, on a connection of its own as a harness has; of each the seconds to its first token and
    to its end."""
    url, seen = asked["url"] + asked["path"].replace("{i}", str(number)), []
    async with httpx.AsyncClient(timeout=None, verify=_NO_TLS, trust_env=False) as client:
        for _ in range(asked["rounds"]):
            started, first = time.perf_counter(), 0.0
            async with client.stream("POST", url, content=asked["body"]) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for piece in answer.aiter_raw():
                    if not first and asked["mark"].encode() in piece:
                        first = time.perf_counter() - started
            seen.append((first, time.perf_counter() - started))
    return seen


class Load:
    """The process with engine and clients."""

    def __init__(self, vocab: int) -> None:
        command = [sys.executable, __file__, str(vocab)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.paced, self.coalescing, self.fast = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def run(
        self, url: str, path: str, body: dict[str, Any], clients: int, rounds: int = 1, mark: str = "delta"
    ) -> dict[str, Any]:
        """`clients` at once, each its own `{i}` in `path`, `rounds` calls each: {wall_s, calls: [(first_s, end_s)]}.

        The first token is the first piece that holds `mark`.
        """
        assert self._process.stdin is not None
        asked = {"url": url, "path": path, "body": orjson.dumps(body).decode(), "clients": clients, "rounds": rounds}
        self._process.stdin.write(json.dumps({**asked, "mark": mark}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(await asyncio.to_thread(self._line))
        assert len(answer["calls"]) == clients * rounds
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
