"""Engine processes that are stopped and killed under a reply: real signals, real tokens, real log-probs."""

import asyncio
import json
import os
import signal

import pytest

from tests.contract.engine_contract import assert_logprobs
from tests.support.engines import embedded_engine
from tests.support.proxy_server import check_run, nodes_of, path_ids, serve_proxy
from tests.support.stop_prone import stop_prone

pytestmark = pytest.mark.real

NUM = 200
REQUEST = {"model": "any", "max_tokens": NUM, "messages": [{"role": "user", "content": "Go on."}], "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return stop_prone(tmp_path_factory.mktemp("model"), probability=1e-9)


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def under_way(served, execution):
    """A reply that has some tokens, and a task that reads it to its end."""

    async def read():
        async with served.http() as http:
            return (await http.post(f"/x/{execution}/v1/messages", content=json.dumps(REQUEST), timeout=120)).text

    task = asyncio.create_task(read())
    await until(lambda: any(g.sampler.num_tokens > 20 for g in served.proxy._going))
    (generation,) = served.proxy._going
    return task, generation


def states(served):
    return {engine.url: engine.state for engine in served.proxy.router.engines}


async def test_engines_that_are_stopped_and_killed_under_a_reply(tmp_path, model):
    run, flags = tmp_path / "run", ("--weight-version", "tiny:0")
    with embedded_engine(model, *flags) as one, embedded_engine(model, *flags) as two:
        async with serve_proxy(run, one, tokenizer=model, poll_s=0.1, probe_s=0.5, keep_alive_s=0.2) as served:
            # The only engine stops: the reply waits for it, and goes on where it was.
            reply, generation = await under_way(served, "waits")
            os.killpg(one.pid, signal.SIGSTOP)
            await until(lambda: states(served)[one.url] == "down")
            waited = generation.sampler.num_tokens
            await asyncio.sleep(0.5)
            assert generation.sampler.num_tokens == waited < NUM
            os.killpg(one.pid, signal.SIGCONT)
            text = await reply
            assert "message_stop" in text
            assert text.count('"stop_reason":null') >= 2
            # Another is there: the reply moves to it.
            await served.proxy.add_engine(two.url)
            served.proxy.router.drain(two.url)
            reply, _ = await under_way(served, "moves")
            await served.proxy.add_engine(two.url)
            os.killpg(one.pid, signal.SIGSTOP)
            assert "message_stop" in await reply
            os.killpg(one.pid, signal.SIGCONT)
            await until(lambda: set(states(served).values()) == {"up"})
            # The one that serves is killed.
            served.proxy.router.drain(one.url)
            reply, _ = await under_way(served, "killed")
            await served.proxy.add_engine(one.url)
            os.killpg(two.pid, signal.SIGKILL)
            assert "message_stop" in await reply
    calls, nodes = {call.execution_id: call for call in check_run(run)}, nodes_of(run)
    spans = {name: [a.engine for a in call.attempts if a.end > a.start] for name, call in calls.items()}
    assert spans == {"waits": [one.url], "moves": [one.url, two.url], "killed": [two.url, one.url]}
    for call in calls.values():
        output = nodes[call.output_node]
        assert call.output_tokens == NUM
        assert_logprobs(model, path_ids(nodes, call.prompt_node), output.token_ids.tolist(), output.logprobs.tolist())
