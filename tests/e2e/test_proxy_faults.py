"""What a harness sees, and what is recorded, when clients leave, engines die and disks fill."""

import asyncio
import json
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from gyre_data.errors import CaptureError
from gyre_data.store import RunWriter
from gyre_proxy.generation import Generation
from gyre_proxy.sampler import SamplerLimits
from tests.support import toy_tokenizer as toy
from tests.support.proxy_server import calls_of, check_run, deliveries_of, nodes_of, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

HELLO = {
    "deltas": [{"ids": [72, 105], "lps": [-0.1, -0.2]}, {"ids": [33, 257], "lps": [-0.3, -0.01]}],
    "finish": {"type": "stop", "matched": 257},
}
OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
CASES = Path(__file__).parents[1] / "data" / "cases"
BODY = json.dumps(REQUEST).encode()
STREAM = json.dumps({**REQUEST, "stream": True}).encode()


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def leave_in_mid_reply(served, engine, body=STREAM):
    """A client that goes away after the first delta; returns once the proxy has noticed."""
    engine.hold(1)
    async with served.http() as http, http.stream("POST", "/x/e1/v1/messages", content=body) as answer:
        await anext(aiter(answer.aiter_raw()))
        await engine.waiting.wait()
    generation = next(iter(served.proxy.executions.get("e1").generations.values()))
    await until(lambda: not generation.as_earlier().connected)
    return generation


def latest(run):
    return {delivery.call_id: delivery.state for delivery in deliveries_of(run)}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_comes_back_in_time_gets_the_same_reply_from_its_start(tmp_path, stream):
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served:
        await leave_in_mid_reply(served, engine)
        async with served.http() as http:
            again = asyncio.create_task(http.post("/x/e1/v1/messages", content=STREAM if stream else BODY))
            await until(
                lambda: any(g.as_earlier().connected for g in served.proxy.executions.get("e1").generations.values())
            )
            engine.release()
            answer = await again
        assert "Hi" in answer.text
    (call,) = check_run(run, engine)
    assert (len(engine.requests), engine.aborted, call.status) == (1, [], "ok")
    assert answer.headers["x-gyre-call"] == call.call_id
    assert latest(run) == {call.call_id: "delivered"}


async def test_a_client_that_stays_away_has_its_reply_aborted_and_kept(tmp_path):
    engine, run = ScriptedEngine([HELLO, OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine, grace_s=0.05) as served:
        generation = await leave_in_mid_reply(served, engine)
        await until(lambda: generation.done)
        engine.release()
        async with served.anthropic() as client:
            assert (await client.messages.create(**REQUEST)).content[0].text == "Oh"
    first, second = check_run(run, engine)
    nodes = nodes_of(run)
    assert (first.status, first.finish_reason, first.output_tokens) == ("aborted", "abort", 2)
    assert nodes[first.output_node].token_ids.tolist() == [72, 105]
    assert (second.status, second.extension, second.prompt_node) == ("ok", "retry", first.prompt_node)
    assert latest(run) == {first.call_id: "abandoned", second.call_id: "delivered"}


async def test_a_retry_during_the_abort_of_its_reply_is_another_sample(tmp_path):
    engine, run = ScriptedEngine([HELLO, OTHER]), tmp_path / "run"
    engine.deaf = True  # it goes on sampling for a while after it was asked to stop
    async with engine.serving(), serve_proxy(run, engine, grace_s=0.05) as served, served.http() as http:
        generation = await leave_in_mid_reply(served, engine)
        await until(lambda: engine.aborted)
        again = asyncio.create_task(http.post("/x/e1/v1/messages", content=BODY))
        await until(lambda: len(engine.requests) == 2)
        engine.release()
        assert (await again).json()["content"][0]["text"] == "Oh"
        await until(lambda: generation.done)
    first, second = sorted(check_run(run, engine), key=lambda call: call.started_at)
    assert (first.extension, second.extension) == ("root", "retry")
    assert latest(run) == {first.call_id: "abandoned", second.call_id: "delivered"}


async def test_an_identical_request_beside_an_open_one_is_a_sibling(tmp_path):
    engine, run = ScriptedEngine([HELLO, OTHER]), tmp_path / "run"
    engine.hold(0)
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        one = asyncio.create_task(http.post("/x/e1/v1/messages", content=BODY))
        await engine.waiting.wait()
        two = asyncio.create_task(http.post("/x/e1/v1/messages", content=STREAM))
        await until(lambda: len(engine.requests) == 2)
        engine.release()
        assert {(await one).headers["x-gyre-call"], (await two).headers["x-gyre-call"]} == {
            c.call_id for c in calls_of(run)
        }
    one, two = check_run(run, engine)
    assert one.prompt_node == two.prompt_node
    assert one.output_node != two.output_node
    assert {one.extension, two.extension} == {"root", "retry"}


async def test_a_reply_that_was_finished_but_never_got_there(tmp_path):
    # Case T06: the harness asks again, and goes on from the reply that it got.
    engine, run = ScriptedEngine([HELLO, OTHER, HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served:
        generation = await leave_in_mid_reply(served, engine)
        engine.release()
        await until(lambda: generation.done)
        async with served.anthropic() as client:
            assert (await client.messages.create(**REQUEST)).content[0].text == "Oh"
            messages = [
                *REQUEST["messages"],
                {"role": "assistant", "content": "Oh"},
                {"role": "user", "content": "next"},
            ]
            await client.messages.create(**{**REQUEST, "messages": messages})
    lost, got, following = check_run(run, engine)
    assert [call.status for call in (lost, got, following)] == ["ok"] * 3
    assert latest(run) == {lost.call_id: "undelivered", got.call_id: "delivered", following.call_id: "delivered"}
    assert (following.extension, following.continues_from) == ("bridge", got.call_id)


async def test_a_lost_reply_is_replayed_by_config(tmp_path):
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine, replay_lost=True) as served:
        generation = await leave_in_mid_reply(served, engine)
        engine.release()
        await until(lambda: generation.done)
        async with served.anthropic() as client:
            assert (await client.messages.create(**REQUEST)).content[0].text == "Hi!"
    (call,) = check_run(run, engine)
    assert latest(run) == {call.call_id: "delivered"}


@pytest.mark.parametrize("wire", ["anthropic", "openai"])
async def test_the_harness_does_not_notice_an_engine_that_dies_in_mid_reply(tmp_path, wire):
    first = {"deltas": [{"ids": [72], "lps": [-0.1]}, {"ids": [105], "lps": [-0.2]}], "die_after": 2}
    rest = {**OTHER, "weight_version": "base:1"}
    one, two, run = ScriptedEngine([first]), ScriptedEngine([rest]), tmp_path / "run"
    async with one.serving(), two.serving(), serve_proxy(run, one, two) as served:
        if wire == "anthropic":
            async with served.anthropic() as client, client.messages.stream(**REQUEST) as events:
                text = (await events.get_final_message()).content[0].text
        else:
            async with served.openai() as client:
                text = (await client.chat.completions.create(**REQUEST)).choices[0].message.content
    assert text == "HiOh"
    (call,) = check_run(run, one)
    assert [(a.engine, a.start, a.end) for a in call.attempts] == [(one.url, 0, 2), (two.url, 2, 5)]
    assert "failed" in call.attempts[0].error
    output = nodes_of(run)[call.output_node]
    assert [(s.n, s.start, s.end) for s in output.policy_versions] == [(0, 0, 2), (1, 2, 5)]


async def test_a_fault_in_mid_stream_never_looks_like_an_end(tmp_path):
    engine, run = ScriptedEngine([{**HELLO, "die_after": 1}]), tmp_path / "run"
    limits = SamplerLimits(recovery_s=0.0)
    async with engine.serving(), serve_proxy(run, engine, limits=limits) as served, served.http() as http:
        pieces = []
        with pytest.raises(httpx.RemoteProtocolError):
            async with http.stream("POST", "/x/e1/v1/messages", content=STREAM) as answer:
                await _read(answer, pieces)
        text = "".join(pieces)
        assert "Hi" in text
        assert "event: error" in text
        assert "message_stop" not in text
    (call,) = check_run(run, engine)
    assert (call.status, call.output_tokens, call.finish_reason) == ("failed", 2, None)
    assert "no engine is up to finish" in call.error


def case(name):
    return json.loads((CASES / f"{name}.json").read_text())


async def test_s07_an_aborted_stream_whose_last_chunk_repeats_everything(tmp_path):
    whole, run = case("S07"), tmp_path / "run"
    expected = whole["expected"]
    engine = ScriptedEngine(whole["input"]["engine_script"], incremental=True)
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        answer = await http.post("/x/e1/v1/chat/completions", json={"model": "toy", "messages": REQUEST["messages"]})
        assert answer.status_code >= 500
    (call,) = check_run(run)
    output = nodes_of(run)[call.output_node]
    assert (call.status, output.token_ids.tolist()) == (expected["outcome"], expected["captured_output_ids"])
    assert len(output.logprobs) == expected["n_logprobs"]
    assert toy.decode(output.token_ids.tolist()) == expected["text"]


async def test_s08_an_aborted_stream_whose_last_chunk_is_empty(tmp_path):
    script, run = case("S08")["input"]["engine_script"], tmp_path / "run"
    engine = ScriptedEngine([*script, OTHER])
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for status in (500, 500, 200):
            answer = await http.post(
                "/x/e1/v1/chat/completions", json={"model": "toy", "messages": REQUEST["messages"]}
            )
            assert answer.status_code == status or status <= answer.status_code < 600
            assert "aborted" in answer.text or status == 200
    first, second, third = check_run(run)
    assert [call.status for call in (first, second, third)] == ["aborted", "aborted", "ok"]
    assert (first.output_node, nodes_of(run)[second.output_node].token_ids.tolist()) == (None, [79, 110])
    assert (third.extension, third.prompt_node) == ("retry", first.prompt_node)


async def _read(answer, pieces):
    async for piece in answer.aiter_text():
        pieces.append(piece)


@pytest.mark.parametrize("wire", ["anthropic", "openai"])
async def test_a_fault_before_the_headers_is_the_wires_own_error(tmp_path, wire):
    engine, run = ScriptedEngine([{"refuse": (400, "cannot take it")}, {"refuse": (503, "busy")}]), tmp_path / "run"
    limits = SamplerLimits(recovery_s=0.0)
    async with engine.serving(), serve_proxy(run, engine, limits=limits) as served:
        if wire == "anthropic":
            async with served.anthropic() as client:
                with pytest.raises(anthropic.BadRequestError, match="cannot take it"):
                    await client.messages.create(**REQUEST)
                with pytest.raises(anthropic.APIStatusError, match="no engine is up") as caught:
                    await client.messages.create(**REQUEST)
                assert caught.value.status_code == 529
        else:
            async with served.openai() as client:
                with pytest.raises(openai.BadRequestError, match="cannot take it"):
                    await client.chat.completions.create(**REQUEST)
                with pytest.raises(openai.InternalServerError, match="no engine is up"):
                    await client.chat.completions.create(**REQUEST)
    calls = check_run(run)
    assert [(call.status, call.output_node, call.output_tokens) for call in calls] == [("failed", None, 0)] * 2


class FailingDisk(RunWriter):
    """A run writer whose disk can be full."""

    full = False

    def write(self, rows):
        if self.full:
            raise CaptureError("no space left on device")
        super().write(rows)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_disk_fails_the_call_and_nothing_is_lost_silently(tmp_path, stream):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    history = [*REQUEST["messages"], {"role": "assistant", "content": "Oh"}, {"role": "user", "content": "next"}]
    async with engine.serving():
        writer = FailingDisk(run)
        async with (
            serve_proxy(run, engine, writer=writer) as served,
            served.http() as http,
            served.anthropic() as client,
        ):
            await client.messages.create(**REQUEST)
            writer.full = True
            body = json.dumps({**REQUEST, "messages": history, "stream": stream}).encode()
            if stream:
                pieces = []
                with pytest.raises(httpx.RemoteProtocolError):
                    async with http.stream("POST", "/x/e1/v1/messages", content=body) as answer:
                        await _read(answer, pieces)
                assert "could not be recorded" in "".join(pieces)
                assert "message_stop" not in "".join(pieces)
            else:
                answer = await http.post("/x/e1/v1/messages", content=body)
                assert answer.status_code == 500
                assert "no space left" in answer.json()["error"]["message"]
            assert len(calls_of(run)) == 1
            writer.full = False
            await client.messages.create(**{**REQUEST, "messages": history})
    first, second = check_run(run)
    assert (second.extension, second.continues_from) == ("bridge", first.call_id)


async def test_long_silence_is_broken_by_what_clients_count(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    engine.hold(0)
    async with (
        engine.serving(),
        serve_proxy(run, engine, keep_alive_s=0.05, json_keep_alive_s=0.05) as served,
        served.http() as http,
    ):
        async with http.stream("POST", "/x/e1/v1/messages", content=STREAM) as answer:
            lines = answer.aiter_lines()
            seen = []
            while sum("message_delta" in line for line in seen) < 4:
                seen.append(await anext(lines))
            assert seen[0] == "event: message_start"
            engine.release()
            rest = [line async for line in lines]
        assert any("message_stop" in line for line in rest)
        engine.hold(0)
        async with http.stream("POST", "/x/e1/v1/messages", content=json.dumps({**REQUEST, "max_tokens": 9})) as answer:
            pieces = aiter(answer.aiter_text())
            text = await anext(pieces) + await anext(pieces)
            assert text.strip() == ""
            engine.release()
            text += "".join([piece async for piece in pieces])
        assert json.loads(text)["content"][0]["text"] == "Oh"
    check_run(run, engine)


@pytest.mark.parametrize("depth", [200, 252, 300])
async def test_a_call_nested_however_deep_gets_a_reply_and_a_record(tmp_path, depth):
    arguments = '{"a":' * depth + "1" + "}" * depth
    ids = [*toy.encode('<tool_call>{"name":"f","arguments":' + arguments + "}</tool_call>"), 257]
    deep = {"deltas": [{"ids": ids, "lps": [-0.1] * len(ids)}], "finish": {"type": "stop", "matched": 257}}
    engine, run = ScriptedEngine([deep, HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        async with asyncio.timeout(60):
            first = await http.post("/x/e1/v1/messages", json={**REQUEST, "max_tokens": 4096})
            echo = {"role": "assistant", "content": first.json()["content"]}
            used = [block["id"] for block in echo["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": name, "content": "x"} for name in used]
            asked = [*REQUEST["messages"], echo, {"role": "user", "content": results or "go on"}]
            second = await http.post("/x/e1/v1/messages", json={**REQUEST, "messages": asked})
        assert (first.status_code, second.status_code) == (200, 200)
        assert served.proxy.status()["in_flight"] == 0
    assert [call.extension for call in check_run(run, engine)] == ["root", "bridge"]


async def test_a_reply_without_a_recordable_form_fails_its_call_and_nothing_else(tmp_path, monkeypatch):
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    rows = Generation._rows

    def spoiled(generation, error):
        rows(generation, error)
        raise TypeError("no such form")

    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        with monkeypatch.context() as patch:
            patch.setattr(Generation, "_rows", spoiled)
            async with asyncio.timeout(60):
                broken = await http.post("/x/e1/v1/messages", content=BODY)
        whole = await http.post("/x/e1/v1/messages", content=BODY)
        assert (broken.status_code, whole.status_code) == (500, 200)
        assert "no such form" in broken.text
    assert len(check_run(run, engine)) == 1


async def test_a_delivered_reply_is_not_kept_in_memory(tmp_path):
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await http.post("/x/e1/v1/messages", content=BODY)
        await http.post("/x/e1/v1/messages", content=STREAM)
        await until(lambda: not served.proxy.executions.get("e1").generations)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": '[{"name":"f","input_schema":' + '{"a":' * 300 + "1" + "}" * 301 + "]"},
        {"metadata": "[" * 100_000},
        {"messages": '[{"role":"user","content":[{"type":"text","text":"hi","x":' + "[" * 251 + "]" * 251 + "}]}]"},
    ],
)
async def test_a_body_nested_too_deeply_is_refused(tmp_path, fields):
    parts = {"model": '"toy"', "max_tokens": "64", "messages": json.dumps(REQUEST["messages"]), **fields}
    body = "{" + ",".join(f'"{name}":{text}' for name, text in parts.items()) + "}"
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http, asyncio.timeout(60):
        answer = await http.post("/x/e1/v1/messages", content=body.encode())
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "nested" in answer.text
    assert calls_of(run) == []


@pytest.mark.parametrize("number", ["123456789012345678901234567890", "NaN"])
async def test_arguments_that_json_readers_disagree_on_are_taken_as_text(tmp_path, number):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":' + number + "}"}}
    asked = [
        *REQUEST["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        answer = await http.post("/x/e1/v1/chat/completions", json={"model": "toy", "messages": asked})
        assert answer.status_code == 200
    check_run(run, engine)


async def test_a_seed_that_cannot_be_stored_is_refused_before_anything_is_sampled(tmp_path):
    engine, run = ScriptedEngine([HELLO]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        asked = {"model": "toy", "messages": REQUEST["messages"], "seed": 2**63}
        answer = await http.post("/x/e1/v1/chat/completions", json=asked)
        assert answer.status_code == 400
    assert engine.requests == []


async def test_a_call_that_failed_on_what_the_engine_gave_names_the_engine(tmp_path):
    wrong = {"deltas": [{"ids": [72], "lps": [-0.1]}, {"ids": [5000], "lps": [-0.1]}], "finish": {"type": "stop"}}
    engine, run = ScriptedEngine([wrong]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await http.post("/x/e1/v1/messages", content=BODY)
    (call,) = calls_of(run)
    assert (call.status, call.output_tokens) == ("failed", 1)
    assert [(attempt.engine, attempt.start, attempt.end) for attempt in call.attempts] == [(engine.url, 0, 1)]


STOP = {"type": "stop"}


def event(ids=(72, 257), logprobs=(-0.1, -0.1), finish=STOP, version="base:0"):
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    told = {"completion_tokens": len(ids), "output_token_logprobs": pairs, "weight_version": version}
    return {"output_ids": list(ids), "meta_info": {**told, "finish_reason": finish}}


@pytest.mark.parametrize(
    "sent",
    [
        "text",
        event(finish="stop"),
        event(finish={"type": "another"}),
        event(ids=(2**40, 257)),
        event(logprobs=(0.5, -0.1)),
        event(version="weights of yesterday"),
    ],
    ids=["no object", "finish is no object", "unknown finish", "id beyond 32 bits", "log-prob above 0", "no version"],
)
async def test_nonsense_of_an_engine_is_a_fault_of_the_engine(tmp_path, sent):
    engine, run = ScriptedEngine([{"raw_chunks": [sent]}]), tmp_path / "run"
    limits = SamplerLimits(recovery_s=0.0)
    async with engine.serving(), serve_proxy(run, engine, limits=limits) as served, served.http() as http:
        answer = await http.post("/x/e1/v1/messages", content=BODY)
        assert answer.status_code in (500, 529)
        assert answer.json()["type"] == "error"
        assert "the proxy failed" not in answer.text
    calls = check_run(run, engine)
    assert [(call.status, call.output_tokens) for call in calls] == [("failed", 0)]
