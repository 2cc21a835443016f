"""The Responses wire through a whole proxy: exact extension, replies that break off, silence, upgrades refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.proxy_server import calls_of, check_run, nodes_of, path_ids, serve_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.toy_tokenizer import SPECIAL, encode

CASES = Path(__file__).parents[1] / "data" / "cases"
ASK: dict[str, Any] = {"model": "any", "input": [{"role": "user", "content": "Go."}]}


def reply(text: str, cut: int = 4) -> dict[str, Any]:
    ids = [*encode(text), SPECIAL["<|im_end|>"]]
    parts = [ids[at : at + cut] for at in range(0, len(ids), cut)]
    return {"deltas": [{"ids": part, "lps": [-0.1] * len(part)} for part in parts], "finish": {"type": "stop"}}


CALL = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_streamed_turn_that_is_sent_back_is_extended_exactly(tmp_path):
    engine, run = ScriptedEngine([reply(CALL), reply("Done.")]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served:
        client = served.openai()
        async with client.responses.stream(**ASK) as events:
            first = await events.get_final_response()
        (call,) = (item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        second = await client.responses.create(model="any", input=[*ASK["input"], *first.output, result])
        assert second.output_text == "Done."
    (one, two), nodes = check_run(run, engine), nodes_of(run)
    before = path_ids(nodes, one.output_node)
    assert path_ids(nodes, two.prompt_node)[: len(before)] == before
    assert (two.extension, two.branch_reason) == ("bridge", None)
    assert (one.stop_reason, two.stop_reason, one.wire) == ("completed", "completed", "openai_responses")
    assert [call.output_tokens for call in (one, two)] == [len(encode(CALL)) + 1, 6]


async def test_p11_requests_in_every_shape_have_a_reply(tmp_path):
    given = json.loads((CASES / "P11.json").read_text())
    bodies = given["input"]["requests"]
    engine, run = ScriptedEngine(given["input"]["engine_script"]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for stream in (False, True):
            for body in (*bodies, {"model": "toy", "input": [{"role": "user", "content": "Count bay 6."}]}):
                answer = await http.post("/x/e1/v1/responses", json={**body, "stream": stream})
                assert answer.status_code == 200, answer.text
    calls, nodes = check_run(run, engine), nodes_of(run)
    assert len(calls) == 8
    for call in calls:
        assert nodes[call.output_node].token_ids.tolist() == given["input"]["engine_script"][0]["deltas"][0]["ids"]
    assert calls[0].prompt_node == calls[3].prompt_node
    assert [call.prompt_node for call in calls[:4]] == [call.prompt_node for call in calls[4:]]
    assert nodes[calls[1].prompt_node].root_id != nodes[calls[0].prompt_node].root_id


@pytest.mark.parametrize("back_in_time", [True, False])
async def test_a_client_that_sends_what_it_kept_of_a_broken_reply_goes_on_from_before_it(tmp_path, back_in_time):
    """Codex keeps the finished items of a stream that broke off and puts them into its retry."""
    replies = [reply(CALL), reply("Done.")] if back_in_time else [reply(CALL), reply(CALL), reply("Done.")]
    engine, run = ScriptedEngine(replies), tmp_path / "run"
    engine.hold(3)
    async with engine.serving(), serve_proxy(run, engine, grace_s=30.0 if back_in_time else 0.0) as served:
        client = served.openai()
        kept = []
        stream = await client.responses.create(**ASK, stream=True)
        async for event in stream:
            if event.type == "response.reasoning_text.delta":
                kept = [{"type": "reasoning", "id": event.item_id, "summary": [], "content": []}]
                break
        await stream.close()
        await engine.waiting.wait()
        while any(generation.as_earlier().connected for generation in served.proxy._going):
            await asyncio.sleep(0.02)
        while not back_in_time and not calls_of(run):
            await asyncio.sleep(0.02)
        engine.release()
        again = await client.responses.create(model="any", input=[*ASK["input"], *kept])
        (call,) = (item for item in again.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "1"}
        history = [*ASK["input"], *kept, *again.output, result]
        assert (await client.responses.create(model="any", input=history)).output_text == "Done."
    calls, nodes = check_run(run, engine), nodes_of(run)
    assert len(calls) == (2 if back_in_time else 3)
    *_, one, two = calls
    before = path_ids(nodes, one.output_node)
    assert path_ids(nodes, two.prompt_node)[: len(before)] == before
    assert two.branch_reason is None
    if not back_in_time:
        assert (calls[0].status, one.extension, one.prompt_node) == ("aborted", "retry", calls[0].prompt_node)


async def test_silence_is_broken_and_a_fault_never_ends_as_complete(tmp_path):
    engine, run = ScriptedEngine([reply("Oh"), {"refuse": (400, "no")}]), tmp_path / "run"
    engine.hold(0)
    async with engine.serving(), serve_proxy(run, engine, keep_alive_s=0.05) as served:
        client = served.openai()
        kinds = []
        async for event in await client.responses.create(**ASK, stream=True):
            kinds.append(event.type)
            if kinds.count("response.in_progress") == 4:
                engine.release()
        assert kinds[-1] == "response.completed"
        async with served.http() as http:
            answer = b""
            try:
                async with http.stream("POST", "/x/e2/v1/responses", json={**ASK, "stream": True}) as events:
                    async for piece in events.aiter_raw():
                        answer += piece
            except Exception as error:  # noqa: BLE001 - the connection is to break, however the client calls it
                assert "incomplete" in str(error)  # noqa: PT017
            else:
                raise AssertionError("a clean end")
        assert b"response.failed" in answer
        assert b"response.completed" not in answer


async def test_refusals_have_the_wires_own_shape(tmp_path):
    engine, run = ScriptedEngine([reply("Oh")]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine, context_window=8) as served, served.http() as http:
        upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
        answer = await http.get(
            "/x/e1/v1/responses", headers={**upgrade, "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        )
        assert answer.status_code == 426
        assert (await http.get("/x/e1/v1/responses")).status_code == 404
        answer = await http.post("/x/e1/v1/responses", json=ASK)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        assert (await http.post("/x/e1/a/helper/v1/responses", json={**ASK, "stream": True})).status_code == 400
    assert calls_of(run) == []
    assert engine.requests == []
