"""The HTTP API: executions, claims, states, scores, events, engines, segments; and what of it survives a restart."""

import asyncio
import json

import pytest

from gyre_data.arrays import from_table
from gyre_data.errors import CaptureError
from gyre_data.execution import executions
from gyre_data.store import RunWriter
from gyre_data.store import open as open_run
from gyre_proxy import ProxyClient
from tests.support.proxy_server import check_run, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

OTHER = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}


async def post(http, path, body, status=200):
    answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_an_execution_from_its_creation_to_its_score(tmp_path):
    engine, run = ScriptedEngine([OTHER], version="mine:2"), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        group = (await post(http, "/api/groups", {"id": "g-t", "task": "t", "size": 2}))["id"]
        wanted = {
            "group": group,
            "sample_index": 0,
            "harness": "mini",
            "attributes": {"a": 1},
            "launcher": {"timeout_s": 5},
        }
        made = await post(http, "/api/executions", wanted)
        again = await post(http, "/api/executions", wanted)
        assert (again["id"], again["base_url"]) == (made["id"], made["base_url"])
        second = await post(http, "/api/executions", {**wanted, "sample_index": 1})
        shown = (await http.get(f"/api/executions/{made['id']}")).json()
        assert (shown["state"], shown["task"], shown["attributes"], shown["launcher"]) == (
            "queued",
            "t",
            {"a": 1},
            {"timeout_s": 5},
        )
        claimed = (await post(http, "/api/executions/claim", {"limit": 1}))["executions"]
        assert [(one["id"], one["state"], one["base_url"]) for one in claimed] == [
            (made["id"], "claimed", made["base_url"])
        ]
        assert [one["id"] for one in (await post(http, "/api/executions/claim", {"limit": 5}))["executions"]] == [
            second["id"]
        ]
        assert (await post(http, "/api/executions/claim", {"limit": 5})) == {"executions": []}

        state = await post(
            http, f"/api/executions/{made['id']}/environments", {"kind": "digest", "digest": "d0", "location": "/w"}
        )
        same = await post(
            http, f"/api/executions/{made['id']}/environments", {"kind": "digest", "digest": "d0", "location": "/w"}
        )
        assert same == state
        await served.anthropic(made["id"]).messages.create(**REQUEST)
        later = await post(http, f"/api/executions/{made['id']}/environments", {"kind": "digest", "digest": "d1"})
        ended = await post(http, f"/api/executions/{made['id']}/end", {"reason": "finished"})
        assert (await post(http, f"/api/executions/{made['id']}/end", {"reason": "crashed"}))[
            "end_reason"
        ] == "finished"
        assert (ended["state"], ended["calls"], ended["scored"]) == ("ended", 1, False)
        score = {
            "evaluator": "pytest",
            "version": "3",
            "status": "scored",
            "value": 0.5,
            "partial": True,
            "detail": {"x": 1},
        }
        first = await post(http, f"/api/executions/{made['id']}/scores", {**score, "state_id": later["state_id"]})
        assert (
            await post(http, f"/api/executions/{made['id']}/scores", {**score, "state_id": later["state_id"]}) == first
        )
        other = await post(http, f"/api/executions/{made['id']}/scores", {**score, "value": 1})
        assert other != first
        assert [one["scored"] for one in (await http.get("/api/executions?group=g-t")).json()["executions"]] == [
            True,
            False,
        ]
        status = (await http.get("/api/status")).json()
        assert (status["policy"], status["executions"]) == ("mine:2", {"ended": 1, "claimed": 1})
        events = (await http.get("/api/events?from=0")).json()
        kinds = [event["type"] for event in events["events"] if event.get("execution_id") == made["id"]]
        assert kinds == [
            "execution.queued", "execution.started", "environment", "call.started", "call", "delivery",
            "environment", "execution.ended", "score", "score",
        ]  # fmt: skip
    (call,) = check_run(run, engine)
    assert call.environment_state_id == state["state_id"]
    reader = open_run(run)
    rows = from_table("executions", reader.table("executions"))
    of_one = [row for row in rows if row.execution_id == made["id"]]
    assert [row.event for row in of_one] == ["started", "started", "started", "ended"]
    assert [row.dispatch_version for row in of_one] == [None, None, 2, None]
    assert of_one[-1].end_reason == "finished"
    scores = from_table("scores", reader.table("scores"))
    assert [(s.evaluator, s.evaluator_version, s.value, s.partial) for s in scores] == [
        ("pytest", "3", 0.5, True),
        ("pytest", "3", 1.0, True),
    ]
    states = from_table("environments", reader.table("environments"))
    assert [(s.digest, s.parent_id) for s in states] == [("d0", None), ("d1", state["state_id"])]


async def test_a_restart_knows_executions_keys_states_and_histories(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving():
        async with (
            serve_proxy(run, engine, key="master") as served,
            served.http(headers={"x-api-key": "master"}) as http,
        ):
            await post(http, "/api/groups", {"id": "g", "task": "t", "size": 2, "attributes": {"suite": "s"}})
            made = await post(http, "/api/executions", {"task": "t", "group": "g", "sample_index": 0})
            waiting = await post(http, "/api/executions", {"task": "t", "group": "g", "sample_index": 1})
            (claimed,) = (await post(http, "/api/executions/claim", {"limit": 1}))["executions"]
            assert claimed["id"] == made["id"]
            await post(http, f"/api/executions/{made['id']}/environments", {"kind": "opaque", "digest": "d"})
            await served.anthropic(made["id"], claimed["key"]).messages.create(**REQUEST)
            await served.anthropic("free", "master").messages.create(**REQUEST)
            seen = (await http.get("/api/events")).json()["next"]
        async with (
            serve_proxy(run, engine, key="master") as served,
            served.http(headers={"x-api-key": "master"}) as http,
        ):
            states = {one["id"]: one["state"] for one in (await http.get("/api/executions")).json()["executions"]}
            assert states == {made["id"]: "claimed", waiting["id"]: "queued", "free": "running"}
            following = {
                **REQUEST,
                "messages": [
                    *REQUEST["messages"],
                    {"role": "assistant", "content": "Oh"},
                    {"role": "user", "content": "on"},
                ],
            }
            for key in (made["key"], claimed["key"]):  # the creator's and the launcher's
                await served.anthropic(made["id"], key).messages.create(**following)
            assert (await http.get("/api/events")).json()["events"][0]["seq"] >= seen
            assert (await post(http, "/api/executions", {"group": "g", "sample_index": 1}))["id"] == waiting["id"]
            await post(http, "/api/groups", {"id": "g", "size": 2})  # says nothing new
            await post(http, "/api/groups", {"id": "g", "size": 3})
            late = await post(http, "/api/executions", {"group": "g", "sample_index": 2})
            assert (await http.get(f"/api/executions/{late['id']}")).json()["task"] == "t"
            await post(http, f"/api/executions/{made['id']}/end", {"reason": "harness_timeout"})
    groups = from_table("groups", open_run(run).table("groups"))
    assert [(group.group_id, group.task_id, group.size, group.attributes) for group in groups] == [
        ("g", "t", 2, '{"suite": "s"}'),
        ("g", "t", 3, '{"suite": "s"}'),
    ]
    calls = [call for call in check_run(run, engine) if call.execution_id == made["id"]]
    assert [call.extension for call in calls] == ["root", "bridge", "retry"]
    assert calls[1].continues_from == calls[0].call_id
    assert calls[1].environment_state_id == calls[0].environment_state_id is not None


@pytest.mark.parametrize(
    ("path", "body", "status", "mend"),
    [
        ("/api/executions/none/end", {"reason": "finished"}, 404, "see GET /api/executions"),
        ("/api/executions/e/end", {"reason": "bored"}, 400, "one of finished, harness_timeout"),
        ("/api/executions/e/environments", {"kind": "photo", "digest": "d"}, 400, "digest, git_tree or opaque"),
        ("/api/executions/e/scores", {"evaluator": "x", "value": None}, 400, "send status failed"),
        ("/api/executions/e/scores", {"evaluator": "x", "value": "1"}, 400, "finite value"),
        ("/api/executions/e/scores", {"value": 1.0}, 400, "wanted evaluator"),
        ("/api/executions/claim", {"limit": "all"}, 400, "number of executions"),
        ("/api/engines", {"action": "explode", "url": "http://x"}, 400, "add, drain, remove or version"),
        ("/api/engines", {"action": "drain", "url": "http://x"}, 400, "one of this proxy's engines"),
        ("/api/engines", {"action": "add", "url": "http://127.0.0.1:1"}, 503, "start one"),
        ("/api/groups", [], 400, "JSON object"),
        ("/api/groups", {"size": "many"}, 400, "number of executions"),
    ],
)
async def test_what_the_api_refuses(tmp_path, path, body, status, mend):
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        await post(http, "/api/executions", {"id": "e", "task": "t"})
        assert mend in (await post(http, path, body, status))["error"]["message"]
    assert open_run(tmp_path / "run").table("scores").num_rows == 0


async def test_a_failed_evaluator_has_no_value(tmp_path):
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        await post(http, "/api/executions", {"id": "e", "task": "t"})
        await post(
            http, "/api/executions/e/scores", {"evaluator": "x", "status": "failed", "value": 0.0, "detail": "no file"}
        )
    (score,) = from_table("scores", open_run(tmp_path / "run").table("scores"))
    assert (score.status, score.value, score.detail) == ("failed", None, "no file")


async def test_engines_come_go_and_change_weights(tmp_path):
    one, two = ScriptedEngine([OTHER]), ScriptedEngine([OTHER])
    async with one.serving(), two.serving(), serve_proxy(tmp_path / "run", one) as served, served.http() as http:
        await post(http, "/api/engines", {"action": "add", "url": two.url})
        await post(http, "/api/engines", {"action": "drain", "url": one.url})
        await served.anthropic().messages.create(**REQUEST)
        assert (len(one.requests), len(two.requests)) == (0, 1)
        two.version = "base:1"
        answer = await post(http, "/api/engines", {"action": "version", "url": two.url, "version": "base:1"})
        assert answer["version"] == "base:1"
        await served.anthropic().messages.create(**{**REQUEST, "max_tokens": 5})
        assert two.requests[-1]["extra_key"] == "base:1"
        await post(http, "/api/engines", {"action": "remove", "url": one.url})
        listed = (await http.get("/api/engines")).json()["engines"]
        assert [(engine["url"], engine["state"], engine["served"]) for engine in listed] == [(two.url, "up", 2)]
        assert json.loads((tmp_path / "run" / "run.json").read_text())["endpoints"]["engines"] == [two.url]
        metrics = (await http.get("/metrics")).text
        assert 'gyre_calls_total{extension="root",role="main",status="ok",wire="anthropic"} 1.0' in metrics
        assert f'gyre_engine_up{{engine="{two.url}"}} 1.0' in metrics
    check_run(tmp_path / "run", one, two)


async def test_a_restart_knows_engines_that_were_added_and_those_that_drain(tmp_path):
    given, added, late, gone = (ScriptedEngine([OTHER]) for _ in range(4))
    run = tmp_path / "run"

    async def states(http):
        return {one["url"]: one["state"] for one in (await http.get("/api/engines")).json()["engines"]}

    async with given.serving(), added.serving(), late.serving(), gone.serving():
        async with serve_proxy(run, given) as served, served.http() as http:
            for engine in (added, late, gone):
                await post(http, "/api/engines", {"action": "add", "url": engine.url})
            for engine in (given, late):
                await post(http, "/api/engines", {"action": "drain", "url": engine.url})
        late.down = gone.down = True
        async with serve_proxy(run, given) as served, served.http() as http:
            assert await states(http) == {given.url: "draining", added.url: "up"}
            await post(http, "/api/engines", {"action": "remove", "url": gone.url}, 400)  # waited for no longer
            late.down = gone.down = False
            async with asyncio.timeout(60):
                while late.url not in await states(http):
                    await asyncio.sleep(0.05)
            assert await states(http) == {given.url: "draining", added.url: "up", late.url: "draining"}
            await post(http, "/api/engines", {"action": "add", "url": given.url})
            await post(http, "/api/engines", {"action": "remove", "url": added.url})
        async with serve_proxy(run, given) as served, served.http() as http:
            assert await states(http) == {given.url: "up", late.url: "draining"}


async def test_an_execution_that_is_found_again_is_as_it_was(tmp_path):
    run, same = tmp_path / "run", {"task": "t", "group": "t#1", "sample_index": 0}
    engine = ScriptedEngine([OTHER])
    async with engine.serving():
        async with serve_proxy(run, engine) as served, served.http() as http:
            made = await post(http, "/api/executions", same)
            await post(http, "/api/executions/claim", {})
            engine.version = "base:1"
            await post(http, "/api/engines", {"action": "version", "url": engine.url, "version": "base:1"})
            assert (await post(http, "/api/executions", same))["id"] == made["id"]
            await post(http, f"/api/executions/{made['id']}/end", {"reason": "finished"})
            assert (await post(http, "/api/executions", same))["id"] == made["id"]
        assert executions(open_run(run))[made["id"]].dispatch_version == 0, "not what is served by now"
        async with serve_proxy(run, engine) as served, ProxyClient(served.url) as client:
            (known,) = await client.executions("t#1")
            assert (known["state"], known["end_reason"]) == ("ended", "finished")


async def test_events_can_be_waited_for(tmp_path):
    engine = ScriptedEngine([OTHER])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        start = (await http.get("/api/events?from=0")).json()["next"]
        waiting = asyncio.create_task(http.get(f"/api/events?from={start}&wait=20"))
        await post(http, "/api/executions", {"id": "e", "task": "t"})
        found = (await waiting).json()
        assert [event["type"] for event in found["events"]] == ["execution.queued"]
        assert found["next"] == start + 1


async def test_a_reader_without_the_disk_gets_the_same_bytes(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await served.anthropic().messages.create(**REQUEST)
        for path in [*run.glob("nodes/*"), *run.glob("manifest/*.json")]:
            if not path.is_file():
                continue
            answer = await http.get(f"/api/segments/{path.parent.name}/{path.name}?from=3")
            assert (answer.content, answer.headers["x-gyre-size"]) == (path.read_bytes()[3:], str(path.stat().st_size))
        for bad in ("nodes/../run.json", "nodes/%2e%2e%2frun.json", "lock/lock", "nodes/w0-999999.arrow"):
            assert (await http.get(f"/api/segments/{bad}")).status_code == 404


async def test_nothing_is_answered_before_it_is_durable(tmp_path):
    class Full(RunWriter):
        full = False

        def write(self, rows):
            if self.full:
                raise CaptureError("no space left on device")
            super().write(rows)

    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving():
        writer = Full(run)
        async with serve_proxy(run, engine, writer=writer) as served, served.http() as http:
            await post(http, "/api/executions", {"id": "e", "task": "t"})
            writer.full = True
            await post(http, "/api/executions", {"id": "f", "task": "t"}, 500)
            await post(http, "/api/groups", {"id": "g", "task": "t"}, 500)
            await post(http, "/api/executions/claim", {"limit": 1}, 500)
            await post(http, "/api/executions/e/end", {"reason": "finished"}, 500)
            await post(http, "/api/executions/e/scores", {"evaluator": "x", "value": 1.0}, 500)
            await post(http, "/api/executions/e/environments", {"kind": "digest", "digest": "d"}, 500)
            writer.full = False
            listed = (await http.get("/api/executions")).json()["executions"]
            assert [(one["id"], one["state"], one["scored"]) for one in listed] == [("e", "queued", False)]
            assert served.proxy.executions.groups == {}
            await post(http, "/api/executions/e/scores", {"evaluator": "x", "value": 1.0})
    assert open_run(run).table("scores").num_rows == 1


async def test_claims_at_the_same_time_never_get_the_same_execution(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for index in range(6):
            await post(http, "/api/executions", {"group": "g", "sample_index": index})
        answers = await asyncio.gather(*(post(http, "/api/executions/claim", {"limit": 6}) for _ in range(3)))
        ids = [one["id"] for answer in answers for one in answer["executions"]]
        assert len(ids) == len(set(ids)) == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "../../elsewhere"},
        {"sample_index": "3"},
        {"sample_index": 2**40},
        {"sample_index": -1},
        {"launcher": [1]},
    ],
)
async def test_an_execution_with_odd_fields_is_refused_and_leaves_nothing(tmp_path, fields):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await post(http, "/api/executions", {"group": "g", **fields}, 400)
        assert (await http.get("/api/executions")).json() == {"executions": []}


async def test_no_call_slips_past_the_end_of_its_execution(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        await post(http, "/api/executions", {"id": "e1", "queue": False})
        execution = served.proxy.executions.get("e1")
        async with execution.lock:  # the call waits here, after it was let in
            call = asyncio.create_task(http.post("/x/e1/v1/messages", json=REQUEST))
            async with asyncio.timeout(60):
                while not execution.lock._waiters:
                    await asyncio.sleep(0.01)
                await post(http, "/api/executions/e1/end", {"reason": "finished"})
        assert (await call).status_code == 400
    assert engine.requests == []
    assert check_run(run, engine) == []


async def test_the_end_of_an_execution_stops_every_sibling(tmp_path):
    engine, run = ScriptedEngine([OTHER]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        engine.hold()
        calls = [asyncio.create_task(http.post("/x/e1/v1/messages", json=REQUEST)) for _ in range(2)]
        async with asyncio.timeout(60):
            while len(engine.requests) < 2:
                await asyncio.sleep(0.01)
            await post(http, "/api/executions/e1/end", {"reason": "harness_timeout"})
            await asyncio.gather(*calls)
        assert served.proxy.status()["in_flight"] == 0
    assert [call.status for call in check_run(run, engine)] == ["aborted", "aborted"]
