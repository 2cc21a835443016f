"""What a hostile or broken client can do: nothing to others, nothing to the tree, and it is told so."""

import asyncio
import gzip
import json
import re

import httpx
import pytest

from gyre_data.errors import ConfigError
from gyre_proxy.limits import Bounds
from gyre_proxy.settings import ProxySettings
from tests.support.proxy_server import calls_of, check_run, nodes_of, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
WIRES = {"/x/e1/v1/messages": "anthropic", "/x/e1/v1/chat/completions": "openai"}


def error_of(path, answer):
    """The error's message, after a look at the shape that the wire's clients read."""
    body = answer.json()
    if WIRES[path] == "anthropic":
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]["message"]


async def raw(url, data, pause=None):
    """What comes back for bytes that no client library would send."""
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    try:
        for piece in data:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 60)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("path", WIRES)
async def test_a_body_that_is_too_large_or_stops_coming(tmp_path, path):
    engine, bounds = ScriptedEngine([OTHER]), Bounds(body_bytes=1000, body_s=1.0)
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, bounds=bounds) as served, served.http() as http:
        answer = await http.post(path, json={**REQUEST, "metadata": {"x": "y" * 2000}})
        assert answer.status_code == 413
        assert "at most 1000 bytes" in error_of(path, answer)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n".encode()
        assert b" 408 " in (await raw(served.url, [head + b"{"])).split(b"\r\n")[0]
        assert (await http.post("/api/executions", content=b"x" * (5 << 20))).status_code == 413
        assert served.proxy.executions.get("e1") is None
    assert (engine.requests, calls_of(tmp_path / "run")) == ([], [])


@pytest.mark.parametrize("path", WIRES)
async def test_a_compressed_body_is_refused_and_told_so(tmp_path, path):
    engine, body = ScriptedEngine([OTHER]), gzip.compress(json.dumps(REQUEST).encode())
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        answer = await http.post(path, content=body, headers={"content-encoding": "gzip"})
        assert answer.status_code == 400
        assert "content-encoding gzip; turn the compression of requests off" in error_of(path, answer)
    assert calls_of(tmp_path / "run") == []


async def test_a_head_that_is_too_large_too_slow_or_never_ends(tmp_path):
    engine, bounds = ScriptedEngine([OTHER]), Bounds(head_bytes=2000, head_s=3.0)
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, bounds=bounds) as served, served.http() as http:
        start = b"POST /x/e1/v1/messages HTTP/1.1\r\nhost: localhost\r\n"
        whole = start + b"x-big: " + b"a" * 3000 + b"\r\ncontent-length: 2\r\n\r\n{}"
        assert b" 431 " in (await raw(served.url, [whole])).split(b"\r\n")[0]
        endless = [start, *[b"x-a: " + b"b" * 500 + b"\r\n"] * 4]  # no end of the head in sight
        assert b" 431 " in (await raw(served.url, endless, pause=0.01)).split(b"\r\n")[0]
        for slow in await asyncio.gather(raw(served.url, [start]), raw(served.url, [b""])):
            assert b" 408 " in slow.split(b"\r\n")[0]
        assert (await http.post("/x/e1/v1/messages", json=REQUEST)).status_code == 200  # others go on
    assert len(check_run(tmp_path / "run", engine)) == 1


async def test_a_body_behind_an_upgrade_is_refused_and_not_waited_for(tmp_path):
    engine = ScriptedEngine([OTHER])
    head = b"POST /x/e1/v1/messages HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n"
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served:
        answer = await raw(served.url, [head + b"content-length: 2\r\n\r\n{}"])
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"turn HTTP/2 (h2c) off" in answer
    assert calls_of(tmp_path / "run") == []


@pytest.mark.parametrize("path", WIRES)
async def test_calls_in_flight_are_bounded(tmp_path, path):
    engine, bounds = ScriptedEngine([OTHER]), Bounds(calls=2, calls_per_execution=1)
    engine.hold()
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, bounds=bounds) as served, served.http() as http:
        first = asyncio.create_task(http.post(path, json=REQUEST))
        await engine.waiting.wait()
        other = {**REQUEST, "messages": [{"role": "user", "content": "other"}]}
        answer = await http.post(path, json=other)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert "execution e1" in error_of(path, answer)
        second = asyncio.create_task(http.post(path.replace("e1", "e2"), json=REQUEST))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        answer = await http.post(path.replace("e1", "e3"), json=REQUEST)
        assert answer.status_code in (503, 529)
        assert "2 calls are in flight" in error_of(path, answer)
        engine.release()
        assert [(await task).status_code for task in (first, second)] == [200, 200]
    assert len(check_run(tmp_path / "run", engine)) == 2


async def test_a_call_that_is_sampled_for_too_long_is_cut_and_recorded(tmp_path):
    engine, bounds = ScriptedEngine([{**OTHER, "deltas": OTHER["deltas"] * 2}]), Bounds(call_s=3.0)
    engine.hold(1)
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, bounds=bounds) as served, served.http() as http:
        answer = await http.post("/x/e1/v1/messages", json=REQUEST)
        assert "the longest that a call may take" in error_of("/x/e1/v1/messages", answer)
    (call,) = check_run(tmp_path / "run", engine)
    assert (call.status, call.output_tokens) == ("aborted", 3)


@pytest.mark.parametrize("path", WIRES)
async def test_numbers_and_nesting_beyond_reason_are_refused(tmp_path, path):
    engine = ScriptedEngine([OTHER])
    body = json.dumps(REQUEST)
    deep = "[" * 200_000 + "]" * 200_000
    bodies = [
        body.replace("64", "9" * 400),
        body.replace("64", "1e400"),
        body.replace("64", "-1"),
        body.replace("64", "NaN"),
        body.replace('"hello"', deep),
        body[:-1] + f', "metadata": {deep}}}',
        body[:-1]
        + f', "tools": [{{"name": "t", "input_schema": {"{" + chr(34) + "a" + chr(34) + ":" + deep + "}"}}}]}}',
        '{"model": "\\ud800"}',
        "\x00",
    ]
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        for sent in bodies:
            answer = await http.post(path, content=sent.encode("utf-8", "surrogatepass"))
            assert answer.status_code == 400, (sent[:90], answer.text[:300])
            assert error_of(path, answer)
        assert (await http.post(path, json=REQUEST)).status_code == 200
    assert len(check_run(tmp_path / "run", engine)) == 1


async def test_names_cannot_leave_the_run_folder(tmp_path):
    engine = ScriptedEngine([OTHER])
    (tmp_path / "secret.json").write_text("{}")
    paths = [
        "../secret",
        "%2e%2e/%2e%2e/secret",
        "..%2fsecret",
        "a%00b",
        "a%0d%0ab",
        "~root",
        "." * 3,
        "x" * 200,
        "%F0%9F",
    ]
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        for name in paths:
            request = f"POST /x/{name}/v1/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{{}}"
            assert re.match(rb"HTTP/1.1 (404|400) ", await raw_answer(served.url, request)), name
            request = f"GET /api/segments/manifest/{name} HTTP/1.1\r\nhost: localhost\r\n\r\n"
            assert re.match(rb"HTTP/1.1 (404|400) ", await raw_answer(served.url, request)), name
        for name in ("..", "../x", "a/b", "/etc", ""):
            answer = await http.post("/api/executions", json={"id": name})
            assert answer.status_code == (400 if name else 200)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "secret.json"}


async def raw_answer(url, request):
    return await raw(url, [request.replace("host: localhost", "host: localhost\r\nconnection: close").encode()])


async def test_headers_that_are_not_known_to_be_harmless_are_not_stored(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    secret = {
        name: f"hush-{index}"
        for index, name in enumerate(
            ("x-api-key", "authorization", "cookie", "x-codex-token", "x-claude-code-auth", "x-amz-security", "via")
        )
    }
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        answer = await http.post(
            "/x/e1/v1/messages?beta=true&api_key=hush-query", json=REQUEST, headers={**secret, "user-agent": "me/1"}
        )
        assert answer.status_code == 200
    (call,) = check_run(run, engine)
    assert call.client == "me/1"
    assert call.request_path == "/v1/messages?beta=true"
    stored = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert b"hush-" not in stored


async def test_concurrent_executions_share_nothing(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await asyncio.gather(*(http.post(f"/x/e{n}/v1/messages", json=REQUEST) for n in range(4)))
    nodes = nodes_of(run)
    for call in check_run(run, engine):
        assert nodes[call.prompt_node].execution_id == call.execution_id
        assert nodes[call.output_node].root_id.startswith("n_")
    assert len({node.root_id for node in nodes.values()}) == 4


def test_tls_flags_that_do_not_fit_are_refused(tmp_path):
    options = {"run": tmp_path, "engines": ("http://e",), "tokenizer": tmp_path}
    (tmp_path / "a.pem").write_text("")
    with pytest.raises(ConfigError, match="give both PEM files"):
        ProxySettings(tls_cert=tmp_path / "a.pem", **options)
    with pytest.raises(ConfigError, match="is not a file"):
        ProxySettings(tls_cert=tmp_path / "a.pem", tls_key=tmp_path / "b.pem", **options)
    with pytest.raises(ConfigError, match="above 0"):
        Bounds(calls=0)
