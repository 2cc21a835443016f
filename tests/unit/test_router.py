import asyncio

import numpy as np
import pytest

from gyre_data.errors import CaptureError, ConfigError, EngineError
from gyre_proxy.chunks import EngineRefusedError
from gyre_proxy.engine import EngineClient, http_client
from gyre_proxy.router import Router, read_version
from gyre_proxy.sampler import Sampler, SamplerLimits
from tests.support.scripted_engine import ScriptedEngine

REPLY = {
    "deltas": [{"ids": [5], "lps": [-0.5]}, {"ids": [6, 257], "lps": [-0.6, -0.01]}],
    "finish": {"type": "stop", "matched": 257},
}


@pytest.fixture
async def http():
    async with http_client() as client:
        yield client


def make_router(http, **options):
    return Router(lambda url: EngineClient(url, http), poll_s=0.05, **options)


def make_sampler(router, **changes):
    options = {
        "router": router,
        "call_id": "c_1",
        "affinity": "e1",
        "prompt_ids": np.array([1, 2, 3], np.int32),
        "sampling": {"max_new_tokens": 10, "temperature": 1.0},
        "stop_ids": frozenset({257}),
        "vocab_size": 512,
        "limits": SamplerLimits(recovery_s=5.0),
    }
    return Sampler(**{**options, **changes})


async def drain(sampler):
    return [token async for chunk in sampler.chunks() for token in chunk.token_ids.tolist()]


def test_a_version_is_read_and_an_unlabelled_engine_is_refused():
    assert str(read_version("run-1:4", None)) == "run-1:4"
    assert str(read_version("default", "mine")) == "mine:0"
    assert str(read_version("7", "mine")) == "mine:7"
    with pytest.raises(ConfigError, match="--policy ID"):
        read_version("default", None)


async def test_least_loaded_with_a_leaning_to_the_engine_that_holds_the_prefix(http):
    one, two = ScriptedEngine([REPLY]), ScriptedEngine([REPLY])
    async with one.serving(), two.serving():
        router = make_router(http)
        a, b = await router.add(one.url), await router.add(two.url)
        assert router.pick("e1") is a
        a.in_flight = 1
        assert router.pick("e2") is b
        assert router.pick("e1") is a  # one call more is worth the prefix
        a.in_flight = 4
        assert router.pick("e1") is b
        a.in_flight = 0
        router.drain(b.url)
        assert router.pick("e1") is a
        router.remove(a.url)
        assert router.pick("e1") is None
        with pytest.raises(ConfigError, match="one of this proxy's engines"):
            router.drain(a.url)


async def test_a_failed_engine_comes_back_in_a_new_epoch(http):
    one = ScriptedEngine([REPLY])
    async with one.serving():
        router = make_router(http)
        engine = await router.add(one.url)
        router.start()
        one.down = True
        router.note_failure(engine, "gone")
        assert router.pick("e1") is None
        one.down, one.version = False, "base:1"
        assert await router.wait("e1", {engine.url: 0}, 60) is engine
        assert (engine.epoch, str(engine.version), engine.state) == (1, "base:1", "up")
        await router.stop()


async def test_the_watch_notices_a_dead_engine(http):
    one = ScriptedEngine([REPLY])
    async with one.serving():
        router = make_router(http)
        engine = await router.add(one.url)
        router.start()
        one.down = True
        async with asyncio.timeout(60):
            while engine.state != "down":
                await asyncio.sleep(0.01)
        await router.stop()


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_reply_goes_on_elsewhere_when_its_engine_dies(http, incremental):
    first = {"deltas": [{"ids": [5], "lps": [-0.5]}, {"ids": [6], "lps": [-0.6]}], "die_after": 2}
    rest = {
        "deltas": [{"ids": [7, 257], "lps": [-0.7, -0.01]}],
        "finish": {"type": "stop", "matched": 257},
        "weight_version": "base:1",
    }
    one, two = ScriptedEngine([first], incremental=incremental), ScriptedEngine([rest], incremental=incremental)
    async with one.serving(), two.serving():
        router = make_router(http)
        a, b = await router.add(one.url), await router.add(two.url)
        sampler = make_sampler(router)
        assert await drain(sampler) == [5, 6, 7, 257]
    assert two.requests[0]["input_ids"] == [1, 2, 3, 5, 6]
    assert two.requests[0]["sampling_params"]["max_new_tokens"] == 8
    assert sampler.logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.01], abs=1e-6)
    assert [(t.engine, t.start, t.end, t.error is None) for t in sampler.attempts] == [
        (a.url, 0, 2, False),
        (b.url, 2, 4, True),
    ]
    assert [(s.n, s.start, s.end) for s in sampler.versions] == [(0, 0, 2), (1, 2, 4)]
    assert (sampler.finish, a.in_flight, b.in_flight, a.state) == ("stop", 0, 0, "down")


async def test_a_reply_goes_on_elsewhere_when_its_engine_stops_answering(http):
    one, two = ScriptedEngine([REPLY]), ScriptedEngine([REPLY])
    one.hold(1)
    async with one.serving(), two.serving():
        router = make_router(http)
        a, b = await router.add(one.url), await router.add(two.url)
        router.start()
        sampler = make_sampler(router)
        task = asyncio.create_task(drain(sampler))
        await one.waiting.wait()
        one.down = True  # the connection of the reply stays open, nothing comes on it
        assert await asyncio.wait_for(task, 60) == [5, 5, 6, 257]
        await router.stop()
        one.release()
    assert [(t.engine, t.start, t.end) for t in sampler.attempts] == [(a.url, 0, 1), (b.url, 1, 4)]
    assert "stopped answering" in sampler.attempts[0].error
    assert (a.riders, b.riders, task.cancelled()) == (set(), set(), False)


async def test_a_reply_waits_for_its_only_engine_to_recover(http):
    first = {"deltas": [{"ids": [5], "lps": [-0.5]}], "die_after": 1}
    one = ScriptedEngine([first, REPLY])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        router.start()
        sampler = make_sampler(router)
        assert await drain(sampler) == [5, 5, 6, 257]
        await router.stop()
    assert one.requests[1]["input_ids"] == [1, 2, 3, 5]


async def test_a_reply_whose_engine_dies_after_the_stop_token_is_whole(http):
    one = ScriptedEngine([{"deltas": [{"ids": [5, 257], "lps": [-0.5, -0.1]}], "die_after": 1}])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        sampler = make_sampler(router)
        assert await drain(sampler) == [5, 257]
    assert (sampler.finish, sampler.matched, len(one.requests)) == ("stop", 257, 1)


async def test_without_any_engine_the_call_fails_and_keeps_what_it_has(http):
    one = ScriptedEngine([{"deltas": [{"ids": [5], "lps": [-0.5]}], "die_after": 1}])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        sampler = make_sampler(router, limits=SamplerLimits(recovery_s=0.0))
        with pytest.raises(EngineError, match="no engine is up to finish"):
            await drain(sampler)
    assert sampler.output_ids.tolist() == [5]


async def test_an_unasked_abort_ends_the_reply_where_no_other_engine_is(http):
    chunk = {
        "output_ids": [],
        "meta_info": {"completion_tokens": 0, "finish_reason": {"type": "abort", "message": "shutdown"}},
    }
    one = ScriptedEngine([{"raw_chunks": [chunk]}])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        sampler = make_sampler(router)
        assert await drain(sampler) == []
    assert (sampler.finish, sampler.attempts[0].error) == ("abort", "shutdown")


async def test_an_unasked_abort_goes_on_where_another_engine_is(http):
    chunks = [
        {
            "output_ids": [5],
            "meta_info": {"completion_tokens": 1, "finish_reason": None, "output_token_logprobs": [[-0.5, 5, None]]},
        },
        {"output_ids": [5], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort"}}},
    ]
    one, two = ScriptedEngine([{"raw_chunks": chunks}]), ScriptedEngine([REPLY])
    async with one.serving(), two.serving():
        router = make_router(http)
        await router.add(one.url)
        await router.add(two.url)
        sampler = make_sampler(router)
        assert await drain(sampler) == [5, 5, 6, 257]


async def test_a_refusal_is_final(http):
    one = ScriptedEngine([{"refuse": (400, "The input is longer than the model's context length")}])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        with pytest.raises(EngineRefusedError, match="longer than"):
            await drain(make_sampler(router))
    assert len(one.requests) == 1


async def test_ids_outside_the_vocabulary_reach_neither_engine_nor_record(http):
    one = ScriptedEngine([{"deltas": [{"ids": [600], "lps": [-0.1]}]}])
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        with pytest.raises(CaptureError, match="holds id 512, the engine's vocabulary has 512"):
            make_sampler(router, prompt_ids=np.array([1, 512], np.int32))
        with pytest.raises(CaptureError, match="outside the vocabulary"):
            await drain(make_sampler(router))


async def test_an_abort_asked_for_ends_the_reply(http):
    one = ScriptedEngine([REPLY])
    one.hold(1)
    async with one.serving():
        router = make_router(http)
        await router.add(one.url)
        sampler = make_sampler(router)
        task = asyncio.create_task(drain(sampler))
        await one.waiting.wait()
        await sampler.abort()
        assert await task == [5]
    assert (sampler.finish, one.aborted) == ("abort", ["c_1.0"])
