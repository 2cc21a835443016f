"""Unmodified Codex, and pi on the same wire, through the proxy; replies in the ids of the real Qwen3 tokenizer."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_data.schema import AgentRole, BranchReason, Extension
from gyre_data.types import Call
from tests.support.clients import CODEX, PI, Played, client_path, documented, play, run_client
from tests.support.flow import Flow, calling
from tests.support.proxy_server import check_run, nodes_of, path_ids, serve_proxy
from tests.support.qwen3 import qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
COMPACT = "You are performing a CONTEXT CHECKPOINT COMPACTION"


def shell(command: str, text: str = "") -> str:
    return calling("exec_command", text, cmd=command)


async def played(folder: Path, rules: dict[str, Any], prompt: str, start: str | None = None, **env: str) -> Played:
    flow = Flow(qwen3_template(), rules)
    return await play(client_path(CODEX), folder, documented("Codex", start), flow, {"PROMPT": prompt, **env})


def check_exact(run: Path, calls: list[Call]) -> None:
    """Each call extends the one it names exactly, unless it begins a conversation; no fork was caused by an echo."""
    nodes, known = nodes_of(run), {call.call_id: call for call in calls}
    for call in calls:
        assert call.fork_check is None
        assert call.branch_reason in (None, BranchReason.SUB_AGENT, BranchReason.COMPACTION)
        if call.branch_reason is None and call.extension is not Extension.ROOT:
            before = path_ids(nodes, known[call.continues_from].output_node)
            assert np.array_equal(path_ids(nodes, call.prompt_node)[: len(before)], before)


async def test_codex_runs_a_tool_and_its_turn_is_extended(tmp_path: Path) -> None:
    """With WebSockets on: it asks for an upgrade, is answered 426, and goes on over HTTP."""
    rules = {
        "MAIN-TASK": shell("echo SHOWN-$((1 + 1))", "<think>\nLook.\n</think>\n\nI look."),
        "SHOWN-2": "MAIN-DONE",
    }
    start = 'codex exec -c model_providers.gyre.supports_websockets=true --skip-git-repo-check "$PROMPT"'
    made = await played(tmp_path, rules, "MAIN-TASK: begin.", start)
    assert "MAIN-DONE" in made.printed
    first, second = made.calls
    assert (first.agent_role, first.extension, first.wire) == (AgentRole.MAIN, Extension.ROOT, "openai_responses")
    assert (second.agent_role, second.extension, second.continues_from) == ("main", "bridge", first.call_id)
    assert first.role_source == "client"
    check_exact(made.run, made.calls)


async def test_codex_agents_and_compactions_have_their_roles_and_links(tmp_path: Path) -> None:
    def wait(new: str) -> str:
        agent = new.split('"agent_id":"')[1].split('"')[0]
        return calling("multi_agent_v1.wait_agent", targets=[agent], timeout_ms=60000)

    def after_summary(new: str) -> str:
        return "CHILD-DONE" if "CHILD-TASK" in new else shell("echo AGAIN-$((1 + 1))")

    rules = {
        "MAIN-TASK": calling("multi_agent_v1.spawn_agent", message="CHILD-TASK: count the sheep in the barn."),
        "nickname": wait,
        "CHILD-TASK": shell("seq 1 1800; echo COUNTED-$((1 + 1))"),
        "COUNTED-2": shell("true"),  # its usage is over Codex's limit: it compacts before it goes on
        "CHILD-DONE": shell("seq 1 1800; echo LONG-$((1 + 1))"),
        "LONG-2": shell("true"),
        COMPACT: "SUMMED-UP",
        "SUMMED-UP": after_summary,
        "AGAIN-2": "MAIN-DONE",
    }
    made = await played(tmp_path, rules, "MAIN-TASK: begin.", CODEX_WINDOW="14000")
    assert "MAIN-DONE" in made.printed
    by_role: dict[str, list[Call]] = defaultdict(list)
    for call in made.calls:
        by_role[str(call.agent_role)].append(call)
    assert {role: len(calls) for role, calls in by_role.items()} == {
        "main": 6,
        "main_summary": 1,
        "sub_agent": 3,
        "sub_agent_summary": 1,
    }
    check_exact(made.run, made.calls)
    spawning = by_role["main"][0]
    (child,) = {call.agent_id for call in made.calls if call.agent_id is not None}
    for call in (*by_role["sub_agent"], *by_role["sub_agent_summary"]):
        assert (call.agent_id, call.parent_agent_id) == (child, None)
        assert call.spawned_by_node == spawning.output_node
        assert call.spawned_by_tool_call == f"call_{spawning.output_node}_0"
    for agent in ("main", "sub_agent"):
        (summary,) = by_role[f"{agent}_summary"]
        after = next(call for call in by_role[agent] if call.continues_from == summary.call_id)
        assert (summary.branch_reason, after.branch_reason) == (BranchReason.COMPACTION, BranchReason.COMPACTION)
        assert summary.continues_from in {call.call_id for call in by_role[agent]}


async def test_codex_goes_on_after_a_connection_that_breaks(tmp_path: Path) -> None:
    """It keeps the finished items of the broken stream; the sampled turn is extended, without a fork."""
    rules = {
        "MAIN-TASK": shell("echo SHOWN-$((1 + 1))", "<think>\nLook.\n</think>\n\nI look."),
        "SHOWN-2": "<think>\nSeen.\n</think>\n\nMAIN-DONE",
    }
    engine, run = Flow(qwen3_template(), rules), tmp_path / "run"
    path, env = client_path(CODEX), {"GYRE_KEY": "no-secret", "PROMPT": "MAIN-TASK: begin."}
    async with (
        engine.serving(),
        serve_proxy(run, engine, template=qwen3_template()) as served,
        cutting_once(served.url, b"event: response.output_item.done") as url,
    ):
        env |= {"PATH": path, "GYRE_BASE_URL": f"{url}/x/e1"}
        printed = await run_client(documented("Codex"), tmp_path, env)
    assert "MAIN-DONE" in printed
    calls = check_run(run, engine)
    assert len(calls) == len(engine.requests)
    assert [call.agent_role for call in calls] == [AgentRole.MAIN] * len(calls)
    kept = [call for call in calls if call.extension is not Extension.RETRY]
    assert {call.branch_reason for call in kept} == {None}
    assert kept[-1].extension is Extension.BRIDGE


@contextlib.asynccontextmanager
async def cutting_once(target: str, mark: bytes) -> AsyncIterator[str]:
    """A relay to `target` that resets the first connection whose reply holds `mark`, right after that event."""
    host, port = target.removeprefix("http://").split(":")
    cut = False

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, watched: bool) -> None:
        nonlocal cut
        seen = b""
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                seen += data
                at = seen.find(mark)
                end = seen.find(b"\n\n", at) if watched and not cut and at >= 0 else -1
                if end >= 0:
                    cut = True
                    sink.write(data[: len(data) - (len(seen) - end - 2)])
                    await sink.drain()
                    sink.transport.abort()
                    return
                sink.write(data)
                await sink.drain()
        sink.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection(host, int(port))
        down = asyncio.ensure_future(copy(upstream_reader, writer, True))
        up = asyncio.ensure_future(copy(reader, upstream_writer, False))
        await asyncio.wait([down, up], return_when=asyncio.FIRST_COMPLETED)
        for task in (down, up):
            task.cancel()
        for one in (writer, upstream_writer):
            one.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_codex_counts_our_keep_alive(tmp_path: Path) -> None:
    """Its patience is set to 2 s here (300 s by default); the engine says nothing for twice as long."""
    flow = Flow(qwen3_template(), {"MAIN-TASK": "MAIN-DONE"})
    flow.hold(0)

    async def release() -> None:
        await flow.waiting.wait()
        await asyncio.sleep(4)
        flow.release()

    ending = asyncio.create_task(release())
    start = 'codex exec -c model_providers.gyre.stream_idle_timeout_ms=2000 --skip-git-repo-check "$PROMPT"'
    script, env = documented("Codex", start), {"PROMPT": "MAIN-TASK: begin."}
    made = await play(client_path(CODEX), tmp_path, script, flow, env, keep_alive_s=0.3)
    await ending
    assert "MAIN-DONE" in made.printed
    assert len(made.calls) == 1, "nothing was asked twice"


async def test_pi_speaks_this_wire_too(tmp_path: Path) -> None:
    rules = {
        "PI-TASK": calling("bash", "<think>\nLook.\n</think>\n\nI look.", command="echo SHOWN-$((1 + 1))"),
        "SHOWN-2": "PI-DONE",
    }
    flow, env = Flow(qwen3_template(), rules), {"PROMPT": "PI-TASK: begin.", "PI_API": "openai-responses"}
    made = await play(client_path(PI), tmp_path, documented("pi"), flow, env)
    assert "PI-DONE" in made.printed
    first, second = made.calls
    assert {call.wire for call in made.calls} == {"openai_responses"}
    assert (first.extension, second.extension) == (Extension.ROOT, Extension.BRIDGE)
    check_exact(made.run, made.calls)
