"""Requests that are refused, probes that are answered: nothing of either reaches the tree."""

import asyncio
import json

import anthropic
import httpx
import openai
import pytest

from gyre_data.errors import ConfigError
from gyre_data.store import open as open_run
from gyre_proxy.settings import ProxySettings
from tests.support.proxy_server import calls_of, check_run, serve_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.toy_template import ToyTemplate

OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}


async def test_wrong_addresses_name_the_right_ones(tmp_path):
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        answer = await http.post("/x/e1/v1/v1/messages", json=REQUEST)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith("this client adds it; use .../x/e1")
        assert "error" in (await http.post("/x/e1/v1/v1/chat/completions", json=REQUEST)).json()
        assert "names the execution" in (await http.post("/v1/messages", json=REQUEST)).text
        assert "this proxy serves POST /x/e1/v1/messages" in (await http.get("/x/e1/v1/messages")).text
        assert (await http.post("/x/e1/v1/embeddings", json={})).status_code == 404
        assert (await http.head("/x/e1/api/hello")).status_code == 200
        models = (await http.get("/x/e1/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["gyre-policy"]
        assert [model.id async for model in served.openai().models.list()] == ["gyre-policy"]
        assert [model.id async for model in served.anthropic().models.list()] == ["gyre-policy"]
    assert (engine.requests, calls_of(tmp_path / "run")) == ([], [])


async def test_a_prompt_beyond_the_window_gets_the_wires_own_words(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    engine.context_length = 40
    long = {**REQUEST, "messages": [{"role": "user", "content": "hello " * 40}]}
    async with engine.serving(), serve_proxy(run, engine) as served:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 2.. tokens > 39 maximum"):
            async with served.anthropic() as client, client.messages.stream(**long):
                pass
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai().chat.completions.create(**long)
        assert caught.value.code == "context_length_exceeded"
        await served.anthropic().messages.create(**REQUEST)
    (call,) = check_run(run, engine)
    assert (call.extension, call.max_tokens) == ("root", 40 - call.prompt_tokens)
    assert len(open_run(run).table("nodes")) == len({*map(str, open_run(run).table("nodes")["node_id"])})


async def test_t08_a_refused_retry_changes_nothing(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await served.anthropic().messages.create(**REQUEST)
        before = [open_run(run).table(name).to_pylist() for name in ("nodes", "calls")]
        for bad in ({**REQUEST, "tools": "not-a-list"}, {**REQUEST, "messages": []}, {"model": "toy"}):
            answer = await http.post("/x/e1/v1/messages", json=bad)
            assert answer.status_code == 400
            assert answer.json()["type"] == "error"
        assert (await http.post("/x/e1/v1/messages", content=b"{")).status_code == 400
        assert [open_run(run).table(name).to_pylist() for name in ("nodes", "calls")] == before
        assert 'gyre_refused_requests_total{kind="invalid_request"} 4.0' in (await http.get("/metrics")).text
        await served.anthropic().messages.create(**REQUEST)
    _, second = check_run(run, engine)
    assert second.extension == "retry"


async def test_a_refused_first_call_makes_no_execution(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    engine.context_length = 40
    long = {**REQUEST, "messages": [{"role": "user", "content": "hello " * 40}]}
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await http.post("/api/executions", json={"id": "waiting", "task": "t"})
        for name in ("new", "waiting"):
            for bad in ({**REQUEST, "tools": "not-a-list"}, {**REQUEST, "messages": []}, long):
                assert (await http.post(f"/x/{name}/v1/messages", json=bad)).status_code == 400
        listed = (await http.get("/api/executions")).json()["executions"]
        assert [(one["id"], one["state"]) for one in listed] == [("waiting", "queued")]
        assert open_run(run).table("executions").column("execution_id").to_pylist() == ["waiting"]
        await served.anthropic("new").messages.create(**REQUEST)
    assert [call.execution_id for call in check_run(run, engine)] == ["new"]


async def test_first_calls_at_the_same_time_are_of_one_execution(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        async with served.proxy._turn("made", {}) as arriving:
            call = asyncio.create_task(http.post("/x/made/v1/messages", json=REQUEST))
            while not arriving.lock._waiters:
                await asyncio.sleep(0.005)
            created = await http.post("/api/executions", json={"id": "made", "task": "t"})
            assert created.status_code == 200
        assert (await call).status_code == 200
        assert served.proxy.executions.get("made").num_calls == 1
        answers = await asyncio.gather(*(http.post("/x/free/v1/messages", json=REQUEST) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
    calls = check_run(run, engine)
    assert sorted(call.extension for call in calls if call.execution_id == "free") == ["retry", "retry", "root"]
    executions = open_run(run).table("executions").column("execution_id").to_pylist()
    assert (executions.count("free"), executions.count("made")) == (1, 1)


async def test_counting_tokens_records_nothing(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    request = {name: value for name, value in REQUEST.items() if name != "max_tokens"}
    following = [*REQUEST["messages"], {"role": "assistant", "content": "Oh"}, {"role": "user", "content": "on"}]
    async with engine.serving(), serve_proxy(run, engine) as served:
        client = served.anthropic()
        counted = [(await client.messages.count_tokens(**request)).input_tokens]
        await client.messages.create(**REQUEST)
        counted.append((await client.messages.count_tokens(**{**request, "messages": following})).input_tokens)
        await client.messages.create(**{**REQUEST, "messages": following})
        await served.anthropic("other").messages.count_tokens(**request)
        assert served.proxy.executions.get("other") is None
    calls = check_run(run, engine)
    assert [call.prompt_tokens for call in calls] == counted
    assert [call.extension for call in calls] == ["root", "bridge"]


async def test_keys(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine, key="master") as served, served.http() as http:
        for key in ("", "wrong"):
            with pytest.raises(anthropic.AuthenticationError, match="wanted this proxy's key"):
                await served.anthropic(key=key or "x").messages.create(**REQUEST)
            with pytest.raises(openai.AuthenticationError):
                await served.openai(key=key or "x").chat.completions.create(**REQUEST)
        assert (await http.get("/x/e1/v1/models")).status_code == 401
        assert (await http.get("/api/status")).status_code == 401
        assert (await http.get("/metrics")).status_code == 401
        master = {"authorization": "Bearer master"}
        made = (await http.post("/api/executions", json={"task": "t"}, headers=master)).json()
        execution = made["base_url"].rpartition("/")[2]
        await served.anthropic(execution, made["key"]).messages.create(**REQUEST)
        await served.openai(execution, made["key"]).chat.completions.create(**REQUEST)
        with pytest.raises(anthropic.AuthenticationError):
            await served.anthropic("another", made["key"]).messages.create(**REQUEST)
        await served.anthropic("another", "master").messages.create(**REQUEST)
        assert (await http.get("/api/status", headers={"authorization": f"Bearer {made['key']}"})).status_code == 401
    check_run(run, engine)
    stored = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert made["key"].encode() not in stored
    assert b"master" not in stored


def test_a_proxy_for_others_wants_a_key(tmp_path):
    options = {"run": tmp_path, "engines": ("http://e",), "tokenizer": tmp_path}
    with pytest.raises(ConfigError, match="add --key KEY"):
        ProxySettings(host="0.0.0.0", **options)
    ProxySettings(host="0.0.0.0", key="k", **options)
    ProxySettings(host="127.0.0.1", **options)
    with pytest.raises(ConfigError, match="at least one --engine"):
        ProxySettings(run=tmp_path, engines=(), tokenizer=tmp_path)


async def test_engines_that_do_not_fit_are_refused_at_the_start(tmp_path):
    small, unlabelled = ScriptedEngine([OTHER], vocab=300), ScriptedEngine([OTHER], version="default")
    async with small.serving(), unlabelled.serving():
        with pytest.raises(ConfigError, match=r"has 310 ids, the model of engine .* 300; nothing recorded"):
            async with serve_proxy(tmp_path / "a", small):
                pass
        with pytest.raises(ConfigError, match="--policy ID"):
            async with serve_proxy(tmp_path / "b", unlabelled):
                pass
        async with serve_proxy(tmp_path / "c", unlabelled, policy="mine") as served:
            await served.anthropic().messages.create(**REQUEST)
    check_run(tmp_path / "c", unlabelled)
    assert unlabelled.requests[0]["extra_key"] == "mine:0"


@pytest.mark.parametrize("policy", ["", "run:3"])
def test_a_policy_is_a_name_without_a_number(tmp_path, policy):
    with pytest.raises(ConfigError, match="wanted --policy ID"):
        ProxySettings(run=tmp_path, engines=("http://e",), tokenizer=tmp_path, policy=policy)


async def test_a_policy_beside_weights_that_have_a_name_is_said_to_do_nothing(tmp_path, caplog):
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, policy="mine"):
        assert "--policy mine has no effect on engine" in caplog.text


async def test_another_template_does_not_go_on_with_a_run(tmp_path):
    engine = ScriptedEngine([OTHER])
    async with engine.serving():
        from gyre_data.store import RunWriter

        with RunWriter(tmp_path / "run") as writer:
            writer.update_info({"fingerprint": "toy-chatml"})
        async with serve_proxy(tmp_path / "run", engine):
            pass
        with pytest.raises(ConfigError, match="recorded with tokenizer and template toy-chatml"):
            async with serve_proxy(tmp_path / "run", engine, template=ToyTemplate("glm")):
                pass


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}])
async def test_a_web_page_does_not_get_in_without_a_key(tmp_path, headers):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http(headers=headers) as http:
        for path in ("/x/e1/v1/messages", "/api/executions"):
            assert (await http.post(path, json=REQUEST)).status_code == 403
    async with engine.serving(), serve_proxy(run, engine, key="k") as served, served.http(headers=headers) as http:
        assert (await http.post("/x/e1/v1/messages", json=REQUEST, headers={"x-api-key": "k"})).status_code == 200
    assert len(check_run(run, engine)) == 1


async def test_an_ended_execution_takes_no_more_calls(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await served.anthropic().messages.create(**REQUEST)
        assert (await http.post("/api/executions/e1/end", json={"reason": "finished"})).status_code == 200
        answer: httpx.Response = await http.post("/x/e1/v1/messages", content=json.dumps(REQUEST))
        assert (answer.status_code, "has ended (finished)" in answer.text) == (400, True)
    check_run(run, engine)
