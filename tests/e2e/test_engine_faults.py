"""Engines that die, stop, drain, leave and come in mid-reply: one reply for the harness, each token once on record."""

import asyncio
import json
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from gyre_proxy.sampler import SamplerLimits
from tests.support import toy_tokenizer as toy
from tests.support.proxy_server import check_run, nodes_of, serve_proxy
from tests.support.telling_engine import Policy, TellingEngine, told

TEXT = "one two three four"
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
STREAM = json.dumps({**REQUEST, "stream": True}).encode()
NUM = len(toy.encode(TEXT)) + 1


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def engines(num, **options):
    policy = Policy(lambda prompt: [*toy.encode(TEXT), 257])
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(TellingEngine(policy, i, **options).serving()) for i in range(num)]


async def arrived(served, num):
    """The proxy has the first `num` tokens of the reply to e1."""
    execution = served.proxy.executions
    await until(
        lambda: any(g.sampler.num_tokens == num for g in getattr(execution.get("e1"), "generations", {}).values())
    )


def serve(run, *served, **options):
    return serve_proxy(run, *served, poll_s=0.05, probe_s=0.2, **options)


async def ask(http, execution="e1"):
    """One streamed call: its text, after a check that the stream is whole."""
    answer = await http.post(f"/x/{execution}/v1/messages", content=STREAM)
    return text_of(answer.text)


def text_of(stream):
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    assert events[-1]["type"] == "message_stop", stream
    return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


def check(run, served):
    """Each call's tokens are there once, and log-prob, engine and version agree on who sampled which."""
    calls, nodes = check_run(run, *served), nodes_of(run)
    by_url = {engine.url: engine for engine in served}
    for call in calls:
        output = nodes[call.output_node]
        assert output.token_ids.tolist() == served[0].policy.whole[call.call_id][1]
        spans = [(a.engine, a.start, a.end) for a in call.attempts if a.end > a.start]
        assert [start for _, start, _ in spans] == [0, *(end for _, _, end in spans[:-1])]
        wanted = [told(by_url[url].number, i) for url, start, end in spans for i in range(start, end)]
        assert output.logprobs.tolist() == pytest.approx(wanted, abs=1e-6)
        versions = [f"{s.policy_id}:{s.n}" for s in output.policy_versions for _ in range(s.start, s.end)]
        assert versions == [by_url[url].version for url, start, end in spans for _ in range(start, end)]
    return calls


def spans_of(call, served):
    by_url = {engine.url: engine.number for engine in served}
    return [(by_url[a.engine], a.start, a.end) for a in call.attempts if a.end > a.start]


@pytest.mark.parametrize(
    ("fault", "spans"),
    [
        (0, [(1, 0, NUM)]),  # in the prefill: nothing was sampled
        (1, [(0, 0, 1), (1, 1, NUM)]),
        (7, [(0, 0, 7), (1, 7, NUM)]),
        (NUM - 1, [(0, 0, NUM - 1), (1, NUM - 1, NUM)]),
        (NUM, [(0, 0, NUM)]),  # after the last token, before it said so
    ],
)
async def test_an_engine_that_dies_anywhere_in_a_reply(tmp_path, fault, spans):
    async with engines(2) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[1].version = "base:1"
        await until(lambda: "base:1" in {str(e.version) for e in proxy.proxy.router.engines})
        served[0].dying = lambda: arrived(proxy, fault)
        served[0].faults = [fault, fault]  # the first failure without a token is tried again on the same engine
        assert await ask(http) == TEXT
    (call,) = check(tmp_path / "run", served)
    assert (call.status, call.finish_reason, spans_of(call, served)) == ("ok", "stop", spans)


async def test_an_engine_that_is_gone_before_it_takes_the_request(tmp_path):
    async with engines(2) as served, serve_proxy(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[0].down = True
        assert await ask(http) == TEXT
    (call,) = check(tmp_path / "run", served)
    assert spans_of(call, served) == [(1, 0, NUM)]


async def test_both_engines_die_and_one_comes_back(tmp_path):
    async with engines(2) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[0].dying = lambda: arrived(proxy, 3)
        served[0].faults, served[1].faults = [3], [4]
        served[1].hold(4)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 7)
        served[0].down = served[1].down = True
        served[1].release()
        await until(lambda: {e.state for e in proxy.proxy.router.engines} == {"down"})
        served[0].down, served[0].version = False, "base:0"
        assert await reply == TEXT
    (call,) = check(tmp_path / "run", served)
    assert spans_of(call, served) == [(0, 0, 3), (1, 3, 7), (0, 7, NUM)]


async def test_an_engine_that_stops_answering_loses_its_replies_to_another(tmp_path):
    async with engines(2) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[0].hold(5)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 5)
        served[0].flow.clear()  # the connection stays open and the kernel answers, as with SIGSTOP
        assert await reply == TEXT
        assert await ask(http, "e2") == TEXT
        served[0].flow.set()
        served[0].release()
        await until(lambda: {e.state for e in proxy.proxy.router.engines} == {"up"})
    first, second = check(tmp_path / "run", served)
    assert spans_of(first, served) == [(0, 0, 5), (1, 5, NUM)]
    assert "stopped answering" in first.attempts[0].error
    assert spans_of(second, served) == [(1, 0, NUM)]


async def test_an_only_engine_that_stops_is_waited_for(tmp_path):
    async with (
        engines(1) as (engine,),
        serve(tmp_path / "run", engine, keep_alive_s=0.05) as proxy,
        proxy.http() as http,
    ):
        engine.hold(5)
        lines = []
        async with http.stream("POST", "/x/e1/v1/messages", content=STREAM) as answer:
            stream = answer.aiter_lines()
            while not engine.waiting.is_set():
                lines.append(await anext(stream))
            engine.flow.clear()
            await until(lambda: proxy.proxy.router.engines[0].state == "down")
            late = asyncio.create_task(ask(http, "e2"))
            seen = len(lines)
            while sum('"stop_reason":null' in line for line in lines[seen:]) < 3:  # silence is broken meanwhile
                lines.append(await anext(stream))
            engine.release()
            engine.flow.set()
            lines += [line async for line in stream]
        assert text_of("\n".join(lines)) == TEXT
        assert await late == TEXT
    for call in check(tmp_path / "run", [engine]):
        assert [(a.start, a.end) for a in call.attempts] == [(0, NUM)]  # it went on where it was


async def test_an_engine_that_stopped_loses_its_replies_once_another_is_added(tmp_path):
    async with (
        engines(2) as served,
        serve(tmp_path / "run", served[0]) as proxy,
        proxy.http() as http,
    ):
        served[0].hold(5)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 5)
        served[0].flow.clear()
        await until(lambda: proxy.proxy.router.engines[0].state == "down")
        assert not reply.done()
        await http.post("/api/engines", json={"action": "add", "url": served[1].url})
        assert await reply == TEXT
        served[0].flow.set()
        served[0].release()
    (call,) = check(tmp_path / "run", served)
    assert spans_of(call, served) == [(0, 0, 5), (1, 5, NUM)]


@pytest.mark.parametrize("action", ["drain", "remove"])
async def test_a_drained_engine_finishes_its_replies_and_a_removed_one_hands_them_on(tmp_path, action):
    async with engines(2) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[0].hold(5)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 5)
        answer = await http.post("/api/engines", json={"action": action, "url": served[0].url})
        assert answer.json()["state"] == {"drain": "draining", "remove": "removed"}[action]
        assert await ask(http, "e2") == TEXT  # new calls go elsewhere
        if action == "drain":
            served[0].release()
        assert await reply == TEXT
        served[0].release()
        await http.post("/api/engines", json={"action": "add", "url": served[0].url})
        await http.post("/api/engines", json={"action": "drain", "url": served[1].url})
        assert await ask(http, "e3") == TEXT
    by_execution = {call.execution_id: spans_of(call, served) for call in check(tmp_path / "run", served)}
    moved = [(0, 0, NUM)] if action == "drain" else [(0, 0, 5), (1, 5, NUM)]
    assert by_execution == {"e1": moved, "e2": [(1, 0, NUM)], "e3": [(0, 0, NUM)]}


async def test_a_drained_engine_that_dies_hands_its_replies_on(tmp_path):
    async with engines(2) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        served[0].hold(5)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 5)
        await http.post("/api/engines", json={"action": "drain", "url": served[0].url})
        served[0].down = True
        served[0].release()
        assert await reply == TEXT
        assert {e.state for e in proxy.proxy.router.engines} == {"draining", "up"}
    (call,) = check(tmp_path / "run", served)
    assert spans_of(call, served) == [(0, 0, 5), (1, 5, NUM)]


async def test_the_last_engine_is_removed_in_mid_reply_and_another_added(tmp_path):
    async with engines(2) as served, serve(tmp_path / "run", served[0]) as proxy, proxy.http() as http:
        served[0].hold(5)
        reply = asyncio.create_task(ask(http))
        await arrived(proxy, 5)
        await http.post("/api/engines", json={"action": "remove", "url": served[0].url})
        await http.post("/api/engines", json={"action": "add", "url": served[1].url})
        assert await reply == TEXT
        served[0].release()
    (call,) = check(tmp_path / "run", served)
    assert spans_of(call, served) == [(0, 0, 5), (1, 5, NUM)]


async def test_the_end_of_an_execution_does_not_wait_for_an_engine_that_is_stopped(tmp_path):
    limits = SamplerLimits(abort_s=0.1)
    async with engines(1) as (engine,), serve(tmp_path / "run", engine, limits=limits) as proxy, proxy.http() as http:
        engine.hold(5)
        reply = asyncio.create_task(http.post("/x/e1/v1/messages", content=json.dumps(REQUEST)))
        await arrived(proxy, 5)
        engine.deaf = True
        ended = await asyncio.wait_for(http.post("/api/executions/e1/end", json={"reason": "cancelled"}), 20)
        assert ended.json()["state"] == "ended"
        assert (await reply).status_code != 200
        engine.release()
    (call,) = check_run(tmp_path / "run", engine)
    assert (call.status, call.output_tokens) == ("aborted", 5)
    assert "did not stop when it was asked to" in call.attempts[-1].error


async def test_many_calls_over_engines_that_come_and_go(tmp_path):
    chance = random.Random(1)
    async with engines(4, pause_s=0.002) as served, serve(tmp_path / "run", *served) as proxy, proxy.http() as http:
        calls = [asyncio.create_task(_some(http, f"e{i}", 4)) for i in range(12)]
        others = served[1:]  # one stays, so that every reply has somewhere to go
        while not all(call.done() for call in calls):
            engine = chance.choice(others)
            match chance.choice(("drain", "remove", "die", "stop", "add", "add")):
                case "die":
                    engine.down = True
                case "stop":
                    engine.flow.clear()
                case "add":
                    engine.down = False
                    engine.flow.set()
                    await http.post("/api/engines", json={"action": "add", "url": engine.url})
                case action:
                    await http.post("/api/engines", json={"action": action, "url": engine.url})
            await asyncio.sleep(0.03)
        for call in calls:
            assert await call == [TEXT] * 4
        for engine in others:
            engine.flow.set()
        assert {e.in_flight for e in proxy.proxy.router.engines} == {0}
        assert all(not e.riders for e in proxy.proxy.router.engines)
    assert len(check(tmp_path / "run", served)) == 48


async def _some(http, execution, num):
    return [await ask(http, execution) for _ in range(num)]
