"""`gyre proxy` in front of `gyre engine`, as processes: real sampling, a kill in mid-recording, an orderly stop."""

import asyncio
import itertools
import json
import ssl
from pathlib import Path

import anthropic
import httpx
import httpx2
import openai
import pytest
import trustme

from gyre_data.arrays import from_table
from gyre_data.store import open as open_run
from gyre_train.tiny import make_tiny
from tests.support.engines import embedded_engine
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import calls_of, check_run, nodes_of, path_ids

SYSTEM = {"role": "system", "content": "You answer."}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), vocab=600, hidden=32, layers=1, context=4096)


@pytest.fixture(scope="module")
def engine(model):
    with embedded_engine(model, "--weight-version", "tiny:0") as served:
        yield served.url


async def talk(url, execution, turns, wire, stream, acknowledged, patience=0):
    """A harness: a conversation of `turns` turns, each sent again while the proxy is away. Notes the calls it saw."""
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn} of {execution}"})
        call_id, text = await turn_of(url, execution, messages, wire, stream, patience)
        acknowledged.append((execution, call_id))
        messages.append({"role": "assistant", "content": text})


async def turn_of(url, execution, messages, wire, stream, patience):
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        try:
            return await (anthropic_turn if wire == "anthropic" else openai_turn)(url, execution, messages, stream)
        except (anthropic.APIConnectionError, openai.APIConnectionError, httpx2.TransportError):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.5)  # a retry costs CPU that the starting proxy needs


async def anthropic_turn(url, execution, messages, stream):
    request = {"model": "any", "max_tokens": 12, "system": SYSTEM["content"], "messages": messages}
    async with anthropic.AsyncAnthropic(base_url=f"{url}/x/{execution}", api_key="k", max_retries=0) as client:
        if not stream:
            answer = await client.messages.with_raw_response.create(**request)
            return answer.headers["x-gyre-call"], text_of(await answer.parse())
        async with client.messages.stream(**request) as events:
            return events.response.headers["x-gyre-call"], text_of(await events.get_final_message())


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


async def openai_turn(url, execution, messages, stream):
    request = {"model": "any", "max_tokens": 12, "messages": [SYSTEM, *messages]}
    async with openai.AsyncOpenAI(base_url=f"{url}/x/{execution}/v1", api_key="k", max_retries=0) as client:
        answer = await client.chat.completions.with_raw_response.create(**request, stream=stream)
        parsed = answer.parse()
        if not stream:
            return answer.headers["x-gyre-call"], parsed.choices[0].message.content or ""
        pieces = [choice.delta.content or "" async for chunk in parsed for choice in chunk.choices]
        return answer.headers["x-gyre-call"], "".join(pieces)


def check_conversation(run: Path, execution: str, turns: int) -> None:
    """Every turn that was answered continues the one before it, token for token."""
    nodes = nodes_of(run)
    name, _, agent = execution.partition("/a/")
    calls = [
        call
        for call in calls_of(run)
        if (call.execution_id, call.agent_id) == (name, agent or None) and call.status == "ok"
    ]
    by_leaf = {call.output_node: call for call in calls}
    last = calls[-1]
    ids = path_ids(nodes, last.prompt_node)
    seen = 0
    while seen < turns - 1:
        assert last.extension in ("bridge", "repair", "retry"), (last.extension, last.fork_check)
        parent = nodes[last.prompt_node]
        while parent is not None and parent.node_id not in by_leaf:
            parent = nodes.get(parent.parent_id) if parent.parent_id else None
        if parent is None:
            break
        last = by_leaf[parent.node_id]
        before = path_ids(nodes, last.output_node)
        assert ids[: len(before)] == before
        seen += 1
    assert seen == turns - 1


async def test_conversations_over_both_wires_extend_exactly(tmp_path, model, engine):
    run = tmp_path / "run"
    proxy = ProxyProcess(run, engine, model, "--port", "0")
    try:
        seen = []
        kinds = list(itertools.product(("anthropic", "openai"), (True, False)))
        await asyncio.gather(*(talk(proxy.url, f"{wire}-{stream}", 3, wire, stream, seen) for wire, stream in kinds))
        assert len(seen) == 12
    finally:
        assert proxy.stop() == 0
    calls = check_run(run)
    assert sorted(seen) == sorted((call.execution_id, call.call_id) for call in calls)
    for wire, stream in kinds:
        check_conversation(run, f"{wire}-{stream}", 3)
    # Now and then random weights sample a tag; what the client then sends back is another form of the same turn.
    assert {call.extension for call in calls} - {"repair"} == {"root", "bridge"}
    assert {str(span.policy_id) for node in nodes_of(run).values() for span in node.policy_versions or ()} == {"tiny"}
    assert list(run.rglob("*.open")) == []  # sealed
    states = {delivery.state for delivery in from_table("deliveries", open_run(run).table("deliveries"))}
    assert states == {"delivered"}


async def test_a_kill_in_mid_recording_loses_nothing_that_was_acknowledged(tmp_path, model, engine):
    run = tmp_path / "run"
    proxy = ProxyProcess(run, engine, model)  # on a port that no connection can take while it is down
    url, seen = proxy.url, []
    # One execution with two sub-agents beside its main agent, and two more executions.
    kinds = {
        "one": ("anthropic", True),
        "one/a/helper": ("anthropic", False),
        "one/a/other": ("openai", True),
        "two": ("openai", False),
        "three": ("openai", True),
    }
    harnesses = [
        asyncio.create_task(talk(url, name, 6, wire, stream, seen, patience=120))
        for name, (wire, stream) in kinds.items()
    ]
    for kill_at in (5, 12):
        while len(seen) < kill_at and not any(task.done() for task in harnesses):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(proxy.kill)
        recorded = {call.call_id for call in calls_of(run)}
        assert {call_id for _, call_id in seen} <= recorded
        proxy = await asyncio.to_thread(ProxyProcess, run, engine, model)
        assert proxy.url == url  # the port of run.json
    try:
        await asyncio.gather(*harnesses)
    finally:
        assert await asyncio.to_thread(proxy.stop) == 0
    calls = {call.call_id: call for call in check_run(run)}
    assert {call_id for _, call_id in seen} <= calls.keys()
    for name in kinds:
        check_conversation(run, name, 6)
    info = json.loads((run / "run.json").read_text())
    assert info["endpoints"] == {"proxy": url, "engines": [engine]}


def test_a_second_proxy_on_the_same_run_is_told_who_has_it(tmp_path, model, engine):
    run = tmp_path / "run"
    proxy = ProxyProcess(run, engine, model, "--port", "0")
    try:
        with pytest.raises(AssertionError, match="is being written by pid"):
            ProxyProcess(run, engine, model)
    finally:
        assert proxy.stop() == 0


def test_tls(tmp_path, model, engine):
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    for index, chain in enumerate(certificate.cert_chain_pems):
        chain.write_to_path(str(tmp_path / "cert.pem"), append=index > 0)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    flags = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    proxy = ProxyProcess(tmp_path / "run", engine, model, *flags, verify=context)
    try:
        assert proxy.url.startswith("https://127.0.0.1:")
        request = {"model": "any", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
        with httpx.Client(verify=context, timeout=120) as http:
            assert http.post(f"{proxy.url}/x/e1/v1/messages", json=request).status_code == 200
            made = http.post(f"{proxy.url}/api/executions", json={"task": "t"}).json()
            assert made["base_url"].startswith("https://")
        with httpx.Client() as stranger, pytest.raises(httpx.ConnectError):
            stranger.get(proxy.url + "/api/status")
    finally:
        assert proxy.stop() == 0
    assert len(check_run(tmp_path / "run")) == 1
