"""Cost of the recording proxy: CPU of a turn, CPU of an engine event, wait for durability.

Run: python benchmarks/proxy.py [--quick] [--json]. Figures that have a bound are ratios against a baseline measured in
the same run: rendering and tokenising the whole conversation again (what a proxy without a history does each turn), and
a relay that passes an engine's bytes on unread. Exit status 1 when a bound is missed.

Engine and clients are a process of their own (this file with --load), so that the CPU time measured is the proxy's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

BOUNDS = {"turn_vs_rerender": (None, 1.0), "event_vs_relay": (None, 6.0)}
"""Figure: (least, most). A shared machine moves absolute times, so only ratios are bounded."""


# --- the load: engine and clients ------------------------------------------------------------------------------------


def engine_app(vocab: int, gap_s: float) -> Starlette:
    """An engine whose replies are `max_new_tokens` printable tokens, one chunk each, then the stop token."""

    async def generate(request: Request) -> Response:
        body = orjson.loads(await request.body())
        return StreamingResponse(chunks(body), media_type="text/event-stream")

    async def chunks(body: dict[str, Any]) -> AsyncIterator[bytes]:
        number, stop = body["sampling_params"]["max_new_tokens"], body["sampling_params"]["stop_token_ids"][0]
        rng = np.random.default_rng(body["sampling_params"]["sampling_seed"])
        ids = [int(token) for token in rng.integers(300, vocab - 20, number - 1)] + [stop]
        for index, token in enumerate(ids):
            last = index + 1 == number
            meta = {
                "id": body["rid"],
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": index + 1,
                "cached_tokens": 0,
                "finish_reason": {"type": "stop", "matched": stop} if last else None,
                "output_token_logprobs": [[-0.5, token, None]],
                "output_token_logprobs_length": index + 1,
                "weight_version": "bench:0",
            }
            yield b"data: " + orjson.dumps({"text": "", "output_ids": [token], "meta_info": meta}) + b"\n\n"
            if gap_s:
                await asyncio.sleep(gap_s)
        yield b"data: [DONE]\n\n"

    async def info(request: Request) -> Response:
        return JSONResponse({"weight_version": "bench:0", "vocab_size": vocab})

    routes = [Route("/generate", generate, methods=["POST"])]
    routes += [Route(path, info) for path in ("/model_info", "/server_info", "/ready")]
    return Starlette(routes=routes)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", access_log=False))
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def load(vocab: int) -> None:
    """Serve the engine; then run what is asked for, a JSON line each: {url, body, streams, path}."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with serving(engine_app(vocab, 0.01)) as paced, serving(engine_app(vocab, 0.0)) as fast:
        print(json.dumps([paced, fast]), flush=True)
        while line := await reader.readline():
            asked = json.loads(line)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
                await asyncio.gather(*(one_stream(client, asked, i) for i in range(asked["streams"])))
            print("done", flush=True)


async def one_stream(client: httpx.AsyncClient, asked: dict[str, Any], number: int) -> None:
    url = asked["url"] + asked["path"].replace("{i}", str(number))
    async with client.stream("POST", url, json=asked["body"]) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_raw():
            pass


class Load:
    """The load's process, from here."""

    def __init__(self, vocab: int) -> None:
        command = [sys.executable, __file__, "--load", str(vocab)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.paced, self.fast = json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def run(self, url: str, path: str, body: dict[str, Any], streams: int) -> float:
        """CPU seconds that this process spent while the load ran."""
        assert self._process.stdin is not None
        started = time.process_time()
        self._process.stdin.write(json.dumps({"url": url, "path": path, "body": body, "streams": streams}) + "\n")
        self._process.stdin.flush()
        assert (await asyncio.to_thread(self._line)).strip() == "done"
        return time.process_time() - started

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


# --- what is measured -------------------------------------------------------------------------------------------------


def relay_app(engine: str, http: httpx.AsyncClient) -> Starlette:
    """The least a proxy can do: pass the engine's bytes on."""

    async def relay(request: Request) -> Response:
        sent = http.build_request("POST", engine + "/generate", content=await request.body())
        answer = await http.send(sent, stream=True)
        return StreamingResponse(answer.aiter_raw(), media_type="text/event-stream")

    return Starlette(routes=[Route("/generate", relay, methods=["POST"])])


async def measure_events(folder: Path, model: Path, load: Load, streams: int, events: int) -> dict[str, float]:
    """CPU of an engine event through the proxy and through the relay, and the wait for commits, with many streams."""
    from gyre_proxy.engine import http_client

    sampling = {"max_new_tokens": events, "stop_token_ids": [1], "sampling_seed": 1}
    plain = {"rid": "r", "input_ids": [1, 2, 3], "sampling_params": sampling}
    async with http_client() as http, serving(relay_app(load.paced, http)) as url:
        await load.run(url, "/generate", plain, streams)
        relay = await load.run(url, "/generate", plain, streams)
    body = {"model": "m", "max_tokens": events, "stream": True, "messages": [{"role": "user", "content": "Go."}]}
    waits: list[float] = []
    async with proxied(folder / "events", model, load.paced, waits) as url:
        await load.run(url, "/x/warm{i}/v1/messages", body, streams)
        waits.clear()
        ours = await load.run(url, "/x/e{i}/v1/messages", body, streams)
    count = streams * events
    waits.sort()
    return {
        "event_cpu_us": 1e6 * ours / count,
        "relay_event_cpu_us": 1e6 * relay / count,
        "event_vs_relay": ours / relay,
        "commit_wait_p50_ms": 1e3 * statistics.median(waits),
        "commit_wait_max_ms": 1e3 * waits[-1],
    }


async def measure_turns(folder: Path, model: Path, load: Load, turns: int, words: int) -> dict[str, float]:
    """CPU of a late turn of a long conversation, all in, against rendering and tokenising it from its beginning."""
    from gyre_proxy.dialects import load as load_dialect
    from gyre_proxy.template import ChatTemplate

    text = " ".join(f"line {i}: the value of item {i * 7919 % 1000} is fine;" for i in range(words // 8))
    messages: list[dict[str, Any]] = []
    dialect, template = load_dialect("openai_chat"), ChatTemplate.load(model)
    ours: list[float] = []
    again: list[float] = []
    num_tokens = 0
    async with proxied(folder / "turns", model, load.fast, []) as url, httpx.AsyncClient(timeout=None) as client:
        for _turn in range(turns):
            messages.append({"role": "user", "content": text})
            body = orjson.dumps({"model": "m", "max_tokens": 8, "messages": messages})
            started = time.process_time()
            answer = (await client.post(f"{url}/x/e/v1/chat/completions", content=body)).json()
            ours.append(time.process_time() - started)
            started = time.process_time()
            request = dialect.parse(body, {})
            num_tokens = len(template.encode(template.render(request.messages, (), True)).ids)
            again.append(time.process_time() - started)
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    late = turns // 2
    return {
        "turn_tokens": float(num_tokens),
        "turn_cpu_ms": 1e3 * statistics.median(ours[late:]),
        "rerender_cpu_ms": 1e3 * statistics.median(again[late:]),
        "turn_vs_rerender": sum(ours[late:]) / sum(again[late:]),
    }


@asynccontextmanager
async def proxied(run: Path, model: Path, engine: str, waits: list[float]) -> AsyncIterator[str]:
    """The proxy in this process; `waits` gets the seconds that each call waited for its commit."""
    from gyre_proxy.app import build_app
    from gyre_proxy.serve import running
    from gyre_proxy.settings import ProxySettings

    settings = ProxySettings(run=run, engines=(engine,), tokenizer=model)
    async with running(settings) as proxy:
        proxy.recorder.observe_wait = waits.append
        async with serving(build_app(proxy)) as url:
            yield url


def missed(figures: dict[str, float]) -> list[str]:
    """What lies outside its bound, in words."""
    found = []
    for name, (least, most) in BOUNDS.items():
        value = figures[name]
        if (least is not None and value < least) or (most is not None and value > most):
            found.append(f"{name} is {value:.3g}, wanted {'at least' if least else 'at most'} {least or most}")
    return found


async def measure(folder: Path, quick: bool) -> dict[str, float]:
    from gyre_train.tiny import make_tiny

    model = make_tiny(folder / "model", vocab=1024, hidden=32, layers=1)
    load = Load(1024)
    try:
        figures = await measure_turns(folder, model, load, 12 if quick else 40, 1500)
        return figures | await measure_events(folder, model, load, 16 if quick else 64, 100 if quick else 400)
    finally:
        load.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns, streams and events")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--load", type=int, metavar="VOCAB", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        asyncio.run(load(options.load))
        return 0
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        figures = asyncio.run(measure(Path(folder), options.quick))
    failed = missed(figures)
    if options.json:
        print(
            json.dumps({"benchmark": "proxy", "quick": options.quick, "figures": figures, "missed": failed}, indent=1)
        )
    else:
        for name, value in figures.items():
            print(f"{name:22} {value:14,.2f}")
        for text in failed:
            print(f"MISSED: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
