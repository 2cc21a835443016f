"""`gyre proxy --workers 2`, real processes: where calls go, what the API reaches, what a killed process costs."""

import asyncio
import os
import re
import signal
import time

import httpx
import pytest

from gyre_data.errors import ConfigError
from gyre_data.store import open as open_run
from gyre_proxy.settings import ProxySettings
from gyre_proxy.template import ChatTemplate
from gyre_train.tiny import make_tiny
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import check_run, deliveries_of, nodes_of, path_ids
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), vocab=600, hidden=32, layers=1, context=4096)


@pytest.fixture(scope="module")
def reply(model):
    template = ChatTemplate.load(model)
    ids = [*template.encode("the value of it").ids.tolist(), min(template.stop_ids)]
    deltas = [{"ids": [token], "lps": [-0.5]} for token in ids]
    return {"deltas": deltas, "finish": {"type": "stop", "matched": ids[-1]}}


class Pair:
    """A proxy with two workers, in front of a scripted engine of this process."""

    def __init__(self, run, engine, model, key=None):
        self.run, self.engine, self.model = run, engine, model
        self.flags = ("--workers", "2", "--max-tokens", "64", *(("--key", key) if key else ()))
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def __aenter__(self):
        await self.start()
        return self

    async def start(self):
        self.proxy = await asyncio.to_thread(ProxyProcess, self.run, self.engine.url, self.model, *self.flags)
        self.http = httpx.AsyncClient(base_url=self.proxy.url, timeout=60, headers=self.headers)

    async def stop(self):
        await self.http.aclose()
        assert await asyncio.to_thread(self.proxy.stop) == 0
        assert list(self.run.rglob("*.open")) == []  # every process sealed what it wrote

    async def __aexit__(self, kind, error, trace):
        if error is None:
            await self.stop()
        else:
            await asyncio.to_thread(self.proxy.kill)

    async def call(self, execution, *texts, http=None, **options):
        """One turn of a conversation: of `texts`, every second one was the model's."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        body = {"model": "m", "max_tokens": 64, "messages": messages, **options}
        return await (http or self.http).post(f"/x/{execution}/v1/chat/completions", json=body)

    async def workers(self):
        return (await self.http.get("/api/status")).json()["workers"]


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def writers_of(run):
    """The writers whose calls each execution has."""
    found = {}
    for sealed in open_run(run).manifest.sealed["calls"]:
        table = open_run(run)._open_sealed("calls", sealed)[1]
        for batch in table:
            for execution in batch.column("execution_id").to_pylist():
                found.setdefault(execution, set()).add(sealed.name.partition("-")[0])
    return found


async def one_connection_moves_between_processes(pair):
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(pair.proxy.url).port)

    async def ask(method, path, body=b"", cut=None):
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer master\r\n"
        data = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        for piece in (data[:cut], data[cut:]) if cut else (data,):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05 if cut else 0)
        status = await reader.readline()
        headers = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", headers.lower()).group(1))
        return int(status.split()[1]), await reader.readexactly(length)

    body = b'{"model":"m","max_tokens":64,"messages":[{"role":"user","content":"hello"}]}'
    for name, cut in (("a", None), ("b", None), ("a", 3), ("b", 40)):
        status, data = await ask("POST", f"/x/{name}/v1/chat/completions", body, cut)
        assert (status, b"the value" in data) == (200, True), data
        status, data = await ask("GET", "/api/status")
        assert (status, b'"workers"' in data) == (200, True)
    assert (await ask("GET", "/nowhere"))[0] == 404
    writer.close()


async def only_the_right_keys_open_an_execution(pair):
    made = [(await pair.http.post("/api/executions", json={})).json() for _ in range(2)]
    for mine, other in (made, made[::-1]):
        answers = []
        for key in (mine["key"], other["key"], "none"):
            async with httpx.AsyncClient(base_url=pair.proxy.url, headers={"x-api-key": key}, timeout=60) as http:
                answers.append((await pair.call(mine["id"], "hello", http=http)).status_code)
        assert answers == [200, 401, 401]
    async with httpx.AsyncClient(base_url=pair.proxy.url, headers={"x-api-key": "x"}, timeout=60) as http:
        assert (await pair.call("new", "hello", http=http)).status_code == 401
    assert (await pair.http.get("/api/executions/new")).status_code == 404


async def test_executions_are_shared_out_and_stay_with_their_worker(tmp_path, model, reply):
    engine, run = ScriptedEngine([reply], vocab=600), tmp_path / "run"
    names = [f"e{i}" for i in range(6)]
    async with engine.serving(), Pair(run, engine, model, key="master") as pair:
        # One client, one pool of connections, six conversations at once: connections serve whichever is next.
        first = await asyncio.gather(*(pair.call(name, "hello") for name in names))
        for _ in range(2):
            again = await asyncio.gather(
                *(pair.call(n, "hello", said(answer), "more") for n, answer in zip(names, first, strict=True))
            )
        assert [worker["executions"] for worker in await pair.workers()] == [3, 3]
        status = (await pair.http.get("/api/status")).json()
        assert (status["in_flight"], status["executions"]) == (0, {"running": 6})
        listed = (await pair.http.get("/api/executions")).json()["executions"]
        assert {one["id"]: one["calls"] for one in listed} == dict.fromkeys(names, 3)
        metrics = (await pair.http.get("/metrics")).text
        counted = re.findall(r'^gyre_calls_total\{.*worker="(\d)".*\} (\d+)', metrics, re.MULTILINE)
        assert {worker for worker, _ in counted} == {"1", "2"}
        assert sum(int(number) for _, number in counted) == 18
        assert metrics.count("# TYPE gyre_calls_total") == 1
        engines = (await pair.http.get("/api/engines")).json()["engines"]
        assert (engines[0]["served"], engines[0]["in_flight"]) == (18, 0)
        events = (await pair.http.get("/api/events", params={"from": 0})).json()["events"]
        assert sum(event["type"] == "call" for event in events) == 18
        await one_connection_moves_between_processes(pair)
        await only_the_right_keys_open_an_execution(pair)
    assert all(said(answer) for answer in again)
    calls = check_run(run, engine)
    assert {call.extension for call in calls if call.prompt_tokens > calls[0].prompt_tokens} <= {"bridge", "retry"}
    writers = writers_of(run)
    assert {len(owners) for owners in writers.values()} == {1}
    assert writers["a"] != writers["b"]
    moved = sorted((call for call in calls if call.execution_id in "ab"), key=lambda call: call.started_at)
    assert [call.execution_id for call in moved] == [*"abab"]
    assert {owner for owners in writers.values() for owner in owners} == {"w1", "w2"}


async def test_what_the_api_changes_reaches_the_worker(tmp_path, model, reply):
    engine, run = ScriptedEngine([reply], vocab=600), tmp_path / "run"
    async with engine.serving(), Pair(run, engine, model) as pair:
        made = (await pair.http.post("/api/executions", json={"task": "t", "queue": False})).json()
        name = made["id"]
        answers = [await pair.call(name, "hello")]
        digest = {"kind": "digest", "digest": "d1"}
        state = (await pair.http.post(f"/api/executions/{name}/environments", json=digest)).json()["state_id"]
        answers.append(await pair.call(name, "hello", said(answers[0]), "more"))
        engine.hold(1)
        late = asyncio.create_task(pair.call(name, "other"))
        await engine.waiting.wait()
        # The worker's word may come after the engine has the request.
        async with asyncio.timeout(60):
            while (await pair.http.get(f"/api/executions/{name}")).json()["in_flight"] != 1:
                await asyncio.sleep(0.02)
        assert (await pair.http.get("/api/engines")).json()["engines"][0]["in_flight"] == 1
        ended = (await pair.http.post(f"/api/executions/{name}/end", json={"reason": "finished"})).json()
        assert (ended["state"], ended["in_flight"], ended["calls"]) == ("ended", 0, 3)
        assert (await late).status_code >= 500
        refused = await pair.call(name, "again")
        assert (refused.status_code, "has ended (finished)" in refused.text) == (400, True)
        score = {"evaluator": "judge", "value": 1.0}
        assert (await pair.http.post(f"/api/executions/{name}/scores", json=score)).status_code == 200
        engine.release()
        engine.version = "base:7"  # as it says itself, else a poll takes the publisher's word back
        await pair.http.post("/api/engines", json={"action": "version", "url": engine.url, "version": "base:7"})
        assert said(await pair.call("e2", "hello"))
        assert engine.requests[-1]["extra_key"] == "base:7"
        await pair.http.post("/api/engines", json={"action": "remove", "url": engine.url})
        assert (await pair.http.get("/api/engines")).json()["engines"] == []
        await pair.http.post("/api/engines", json={"action": "add", "url": engine.url})
        assert said(await pair.call("e2", "hello", said(answers[0]), "more"))
    calls = {call.call_id: call for call in check_run(run, engine)}
    first, second = (calls[answer.headers["x-gyre-call"]] for answer in answers)
    assert (first.environment_state_id, second.environment_state_id) == (None, state)
    assert [row["value"] for row in open_run(run).table("scores").to_pylist()] == [1.0]


async def test_a_killed_worker_is_replaced_and_its_executions_go_on(tmp_path, model, reply):
    engine, run = ScriptedEngine([reply], vocab=600), tmp_path / "run"
    async with engine.serving(), Pair(run, engine, model) as pair:
        names = ["a", "b"]
        before = {name: await pair.call(name, "hello") for name in names}
        pids = [worker["pid"] for worker in await pair.workers()]
        engine.hold(2)
        cut = [asyncio.create_task(pair.call(name, "hello", said(before[name]), "more")) for name in names]
        await asyncio.wait_for(engine.waiting.wait(), 60)
        while len(engine.requests) < 4:
            await asyncio.sleep(0.01)
        os.kill(pids[0], signal.SIGKILL)
        done, _ = await asyncio.wait(cut, return_when=asyncio.FIRST_COMPLETED)
        assert isinstance(done.pop().exception(), httpx.TransportError)
        async with asyncio.timeout(60):  # its connections break before its supervisor can see that it is gone
            while (await pair.workers())[0]["pid"] == pids[0]:
                await asyncio.sleep(0.01)
        engine.release()
        fresh = {name: await pair.call(name, "hello", said(before[name]), "more") for name in names}
        assert all(said(answer) for answer in fresh.values())
        workers = await pair.workers()
        assert [worker["restarts"] for worker in workers] == [1, 0]
        assert workers[0]["pid"] not in pids
        assert workers[1]["pid"] == pids[1]
        await asyncio.gather(*cut, return_exceptions=True)
    calls, nodes = {call.call_id: call for call in check_run(run, engine)}, nodes_of(run)
    for name in names:
        one, two = calls[before[name].headers["x-gyre-call"]], calls[fresh[name].headers["x-gyre-call"]]
        assert two.extension in ("bridge", "retry")
        ids = path_ids(nodes, one.output_node)
        assert path_ids(nodes, two.prompt_node)[: len(ids)] == ids
    assert {d.state for d in deliveries_of(run)} <= {"delivered", "undelivered", "abandoned"}


async def test_a_killed_supervisor_takes_its_workers_along_and_a_restart_goes_on(tmp_path, model, reply):
    engine, run = ScriptedEngine([reply], vocab=600), tmp_path / "run"
    async with engine.serving():
        pair = Pair(run, engine, model)
        await pair.start()
        before = {name: await pair.call(name, "hello") for name in ("a", "b")}
        pids = [worker["pid"] for worker in await pair.workers()]
        await asyncio.to_thread(pair.proxy.kill)
        deadline = time.monotonic() + 60
        while any(map(_alive, pids)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert not any(map(_alive, pids))
        await pair.http.aclose()
        async with pair:
            after = [await pair.call(name, "hello", said(before[name]), "more") for name in before]
    calls = {call.call_id: call for call in check_run(run, engine)}
    assert [calls[answer.headers["x-gyre-call"]].extension for answer in after] == ["bridge", "bridge"]


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_encrypted_connection_cannot_change_its_process(tmp_path):
    for name in ("cert", "key"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="TLS server in front"):
        ProxySettings(
            run=tmp_path,
            engines=("http://e",),
            tokenizer=tmp_path,
            tls_cert=tmp_path / "cert",
            tls_key=tmp_path / "key",
            workers=2,
        )
