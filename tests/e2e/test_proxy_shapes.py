"""Lawful but odd requests over real HTTP: honoured as docs/proxy.md says, or refused in the wire's own shape."""

import itertools
import json
from pathlib import Path

import openai
import pytest

from gyre_data.eligible import Reason, eligibility
from gyre_data.run_stats import stats
from gyre_data.store import open as open_run
from gyre_data.tree import Tree
from gyre_proxy.late_system import system_form
from tests.support.late_templates import ByTurns, Refusing
from tests.support.proxy_server import check_run, nodes_of, path_ids, serve_proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.toy_template import ToyTemplate

CASES = Path(__file__).parents[1] / "data" / "cases"
OH = {"deltas": [{"ids": [79, 104, 257], "lps": [-0.1, -0.2, -0.3]}], "finish": {"type": "stop", "matched": 257}}
REQUEST = {"model": "toy", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}


class Broken(ToyTemplate):
    """A template with a fault of its own that no rule foresees, once it is past its first render."""

    broken = False

    def render(self, messages, tools, add_generation_prompt):
        if self.broken:
            raise RuntimeError("no rule foresees this")
        return super().render(messages, tools, add_generation_prompt)


async def test_a_fault_that_nobody_foresaw_has_the_wires_own_shape(tmp_path, caplog):
    engine, template = ScriptedEngine([OH]), Broken()
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, template=template) as served:
        template.broken = True
        async with served.http() as http:
            anthropic = await http.post("/x/e1/v1/messages", json=REQUEST)
            chat = await http.post("/x/e1/v1/chat/completions", json=REQUEST)
            assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (500, "api_error")
            assert (chat.status_code, chat.json()["error"]["type"]) == (500, "server_error")
            assert "RuntimeError; see its log" in anthropic.json()["error"]["message"]
            assert "no rule foresees this" in caplog.text
            template.broken = False
            assert (await http.post("/x/e1/v1/messages", json=REQUEST)).status_code == 200
    (call,) = check_run(tmp_path / "run", engine)
    assert call.extension == "root"
    assert open_run(tmp_path / "run").table("calls").num_rows == 1


def case(name):
    return json.loads((CASES / f"{name}.json").read_text())


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
BODIES = {
    "v1/chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "v1/messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "v1/responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
}
RESPONSES_REQUEST = {"model": "toy", "max_output_tokens": 64, "input": REQUEST["messages"]}


def request_of(endpoint):
    return RESPONSES_REQUEST if endpoint == "v1/responses" else REQUEST


@pytest.mark.parametrize("endpoint", BODIES)
async def test_t14_every_call_is_captured(tmp_path, endpoint):
    given = case("T14")
    asked = [r for r in given["input"]["requests"] if r["endpoint"] == f"/{endpoint}"]
    engine, run = ScriptedEngine(given["input"]["engine_script"]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for wanted in asked:
            format_ = BODIES[endpoint] if wanted["response_format"] else {}
            body = {**request_of(endpoint), **format_, "stream": wanted["stream"]}
            assert (await http.post(f"/x/e1/{endpoint}", json=body)).status_code == 200
    calls, nodes = check_run(run, engine), nodes_of(run)
    assert len(calls) == len(asked) == 4
    for call, wanted in zip(calls, asked, strict=True):
        output = nodes[call.output_node]
        assert output.token_ids.tolist() == given["expected"]["captured_output_ids"]
        assert output.logprobs.tolist() == pytest.approx([-0.05, -0.1, -0.15, -0.2, -0.25, -0.3, -0.35, -0.05])
        assert call.constrained is (wanted["response_format"] is not None)
    sent = [request["sampling_params"].get("json_schema") for request in engine.requests]
    assert [schema and json.loads(schema) for schema in sent] == [
        SCHEMA if call.constrained else None for call in calls
    ]
    judged = eligibility(Tree.load(open_run(run), "e1"))
    assert {call.call_id for call in calls if call.constrained} == {
        call_id for call_id, (reason, _) in judged.reasons.items() if reason is Reason.CONSTRAINED
    }


IN_STREAM = {"type": "abort", "message": "json_schema is not supported", "status_code": 400, "err_type": "BadRequest"}
REFUSALS = {
    "by status": {"refuse": (400, "json_schema is not supported")},
    "in the stream": {
        "raw_chunks": [{"output_ids": [0], "meta_info": {"completion_tokens": 1, "finish_reason": IN_STREAM}}]
    },
}


@pytest.mark.parametrize("way", REFUSALS)
async def test_a_schema_that_the_engine_refuses_is_refused_in_the_wires_shape(tmp_path, way):
    engine = ScriptedEngine([REFUSALS[way]])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served, served.http() as http:
        for endpoint, fields in BODIES.items():
            answer = await http.post(f"/x/e1/{endpoint}", json={**request_of(endpoint), **fields})
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
            assert "json_schema is not supported" in answer.json()["error"]["message"]
        assert [one["state"] for one in (await http.get("/api/engines")).json()["engines"]] == ["up"]
    assert len(engine.requests) == len(BODIES)


class Thinking(ToyTemplate):
    """A template that opens a reasoning block for the model."""

    def render(self, messages, tools, add_generation_prompt):
        return super().render(messages, tools, add_generation_prompt) + ("<think>" if add_generation_prompt else "")


async def test_a_reply_held_to_a_schema_is_text_though_the_template_opens_reasoning(tmp_path):
    reply = {"deltas": [{"ids": [123, 125, 257], "lps": [-0.1, -0.1, -0.1]}]}
    engine = ScriptedEngine([reply])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine, template=Thinking()) as served:
        chat = served.openai().chat.completions
        held = await chat.create(**REQUEST, **BODIES["v1/chat/completions"])
        free = await chat.create(**REQUEST)
        assert held.choices[0].message.content == "{}"
        assert (free.choices[0].message.content, free.choices[0].message.reasoning_content) == ("", "{}")
    check_run(tmp_path / "run", engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_p14_logprobs_are_those_of_the_visible_text(tmp_path, stream):
    given = case("P14")
    engine, run = ScriptedEngine(given["input"]["engine_script"]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served:
        client = served.openai()
        if stream:
            told, text = [], ""
            async for chunk in await client.chat.completions.create(**given["input"]["request"], stream=True):
                text += chunk.choices[0].delta.content or ""
                told += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
        else:
            (choice,) = (await client.chat.completions.create(**given["input"]["request"])).choices
            told, text = choice.logprobs.content, choice.message.content
    assert text == "".join(token.token for token in told) == given["expected"]["visible"]
    assert bytes(byte for token in told for byte in token.bytes).decode() == text
    assert len(told) == given["expected"]["n_visible"]
    assert [token.logprob for token in told] == pytest.approx(
        [-0.15, -0.2, -0.25, -0.3, -0.35, -0.05, -0.1, -0.15, -0.2]
    )
    (call,) = check_run(run, engine)
    output = nodes_of(run)[call.output_node]
    assert output.token_ids.tolist() == given["expected"]["captured_output_ids"]
    assert len(output.logprobs) == given["expected"]["n_captured"]


async def test_p13_the_run_owns_the_sampling(tmp_path):
    given, run = case("P13"), tmp_path / "run"
    engine = ScriptedEngine(given["input"]["engine_script"])
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        answers = [await http.post("/x/e1/v1/chat/completions", json=request) for request in given["input"]["requests"]]
    assert [answer.status_code for answer in answers] == given["expected"]["status"]
    (call,) = check_run(run, engine)
    (sent,) = engine.requests
    assert sent["return_logprob"]
    assert (sent["sampling_params"]["temperature"], sent["sampling_params"]["top_p"]) == (1.0, 1.0)
    assert json.loads(call.sampling_asked) == {"temperature": 0, "max_tokens": 5}
    assert json.loads(call.sampling_used).items() <= sent["sampling_params"].items()


async def test_p08_ids_of_calls_are_never_changed(tmp_path):
    given, run, seen = case("P08"), tmp_path / "run", []

    class Seen(ToyTemplate):
        def render(self, messages, tools, add_generation_prompt):
            seen.append([m.for_template() for m in messages])
            return super().render(messages, tools, add_generation_prompt)

    calls = [*b'<tool_call>{"name": "stat_bay", "arguments": {"bay": 4}}</tool_call>']
    engine = ScriptedEngine([{"deltas": [{"ids": [*calls, 257], "lps": [-0.1] * (len(calls) + 1)}]}])
    request = {name: value for name, value in given["input"]["request"].items() if name != "stream"}
    async with engine.serving(), serve_proxy(run, engine, template=Seen()) as served:
        seen.clear()
        replies = [await served.anthropic().messages.create(**request) for _ in range(2)]
    rendered = next(chat for chat in seen if len(chat) == 4)
    ids = [rendered[2]["tool_calls"][0]["id"], rendered[3]["tool_call_id"]]
    assert ids == given["expected"]["ids_seen_by_template"]
    stored = [
        json.loads(open_run(run).blob(blob)) for node in nodes_of(run).values() for blob in node.message_blobs or ()
    ]
    assert [m["tool_calls"][0]["id"] for m in stored if m.get("tool_calls") and m["tool_calls"][0].get("id")] == ids[:1]
    assert [m["tool_call_id"] for m in stored if "tool_call_id" in m] == ids[1:]
    minted = [block.id for reply in replies for block in reply.content if block.type == "tool_use"]
    assert len(set(minted)) == 2
    check_run(run, engine)


async def test_s10_what_is_stored_of_a_stream_is_the_message(tmp_path):
    wanted, run = case("S10")["expected"]["message"], tmp_path / "run"
    text, *uses = wanted["content"]
    called = [json.dumps({"name": use["name"], "arguments": use["input"]}) for use in uses]
    sampled = [*(text["text"] + "".join(f"<tool_call>{one}</tool_call>" for one in called)).encode(), 257]
    engine = ScriptedEngine([{"deltas": [{"ids": [token], "lps": [-0.1]} for token in sampled]}])
    async with engine.serving(), serve_proxy(run, engine) as served:
        stream = served.anthropic().messages.stream(**REQUEST)
        async with stream as events:
            message = await events.get_final_message()
    (call,) = check_run(run, engine)
    (blob,) = nodes_of(run)[call.output_node].message_blobs
    assert json.loads(open_run(run).blob(blob)) == {
        "role": "assistant",
        "content": text["text"],
        "tool_calls": [{"name": use["name"], "arguments": use["input"]} for use in uses],
    }
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]


async def test_t08_a_retry_with_forbidden_fields_changes_nothing(tmp_path):
    given, run = case("T08"), tmp_path / "run"
    steps = given["input"]["steps"]
    engine = ScriptedEngine([step["engine"] for step in steps if "engine" in step])
    statuses, tables = [], []
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for step in steps:
            body = {"model": "toy", "messages": step["send"], **step.get("extra", {})}
            statuses.append((await http.post("/x/e1/v1/chat/completions", json=body)).status_code)
            tables.append([open_run(run).table(name).to_pylist() for name in ("nodes", "calls")])
    assert statuses == given["expected"]["status"]
    assert tables[1] == tables[2] == tables[3]
    check_run(run, engine)


async def test_the_same_body_on_every_wire_of_one_execution(tmp_path):
    engine, run = ScriptedEngine([OH]), tmp_path / "run"
    reply = {"role": "assistant", "content": "Oh"}
    turns = [[*REQUEST["messages"]], [*REQUEST["messages"], reply, {"role": "user", "content": "on"}]]
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for messages in turns:
            for path in ("messages", "chat/completions", "responses", "messages"):
                answer = await http.post(f"/x/e1/v1/{path}", json={**REQUEST, "messages": messages, "input": messages})
                assert answer.status_code == 200, answer.text
    calls = check_run(run, engine)
    assert [call.extension for call in calls] == ["root", *["retry"] * 3, "bridge", *["retry"] * 3]


async def test_p05_reminders_stay_where_they_stand(tmp_path):
    given, run = case("P05"), tmp_path / "run"
    engine = ScriptedEngine(given["input"]["engine_script"])
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        for request in given["input"]["requests"]:
            assert (await http.post("/x/e1/v1/messages", json=request)).status_code == 200
    calls, nodes = check_run(run, engine), nodes_of(run)
    for before, after in itertools.pairwise(calls):
        whole = path_ids(nodes, before.output_node)
        assert path_ids(nodes, after.prompt_node)[: len(whole)] == whole
    tree = Tree.load(open_run(run), "e1")
    assert sum(node.parent_id is None for node in nodes.values()) == given["expected"]["roots"]
    assert len(nodes) - len({node.parent_id for node in nodes.values()} - {None}) == given["expected"]["leaves"]
    assert {str(call.branch_reason) for call in tree.calls} == {"None"}


@pytest.mark.parametrize("one_more", [{"n": 2}, {"top_logprobs": 2, "logprobs": True}, {"functions": [{"name": "f"}]}])
async def test_what_cannot_be_honoured_is_refused_by_the_field(tmp_path, one_more):
    engine = ScriptedEngine([OH])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai().chat.completions.create(**REQUEST, **one_more)
    assert caught.value.param == next(iter(one_more))
    assert engine.requests == []


@pytest.mark.parametrize("template", [ToyTemplate, Refusing, ByTurns])
async def test_p04_a_system_message_after_the_user(tmp_path, template):
    given, run = case("P04"), tmp_path / "run"
    engine = ScriptedEngine(given["input"]["engine_script"])
    body = json.dumps(given["input"]["request"], indent=1).encode()
    async with engine.serving(), serve_proxy(run, engine, template=template()) as served, served.http() as http:
        assert (await http.post("/x/e1/v1/messages", content=body)).status_code == given["expected"]["status"]
        assert (await http.get("/api/status")).json()["late_system"] == system_form(template())
    (call,) = check_run(run, engine)
    prompt = template().decode(path_ids(nodes_of(run), call.prompt_node))
    assert prompt.count(given["input"]["request"]["messages"][1]["content"]) == 1
    assert b"".join(open_run(run).blob(blob) for blob in call.request_blobs) == body


async def test_a_false_fork_is_a_figure_everywhere(tmp_path):
    """A stop token in the midst of an output: no template writes that, so the turn cannot be continued exactly."""
    odd = {"deltas": [{"ids": [97, 257, 98, 257], "lps": [-0.1] * 4}], "finish": {"type": "stop"}}
    engine, run = ScriptedEngine([odd, OH]), tmp_path / "run"
    async with engine.serving(), serve_proxy(run, engine) as served, served.http() as http:
        first = await served.openai().chat.completions.create(**REQUEST)
        echo = {"role": "assistant", "content": first.choices[0].message.content}
        chat = [*REQUEST["messages"], echo, {"role": "user", "content": "on"}]
        await served.openai().chat.completions.create(**{**REQUEST, "messages": chat})
        assert 'gyre_false_forks_total{check="V2"} 1.0' in (await http.get("/metrics")).text
    before, after = check_run(run, engine)
    assert (after.extension, after.branch_reason, after.fork_check[:3]) == ("fork", "template", "V2:")
    assert after.tokens_lost > 0
    found = stats(open_run(run)).trees
    assert (found.false_forks, found.false_fork_rate, dict(found.false_fork_checks)) == (1, 0.5, {"V2": 1})
    assert (found.false_fork_tokens, found.changed_echoes) == (after.tokens_lost, {})
    assert before.fork_check is None
