"""Observe mode over real sockets: what passes is byte for byte what would pass without it, and it is recorded."""

import asyncio
import gzip
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zstandard

from gyre_data.errors import CaptureError
from gyre_data.listing import list_executions
from gyre_data.run_stats import stats
from gyre_data.show.outline import outline
from gyre_data.show.stats_text import stats_lines
from gyre_data.show.tree_text import tree_lines
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_proxy.observe.settings import Upstreams
from tests.support.observing import Got, checked_calls, messages_on, raw_call, serve_observer
from tests.support.provider import (
    Answer,
    Provider,
    Sent,
    anthropic_stream,
    chat_stream,
    json_answer,
    responses_stream,
    sse,
    sse_answer,
)

KEY = "sk-ant-api03-0123456789abcdef"
JSON = [("Content-Type", "application/json")]
ANTHROPIC = [*JSON, ("X-Api-Key", KEY), ("Anthropic-Version", "2023-06-01"), ("Accept-Encoding", "gzip, br")]
OPENAI = [*JSON, ("Authorization", f"Bearer {KEY}"), ("Cookie", "session=0123456789abcdef")]
TEXT = {"type": "text", "text": "Checking bay 12."}
CALL = {"type": "tool_use", "id": "toolu_a", "name": "stat_bay", "input": {"bay": 12}}
RECORDED = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
HI = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def packed(body: bytes, encoding: str | None) -> bytes:
    return {None: lambda b: b, "gzip": gzip.compress, "zstd": zstandard.compress}[encoding](body)


def same_but_host(sent: Sent) -> tuple[Any, ...]:
    named = [(name.lower(), value) for name, value in sent.headers if name.lower() != "host"]
    return sent.method, sent.target, sorted(named), sent.body


def same_but_hop(got: Got) -> tuple[Any, ...]:
    # The value of a request id is the reply's own: two replies never share one.
    headers = [(name, "" if name.endswith("request-id") else value) for name, value in got.headers]
    return got.status, sorted(headers), got.body, got.whole


CASES: list[tuple[str, str, list[tuple[str, str]], Any, str | None, Answer]] = [
    ("POST", "/v1/messages?beta=true", ANTHROPIC, HI, None, sse_answer(sse(*anthropic_stream(TEXT, CALL)))),
    ("POST", "/v1/messages", ANTHROPIC, HI, "gzip", sse_answer(sse(*anthropic_stream(TEXT)), encoding="gzip")),
    ("POST", "/v1/messages", ANTHROPIC, HI, None, json_answer({"type": "message", "content": [TEXT]}, encoding="gzip")),
    ("POST", "/v1/messages/count_tokens", ANTHROPIC, HI, None, json_answer({"input_tokens": 3})),
    ("POST", "/v1/chat/completions", OPENAI, HI, "zstd", sse_answer(sse(*chat_stream("Hello")))),
    ("POST", "/v1/responses", OPENAI, {"input": "hi"}, "zstd", sse_answer(sse(*responses_stream()))),
    ("POST", "/v1/responses", OPENAI, {"input": "hi"}, None, json_answer({"output": []}, encoding="zstd")),
    ("POST", "/v1/messages", ANTHROPIC, HI, None, json_answer({"error": {"type": "overloaded_error"}}, 529)),
    ("GET", "/v1/models?limit=1000&a=%2Fb%20c", ANTHROPIC, None, None, json_answer({"data": []})),
    ("HEAD", "/api/hello", ANTHROPIC, None, None, json_answer({"ok": True})),
    ("GET", "/anything/%2e%2e/else//x?q=a+b&q=", OPENAI, None, None, Answer(status=204)),
    ("DELETE", "/v1/files/f", OPENAI, None, None, json_answer(b"not json \xff", 404)),
    ("POST", "/v1/files", OPENAI, "\x00\x01binary", None, Answer(status=302, headers=(("Location", "https://x/y"),))),
]


@pytest.mark.parametrize(("method", "target", "headers", "body", "encoding", "answer"), CASES)
async def test_both_ways_are_byte_for_byte_as_without_a_proxy(
    tmp_path: Path,
    method: str,
    target: str,
    headers: list[tuple[str, str]],
    body: Any,
    encoding: str | None,
    answer: Answer,
) -> None:
    plain = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    data = packed(plain, encoding)
    headers = [*headers, *([("Content-Encoding", encoding)] if encoding else [])]
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        for chunked in (False, True) if data else (False,):
            direct = await raw_call(provider.url, method, target, headers, data, chunked=chunked)
            through = await raw_call(proxy.base(), method, target, headers, data, chunked=chunked)
            one, two = provider.sent[-2:]
            assert same_but_host(one) == same_but_host(two)
            assert same_but_hop(direct) == same_but_hop(through)
            assert two.header("host") == provider.url.removeprefix("http://")
    recorded = method == "POST" and target.partition("?")[0] in (
        "/v1/messages",
        "/v1/chat/completions",
        "/v1/responses",
    )
    calls = checked_calls(tmp_path / "run")
    assert len(calls) == (2 if recorded else 0)
    if recorded:
        blobs = open_run(tmp_path / "run")
        exact = b"".join(blobs.blob(blob) for blob in calls[0].request_blobs or ())
        assert exact == json.dumps(body).encode()


async def test_a_stream_passes_as_it_comes(tmp_path: Path) -> None:
    answer = sse_answer(sse(*anthropic_stream(TEXT)), hold=True)
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        call = asyncio.create_task(raw_call(proxy.base(), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode()))
        async with asyncio.timeout(60):
            while not proxy.observer.in_flight or len(next(iter(proxy.observer.in_flight)).reply.kept) < 200:
                await asyncio.sleep(0.01)
        assert not call.done()
        provider.release()
        assert (await call).whole


async def test_upstreams_are_told_apart_by_path_and_headers(tmp_path: Path) -> None:
    login = [*JSON, ("authorization", "Bearer x"), ("ChatGPT-Account-Id", "acc-12345678")]
    asked = [
        ("/v1/messages", JSON, b"{}"),
        ("/v1/models", ANTHROPIC, b""),
        ("/v1/models", OPENAI, b""),
        ("/v1/chat/completions", ANTHROPIC, b"{}"),
        ("/v1/responses", login, b"{}"),
        ("/v1/models?client_version=1", login, b""),
    ]
    async with AsyncExitStack() as stack:
        anthropic = await stack.enter_async_context(Provider(lambda sent: json_answer({})).serving())
        openai = await stack.enter_async_context(Provider(lambda sent: json_answer({})).serving())
        chosen = Upstreams(anthropic=anthropic.url, openai=openai.url, chatgpt=f"{openai.url}/backend-api/codex")
        proxy = await stack.enter_async_context(serve_observer(tmp_path / "run", anthropic, upstreams=chosen))
        for target, headers, body in asked:
            await raw_call(proxy.base(), "POST" if body else "GET", target, headers, body)
    assert [sent.target for sent in anthropic.sent] == ["/v1/messages", "/v1/models"]
    assert [sent.target for sent in openai.sent] == [
        "/v1/models",
        "/v1/chat/completions",
        "/backend-api/codex/responses",
        "/backend-api/codex/models?client_version=1",
    ]


ECHO: dict[str, Callable[[], tuple[str, list[tuple[str, str]], list[Any], list[Answer]]]] = {}


def scenario(name: str) -> Callable[[Any], Any]:
    def keep(make: Any) -> Any:
        ECHO[name] = make
        return make

    return keep


@scenario("anthropic")
def _anthropic() -> tuple[str, list[tuple[str, str]], list[Any], list[Answer]]:
    thought = {"type": "thinking", "thinking": "Let me look.", "signature": "c2ln"}
    first = {"model": "m", "system": "Be brief.", "tools": [{"name": "stat_bay", "input_schema": {}}]}
    first |= {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}]}], "stream": True}
    result = {"type": "tool_result", "tool_use_id": "toolu_a", "content": "fine"}
    searched = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
    marked = {**CALL, "cache_control": {"type": "ephemeral"}}
    turn = {"role": "assistant", "content": [thought, searched, TEXT, marked]}
    second = {**first, "messages": [*first["messages"], turn, {"role": "user", "content": [result]}]}
    answers = [sse_answer(sse(*anthropic_stream(thought, searched, TEXT, CALL)))]
    return "/v1/messages", ANTHROPIC, [first, second], [*answers, sse_answer(sse(*anthropic_stream(TEXT)))]


@scenario("chat")
def _chat() -> tuple[str, list[tuple[str, str]], list[Any], list[Answer]]:
    first = {
        "model": "m",
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "look"}],
    }
    call = {"id": "call_a", "type": "function", "function": {"name": "stat_bay", "arguments": '{"bay":12}'}}
    turn = {"role": "assistant", "content": "Checking.", "tool_calls": [call]}
    answered = {"role": "tool", "tool_call_id": "call_a", "content": "fine"}
    second = {**first, "messages": [*first["messages"], turn, answered]}
    answers = [sse_answer(sse(*chat_stream("Checking.", ("call_a", "stat_bay", '{"bay": 12}'))))]
    whole = {"model": "gpt-4o-2024-11-20", "choices": [{"message": {"content": "Fine."}, "finish_reason": "stop"}]}
    whole["usage"] = {"prompt_tokens": 50, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 40}}
    return "/v1/chat/completions", OPENAI, [first, second], [*answers, json_answer(whole, encoding="gzip")]


@scenario("responses")
def _responses() -> tuple[str, list[tuple[str, str]], list[Any], list[Answer]]:
    think = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    think["encrypted_content"] = "sealed"
    say = {
        "type": "message",
        "id": "m_1",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Checking."}],
    }
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_a", "name": "stat_bay", "arguments": '{"bay":12}'}
    first = {"model": "m", "instructions": "Be brief.", "input": [{"role": "user", "content": "look"}], "stream": True}
    answered = {"type": "function_call_output", "call_id": "call_a", "output": "fine"}
    echoed = [{k: v for k, v in item.items() if k != "id"} for item in (think, say, call)]
    second = {**first, "input": [*first["input"], *echoed, answered]}
    done = {"type": "message", "id": "m_2", "role": "assistant", "content": [{"type": "output_text", "text": "Fine."}]}
    return (
        "/v1/responses",
        OPENAI,
        [first, second],
        [sse_answer(sse(*responses_stream(think, say, call))), sse_answer(sse(*responses_stream(done)))],
    )


@pytest.mark.parametrize("name", ["anthropic", "chat", "responses"])
@pytest.mark.parametrize("restart", [False, True], ids=["", "restart"])
async def test_a_conversation_becomes_a_tree(tmp_path: Path, name: str, restart: bool) -> None:
    target, headers, bodies, answers = ECHO[name]()
    queue = iter(answers)
    async with Provider(lambda sent: next(queue)).serving() as provider:
        if restart:
            async with serve_observer(tmp_path / "run", provider) as proxy:
                await raw_call(proxy.base(), "POST", target, headers, json.dumps(bodies[0]).encode())
            bodies = bodies[1:]
        async with serve_observer(tmp_path / "run", provider) as proxy:
            for body in bodies:
                got = await raw_call(proxy.base(), "POST", target, headers, json.dumps(body).encode())
                assert got.whole
    first, second = checked_calls(tmp_path / "run")
    assert [first.extension, second.extension] == ["root", "bridge"]
    assert [first.status, second.status] == ["ok", "ok"]
    assert [first.agent_role, second.agent_role] == ["main", "main"]
    roles = [message["role"] for message in messages_on(tmp_path / "run", "e1", second)]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    said = messages_on(tmp_path / "run", "e1", first)[-1]
    assert said["content"].startswith("Checking")
    assert said["tool_calls"][0]["name"] == "stat_bay"
    assert said["tool_calls"][0]["arguments"] == {"bay": 12}
    assert ("reasoning" in said) == (name != "chat")
    used = open_run(tmp_path / "run")
    tree = used["e1"].tree
    assert tree.counted_N.all()
    assert set(tree.author_N) == {"client", "provider"}
    assert first.prompt_tokens
    assert first.output_tokens
    assert second.prompt_tokens > first.prompt_tokens + first.output_tokens
    usage = json.loads(second.provider_usage or "")
    assert usage
    assert second.served_model
    assert second.provider_request_id.startswith("req_")
    assert (second.upstream, second.http_status) == (provider.url, 200)
    assert second.response_blobs is None
    assert second.note is None


async def test_what_was_observed_is_shown_with_its_model_usage_and_price(tmp_path: Path) -> None:
    target, headers, bodies, answers = ECHO["anthropic"]()
    queue = iter(answers)
    async with (
        Provider(lambda sent: next(queue)).serving() as provider,
        serve_observer(tmp_path / "run", provider) as proxy,
    ):
        for body in bodies:
            await raw_call(proxy.base(), "POST", target, headers, json.dumps(body).encode())
    run = open_run(tmp_path / "run")
    found = stats(run)
    told = "\n".join(str(line) for line in stats_lines(found, where="RUN", width=200))
    assert "hosted      in 18  cache read 200  write 40  out 14  ~ $0.00079 list price (20" in told
    assert "(local count)" in told
    assert found.trees.sampled_tokens > 0
    assert (found.trees.trainable_tokens, dict(found.trees.not_trained)) == (0, {"hosted": 2})
    tree = "\n".join(str(line) for line in tree_lines(outline(run["e1"]), short="e1", where="RUN"))
    assert "model claude-opus-4-5-20251101" in tree
    assert "2 sampled by a hosted API" in tree
    (listed,) = list_executions(run)
    assert listed.cost == pytest.approx(found.hosted.cost if found.hosted else None)
    assert listed.num_sampled_tokens == found.trees.sampled_tokens


async def test_nothing_of_a_credential_reaches_the_disk(tmp_path: Path) -> None:
    echo = {"type": "error", "error": {"type": "authentication_error", "message": f"bad key {KEY}"}}
    answers = iter(
        [json_answer(echo, 401), sse_answer(sse(*anthropic_stream({"type": "text", "text": f"it is {KEY}"})))]
    )
    cookie, account = "sess-abcdefgh12345", "acct-abcdefgh12345"
    headers = [
        *ANTHROPIC,
        ("Cookie", f"a=b; s={cookie}"),
        ("chatgpt-account-id-x", account),
        ("X-Claude-Code-Token", KEY),
    ]
    body = {**HI, "messages": [{"role": "user", "content": f"echo $KEY -> {KEY}"}]}
    async with (
        Provider(lambda sent: next(answers)).serving() as provider,
        serve_observer(tmp_path / "run", provider) as proxy,
    ):
        for _ in range(2):
            got = await raw_call(
                proxy.base(), "POST", f"/v1/messages?api_key={KEY}", headers, json.dumps(body).encode()
            )
            assert got.whole
    assert all(dict(sent.headers)["x-api-key"] == KEY and KEY.encode() in sent.body for sent in provider.sent)
    failed, _ = calls = checked_calls(tmp_path / "run")
    assert (failed.status, failed.http_status) == ("failed", 401)
    assert "upstream 401: authentication_error: bad key [credential]" in (failed.error or "")
    assert all("credential" in (call.note or "") for call in calls)
    run = open_run(tmp_path / "run")
    every = b"".join(run.blob(blob) for blob in run.table("blobs").column("blob_id").to_pylist())
    every += b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert b"it is [credential]" in every
    for secret in (KEY, cookie, account):
        assert secret.encode() not in every
    assert b"[credential]" in every


@pytest.mark.parametrize("where", ["begin", "middle"])
async def test_an_upstream_that_dies_breaks_the_connection_at_the_same_place(tmp_path: Path, where: str) -> None:
    pieces = sse(*anthropic_stream(TEXT, CALL))
    answer = sse_answer(pieces[: 5 if where == "middle" else 0], dies=True)
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        got = await raw_call(proxy.base(), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode())
        direct = await raw_call(provider.url, "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode())
    assert same_but_hop(got) == same_but_hop(direct)
    assert not got.whole
    (call,) = checked_calls(tmp_path / "run")
    assert call.status == "failed"
    assert "RemoteProtocolError" in (call.error or "")
    if where == "middle":
        assert messages_on(tmp_path / "run", "e1", call)[-1]["content"].startswith("Check")


async def test_an_upstream_that_is_not_there_is_said_in_the_wires_shape(tmp_path: Path) -> None:
    async with Provider(lambda sent: json_answer({})).serving() as provider:
        pass
    async with serve_observer(tmp_path / "run", provider) as proxy:
        got = await raw_call(proxy.base(), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode())
    assert got.status == 502
    assert json.loads(got.body)["error"]["message"].startswith(f"gyre: wanted {provider.url}, got ConnectError")
    (call,) = checked_calls(tmp_path / "run")
    assert (call.status, call.http_status) == ("failed", None)


async def test_a_client_that_leaves_ends_the_upstreams_work(tmp_path: Path) -> None:
    answer = sse_answer(sse(*anthropic_stream(TEXT)), hold=True)
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        call = asyncio.create_task(raw_call(proxy.base(), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode()))
        async with asyncio.timeout(60):
            while not proxy.observer.in_flight or not next(iter(proxy.observer.in_flight)).reply.kept:
                await asyncio.sleep(0.01)
            call.cancel()
            while proxy.observer.in_flight or not provider.gone:
                await asyncio.sleep(0.01)
    (row,) = checked_calls(tmp_path / "run")
    assert (row.status, row.error) == ("aborted", "the client went away before the reply was complete")


@pytest.mark.parametrize(
    ("target", "body", "answer", "note"),
    [
        ("/v1/messages", b"not json", json_answer({"content": [TEXT]}), "the request is kept as it came"),
        ("/v1/messages", b'{"messages": 3}', json_answer({"content": [TEXT]}), "the request is kept as it came"),
        ("/v1/messages", b'{"messages": []}', json_answer({"content": [TEXT]}), None),
        ("/v1/chat/completions", json.dumps(HI).encode(), json_answer(b"<html>"), "the reply is kept as it came"),
        ("/v1/chat/completions", json.dumps(HI).encode(), json_answer([1, 2]), "the reply is kept as it came"),
        (
            "/v1/responses",
            b'{"input": [1, {"type": "new_item", "x": 1}]}',
            json_answer({"output": 3}),
            "kept as it came",
        ),
        ("/v1/messages", json.dumps(HI).encode(), sse_answer((b"data: {oops\n\n", b"data: [DONE]\n\n")), "no JSON"),
        ("/v1/messages", json.dumps(HI).encode(), json_answer({"kind": "new"}), None),
    ],
)
async def test_what_cannot_be_read_passes_and_is_kept_raw(
    tmp_path: Path, target: str, body: bytes, answer: Answer, note: str | None
) -> None:
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        got = await raw_call(proxy.base(), "POST", target, ANTHROPIC, body)
    assert got.whole
    assert got.body == b"".join(answer.pieces)
    (call,) = checked_calls(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert b"".join(run.blob(blob) for blob in call.request_blobs or ()) == body
    if note is not None:
        assert note in (call.note or "")
    if "reply" in (note or "") or "no JSON" in (note or ""):
        assert b"".join(run.blob(blob) for blob in call.response_blobs or ()) == got.body


async def test_a_call_without_a_place_in_the_tree_is_recorded_all_the_same(tmp_path: Path) -> None:
    answer = json_answer({"content": [TEXT], "stop_reason": {"new": "form"}})
    odd, body = [*ANTHROPIC, ("X-Gyre-Role", "captain")], json.dumps(HI).encode()
    async with Provider(lambda sent: answer).serving() as provider, serve_observer(tmp_path / "run", provider) as proxy:
        for headers in (odd, ANTHROPIC):
            assert (await raw_call(proxy.base(), "POST", "/v1/messages", headers, body)).whole
    first, second = checked_calls(tmp_path / "run")
    assert "no place in the tree: X-Gyre-Role: wanted one of" in (first.note or "")
    assert (first.prompt_node, second.extension, second.status) == (None, "root", "ok")
    run = open_run(tmp_path / "run")
    assert b"".join(run.blob(blob) for blob in first.response_blobs or ()) == b"".join(answer.pieces)


async def test_a_websocket_upgrade_is_refused_so_that_codex_falls_back(tmp_path: Path) -> None:
    upgrade = [("Connection", "Upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "AAAA")]
    async with (
        Provider(lambda sent: json_answer({})).serving() as provider,
        serve_observer(tmp_path / "run", provider) as proxy,
    ):
        got = await raw_call(proxy.base(), "GET", "/v1/responses", upgrade)
    assert got.status == 426
    assert provider.sent == []


async def test_a_wrong_address_is_answered_with_the_right_one(tmp_path: Path) -> None:
    async with (
        Provider(lambda sent: json_answer({})).serving() as provider,
        serve_observer(tmp_path / "run", provider) as proxy,
    ):
        got = await raw_call(proxy.url, "POST", "/x/e1/v1/v1/messages", ANTHROPIC, b"{}")
        lost = await raw_call(proxy.url, "POST", "/v1/messages", ANTHROPIC, b"{}")
    assert [got.status, lost.status] == [404, 404]
    assert b"use .../x/e1" in got.body
    assert b"names the execution" in lost.body


async def test_with_a_key_only_known_executions_pass(tmp_path: Path) -> None:
    async with (
        Provider(lambda sent: json_answer({"content": [TEXT]})).serving() as provider,
        serve_observer(tmp_path / "run", provider, key="master-key") as proxy,
    ):
        refused = await raw_call(proxy.base("stranger"), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode())
        made = await raw_call(
            proxy.url, "POST", "/api/executions", [("Authorization", "Bearer master-key")], b'{"id": "known"}'
        )
        passed = await raw_call(proxy.base("known"), "POST", "/v1/messages", ANTHROPIC, json.dumps(HI).encode())
    assert [refused.status, made.status, passed.status] == [401, 200, 200]
    assert len(provider.sent) == 1


class FullDisk:
    """A run's writer whose disk is full while `full` is set."""

    def __init__(self, run: Path) -> None:
        self.writer, self.full = RunWriter(run), False

    def write(self, rows: Any) -> None:
        if self.full:
            raise CaptureError("no space") from OSError(28, "No space left on device")
        self.writer.write(rows)

    def put_blob(self, data: bytes) -> str:
        return self.writer.put_blob(data)

    def close(self) -> None:
        self.writer.close()


async def test_a_full_disk_breaks_no_reply_loses_no_call_and_lets_no_further_one_by(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, headers, bodies, answers = ECHO["anthropic"]()
    queue, disk = iter(answers), FullDisk(tmp_path / "run")
    async with (
        Provider(lambda sent: next(queue)).serving() as provider,
        serve_observer(tmp_path / "run", provider, writer=disk) as proxy,
    ):
        await raw_call(proxy.url, "POST", "/api/executions", [], b'{"id": "e1"}')
        disk.full = True
        paid = await raw_call(proxy.base(), "POST", target, headers, json.dumps(bodies[0]).encode())
        refused = await raw_call(proxy.base(), "POST", target, headers, json.dumps(bodies[1]).encode())
        status = proxy.observer.status()
        disk.full = False
        after = await raw_call(proxy.base(), "POST", target, headers, json.dumps(bodies[1]).encode())
    assert (paid.status, paid.whole, refused.status, after.status) == (200, True, 529, 200)
    assert b"free the disk and try again (1 calls wait to be written)" in refused.body
    assert status["unwritten"] == 1
    assert "could not be recorded" in caplog.text
    assert len(provider.sent) == 2
    assert [call.extension for call in checked_calls(tmp_path / "run")] == ["root", "bridge"]
