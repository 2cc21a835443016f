import asyncio
import json
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from gyre_data.errors import ConfigError, EngineError
from gyre_proxy.chunks import ChunkReader, EngineRefusedError
from gyre_proxy.engine import EngineClient, http_client
from tests.support.scripted_engine import ScriptedEngine, serve_app


def chunk(ids, lps, total, finish=None, **meta):
    pairs = [[lp, token, None] for lp, token in zip(lps, ids, strict=False)]
    return {
        "output_ids": ids,
        "meta_info": {"completion_tokens": total, "finish_reason": finish, "output_token_logprobs": pairs, **meta},
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 500), max_size=5), min_size=1, max_size=8), st.data())
def test_any_mixture_of_cumulative_and_delta_chunks_gives_the_same_tokens(deltas, data):
    whole = [token for delta in deltas for token in delta]
    reader, got, got_lps, seen = ChunkReader(), [], [], 0
    for index, delta in enumerate(deltas):
        seen += len(delta)
        start = 0 if data.draw(st.booleans()) else seen - len(delta)
        ids, finish = whole[start:seen], {"type": "stop"} if index + 1 == len(deltas) else None
        read = reader.read(
            chunk(ids, [-token / 1000 for token in ids], seen, finish, output_token_logprobs_length=seen)
        )
        got += read.token_ids.tolist()
        got_lps += read.logprobs.tolist()
    assert got == whole
    assert got_lps == [float(np.float32(-token / 1000)) for token in whole]


def test_a_last_chunk_that_repeats_everything_adds_nothing():
    # Case S07: the abort's chunk carries the whole text and one id again.
    reader = ChunkReader()
    assert reader.read(chunk([67, 111], [-0.1, -0.2], 2)).token_ids.tolist() == [67, 111]
    last = reader.read(
        {"text": "Co", "output_ids": [111], "meta_info": {"completion_tokens": 2, "finish_reason": {"type": "abort"}}}
    )
    assert last.token_ids.size == 0
    assert last.finish == "abort"


def test_an_empty_last_chunk_without_logprob_fields_is_a_finish():
    read = ChunkReader().read(
        {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "shutdown"}}}
    )
    assert (read.token_ids.size, read.finish, read.message) == (0, "abort", "shutdown")


def test_ids_wait_for_their_logprobs_and_a_finish_without_them_is_refused():
    reader = ChunkReader()
    assert reader.read(chunk([1, 2], [-0.1], 2, output_token_logprobs_length=1)).token_ids.tolist() == [1]
    assert reader.read(chunk([1, 2, 3], [-0.1, -0.2, -0.3], 3, output_token_logprobs_length=3)).token_ids.tolist() == [
        2,
        3,
    ]
    with pytest.raises(EngineError, match="log-prob for every sampled id"):
        reader.read(chunk([1, 2, 3, 4], [], 4, {"type": "stop"}))


@pytest.mark.parametrize(
    "bad",
    [
        chunk([1, 2, 3], [-0.1, -0.2, -0.3], 5),  # neither 5 nor 5 new
        chunk([1], [-0.1], None),
        {"output_ids": [7], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-0.1, 8, None]]}},
    ],
)
def test_tokens_that_cannot_be_aligned_are_refused(bad):
    with pytest.raises(EngineError):
        ChunkReader().read(bad)


def test_version_spans_follow_the_engine():
    reader = ChunkReader()
    assert reader.read(chunk([1], [-0.1], 1, weight_version="a:0")).versions == (("a:0", 0, 1),)
    assert reader.read(chunk([1, 2], [-0.1, -0.1], 2, weight_version="a:1")).versions == (("a:0", 0, 1), ("a:1", 1, 2))
    spans = [{"version": "a:0", "start": 0, "end": 2}, {"version": "a:1", "start": 2, "end": 3}]
    read = reader.read(chunk([1, 2, 3], [-0.1] * 3, 3, {"type": "stop"}, weight_version="a:1", weight_versions=spans))
    assert read.versions == (("a:0", 0, 2), ("a:1", 2, 3))


async def collect(client: EngineClient):
    async with aclosing(client.generate("r1", b"[1,2]", {"max_new_tokens": 4}, "base:0")) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids.tolist()]


@pytest.mark.parametrize("incremental", [True, False])
async def test_a_reply_over_http_and_what_the_engine_was_sent(incremental):
    script = [{"deltas": [{"ids": [5], "lps": [-0.5]}, {"ids": [6, 7], "lps": [-0.6, -0.7]}]}]
    engine, http = ScriptedEngine(script, incremental=incremental), http_client()
    async with engine.serving(), http:
        assert await collect(EngineClient(engine.url, http)) == [5, 6, 7]
    sent = engine.requests[0]
    assert (sent["input_ids"], sent["extra_key"], sent["return_logprob"], sent["stream"]) == (
        [1, 2],
        "base:0",
        True,
        True,
    )


async def test_the_end_of_a_reply_waits_for_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_proxy.engine._HELD_UP", 1e6)  # after the first token the next look would be in an hour
    engine, http = (
        ScriptedEngine([{"deltas": [{"ids": [5], "lps": [-0.5]}, {"ids": [6], "lps": [-0.6]}]}]),
        http_client(),
    )
    engine.hold(1)
    async with engine.serving(), http, asyncio.timeout(60):
        reply = asyncio.create_task(collect(EngineClient(engine.url, http, coalesce_s=3600.0)))
        await engine.waiting.wait()
        engine.release()
        assert await reply == [5, 6]


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        (
            {"deltas": [{"ids": [5], "lps": [-0.5]}], "die_after": 0},
            EngineError,
            "failed in mid-reply|ended its stream",
        ),
        (
            {"deltas": [{"ids": [5], "lps": [-0.5]}], "die_after": 1},
            EngineError,
            "failed in mid-reply|ended its stream",
        ),
        ({"raw_chunks": [chunk([5], [-0.5], 1)]}, EngineError, "ended its stream before"),
        ({"refuse": (400, "too long")}, EngineRefusedError, "400: too long"),
        ({"refuse": (503, "busy")}, EngineError, "503: busy"),
        ({"raw_chunks": [{"error": {"message": "no", "code": 400}}]}, EngineRefusedError, "no"),
        ({"raw_chunks": [{"error": {"message": "later", "code": 503}}]}, EngineError, "later"),
    ],
)
async def test_whatever_goes_wrong_on_the_hop_is_an_engine_error(reply, kind, words):
    engine, http = ScriptedEngine([reply]), http_client()
    async with engine.serving(), http:
        with pytest.raises(kind, match=words) as caught:
            await collect(EngineClient(engine.url, http))
    assert type(caught.value) is kind
    assert json.dumps(str(caught.value))


@pytest.mark.parametrize(("url", "mend"), [("localhost:1", "write http://"), ("ftp://x", "write http://")])
async def test_an_address_that_is_no_url_is_refused(url: str, mend: str) -> None:
    async with http_client() as http:
        with pytest.raises(ConfigError, match=mend):
            EngineClient(url, http)


async def test_a_server_that_is_no_engine_is_refused_at_once() -> None:
    async with serve_app(Starlette()) as url, http_client() as http:
        with pytest.raises(ConfigError, match="without /v1"):
            await EngineClient(url, http).info()
