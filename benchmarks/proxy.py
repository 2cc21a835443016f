"""Cost of the recording proxy: CPU of a turn and of an engine event, memory, two processes against one, waits.

Run: python benchmarks/proxy.py [--quick] [--json]. Exit status 1 when a bound is missed. Engine and clients are a
process of their own, so that the CPU time measured is the proxy's. docs/performance.md says how each figure is made.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import _frame
import httpx
import orjson
import psutil
from _load import Load, serving

VOCAB = 1024
BOUNDS = {
    "turn_vs_rerender": (None, 1.0),
    "event_cpu_us": (None, 120.0),
    "two_processes_capacity": (1.7, None),
    "memory_200_executions_mib": (None, 1024.0),
}


# --- events and waits -------------------------------------------------------------------------------------------------


async def measure_events(folder: Path, model: Path, load: Load, streams: int, tokens: int) -> dict[str, float]:
    """CPU of one more token, with many streams at once, and what clients wait for beside the engine.

    From an engine that sends each token as an event of its own, where it is the CPU of an event; and from one that
    sends as many together as it is asked for, as SGLang does.
    """
    waits: list[float] = []
    async with proxied(folder / "events", model, load.paced, waits) as url:
        each, with_turn = await _token_cpu(url, load, streams, tokens)
        waits.clear()
        through = await load.run(url, "/x/w{i}/v1/messages", _asked(40), streams, rounds=3, mark="content_block_delta")
    async with proxied(folder / "coalescing", model, load.coalescing, []) as url:
        together, _ = await _token_cpu(url, load, streams, tokens)
    sampling = {"max_new_tokens": 40, "stop_token_ids": [1], "sampling_seed": 1}
    plain = {"rid": "r", "input_ids": [1, 2, 3], "sampling_params": sampling}
    direct = await load.run(load.paced, "/generate", plain, streams, rounds=3, mark="data")
    waits.sort()
    return {
        "event_cpu_us": 1e6 * each,
        "event_cpu_with_turn_us": 1e6 * with_turn,
        "token_cpu_us_coalesced": 1e6 * together,
        "commit_wait_p50_ms": 1e3 * statistics.median(waits),
        "commit_wait_p99_ms": 1e3 * waits[int(0.99 * len(waits))],
        **_added("first_token_added", through["calls"], direct["calls"], 0),
        **_added("reply_end_added", through["calls"], direct["calls"], 1),
    }


async def _token_cpu(url: str, load: Load, streams: int, tokens: int) -> tuple[float, float]:
    """CPU seconds of one more token of a reply, and of one with its share of the call's beginning and end.

    Long replies less short ones, divided by the tokens between: the cost of a call's beginning and end is a turn's.
    """
    short, long = [], []
    await load.run(url, "/x/warm{i}/v1/messages", _asked(10), streams)
    for number in range(3):
        short.append(await _cpu(load.run(url, f"/x/s{number}-{{i}}/v1/messages", _asked(10), streams)))
        long.append(await _cpu(load.run(url, f"/x/l{number}-{{i}}/v1/messages", _asked(10 + tokens), streams)))
    # The least disturbed round of each: other work on the machine only ever adds.
    return (min(long) - min(short)) / (streams * tokens), min(long) / (streams * (10 + tokens))


def _asked(tokens: int) -> dict[str, Any]:
    return {"model": "m", "max_tokens": tokens, "stream": True, "messages": [{"role": "user", "content": "Go."}]}


def _added(
    name: str, through: Sequence[Sequence[float]], direct: Sequence[Sequence[float]], which: int
) -> dict[str, float]:
    """Difference of two distributions of waits at their median and their 99th percentile."""
    ours, plain = sorted(call[which] for call in through), sorted(call[which] for call in direct)
    at = {"p50": len(ours) // 2, "p99": int(0.99 * len(ours))}
    return {f"{name}_{label}_ms": 1e3 * (ours[i] - plain[i]) for label, i in at.items()}


async def _cpu(work: Any) -> float:
    """CPU seconds that this process spent while `work` ran."""
    started = time.process_time()
    await work
    return time.process_time() - started


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


# --- turns ------------------------------------------------------------------------------------------------------------


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


# --- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def proxy_process(run: Path, model: Path, engine: str, workers: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """`gyre proxy` as users start it: its URL and its processes, of which the first answers the API."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gyre_data", "proxy", "--run", str(run), "--engine", engine, "--port", str(port)]
    child = subprocess.Popen(
        [*command, "--tokenizer", str(model), "--workers", str(workers)], stderr=subprocess.DEVNULL
    )
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
        while True:
            try:
                httpx.get(url + "/api/status", trust_env=False).raise_for_status()
                break
            except httpx.TransportError:
                assert child.poll() is None, "the proxy did not start"
                assert time.monotonic() < deadline, "the proxy does not answer"
                time.sleep(0.1)
        parent = psutil.Process(child.pid)
        yield url, [parent, *parent.children(recursive=True)]
    finally:
        child.terminate()
        child.wait(60)


async def measure_processes(folder: Path, model: Path, load: Load, clients: int, rounds: int) -> dict[str, float]:
    """Calls through one and through two serving processes, `clients` at once for each process.

    A process is at most one core busy, so the busiest one's CPU per call bounds the calls per second that the proxy
    can do with cores enough; the supervisor's share counts. Wall-clock figures are given beside it: on two cores,
    engine and clients need one of them.
    """
    figures: dict[str, float] = {}
    busiest: dict[int, float] = {}
    for workers in (1, 2):
        with proxy_process(folder / f"workers{workers}", model, load.fast, workers) as (url, processes):
            together = clients * workers
            await load.run(url, "/x/c{i}/v1/messages", _asked(4), together)
            before = [_seconds(one) for one in processes]
            seen = await load.run(url, "/x/c{i}/v1/messages", _asked(64), together, rounds)
            spent = [_seconds(one) - was for one, was in zip(processes, before, strict=True)]
        calls = together * rounds
        busiest[workers] = max(spent) / calls
        figures[f"call_cpu_ms_{workers}"] = 1e3 * sum(spent) / calls
        figures[f"busiest_call_cpu_ms_{workers}"] = 1e3 * busiest[workers]
        figures[f"calls_per_s_{workers}_wall"] = calls / seen["wall_s"]
    return {**figures, "two_processes_capacity": busiest[1] / busiest[2]}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure_memory(folder: Path, model: Path, load: Load, workers: int) -> dict[str, float]:
    """Memory (proportional share of all processes) with 200 live executions of 100,000 tokens.

    All of them, also quickly: memory comes in steps, and fewer, scaled, gave anything from 520 to 1160 MiB.
    """
    from gyre_proxy.template import ChatTemplate

    tokens_per_message, num_messages = 2000, 50
    unit = len(ChatTemplate.load(model).encode(_text("x", 100)).ids) / 100
    words = int(tokens_per_message / unit)
    with proxy_process(folder / f"memory{workers}", model, load.fast, workers) as (url, processes):
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:

            async def hold(name: str) -> None:
                messages = [
                    {"role": ("user", "assistant")[i % 2], "content": _text(f"{name} {i}", words)}
                    for i in range(num_messages + 1)
                ]
                body = {"model": "m", "max_tokens": 16, "messages": messages}
                answer = await client.post(f"{url}/x/{name}/v1/messages", content=orjson.dumps(body))
                answer.raise_for_status()
                assert answer.json()["usage"]["input_tokens"] >= 100_000

            for number in range(workers):
                await hold(f"warm{number}")
            before = sum(one.memory_full_info().pss for one in processes)
            for number in range(200):
                await hold(f"e{number}")
            after = sum(one.memory_full_info().pss for one in processes)
    name = "memory_200_executions" + ("_mib" if workers == 1 else f"_{workers}_workers_mib")
    return {
        name.replace("200_executions", "idle"): before / 2**20,
        name: after / 2**20,
    }


def _text(seed: str, words: int) -> str:
    return " ".join(f"{seed} line {i}: {i * 7919 % 1000} is fine;" for i in range(max(1, words // 6)))


async def measure(folder: Path, quick: bool) -> dict[str, float]:
    from gyre_train.tiny import make_tiny

    model = make_tiny(folder / "model", vocab=VOCAB, hidden=32, layers=1)
    load = Load(VOCAB)
    try:
        return {
            **await measure_turns(folder, model, load, 12 if quick else 40, 1500),
            **await measure_events(folder, model, load, 32 if quick else 64, 100 if quick else 300),
            **await measure_processes(folder, model, load, 8, 40 if quick else 100),
            **await measure_memory(folder, model, load, workers=1),
            **await measure_memory(folder, model, load, workers=2),
        }
    finally:
        load.close()


if __name__ == "__main__":
    from gyre_proxy.serve import run_loop

    def measured(folder: Path, quick: bool) -> dict[str, float]:
        figures: dict[str, float] = {}

        async def work() -> None:
            figures.update(await measure(folder, quick))

        run_loop(work())  # the loop that a proxy runs on
        return figures

    sys.exit(_frame.run("proxy", __doc__, BOUNDS, measured))
