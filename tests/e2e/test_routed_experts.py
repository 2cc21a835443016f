"""Routed experts: kept once for each token, with the node it lies in, whatever engines and restarts come between."""

import base64
import json

import numpy as np
import pytest

from gyre_data.arrays import from_table
from gyre_data.errors import EngineError
from gyre_data.store import open as open_run
from gyre_proxy.experts import ExpertShape, KnownExperts, Routing
from tests.support import toy_tokenizer as toy
from tests.support.proxy_server import check_run, nodes_of, serve_proxy
from tests.support.telling_engine import Policy, TellingEngine, routed

TEXT = "one two three four"


def engine_of(policy, number, folder):
    engine = TellingEngine(policy, number)
    engine.facts = {"model_path": str(folder), "enable_return_routed_experts": True}
    return engine


def chat(num_turns):
    turns = [[{"role": "user", "content": f"go {i}"}, {"role": "assistant", "content": TEXT}] for i in range(num_turns)]
    return {"model": "toy", "max_tokens": 64, "messages": [m for turn in turns for m in turn][:-1]}


async def test_experts_are_kept_once_over_turns_siblings_engines_and_restarts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_experts_per_tok": 3}))
    policy, run = Policy(lambda prompt: [*toy.encode(TEXT), 257]), tmp_path / "run"
    one, two = (engine_of(policy, number, tmp_path) for number in range(2))
    async with one.serving(), two.serving():
        async with serve_proxy(run, one, two) as served, served.http() as http:
            await http.post("/x/e1/v1/messages", json=chat(1))
            await http.post("/x/e1/v1/messages", json=chat(1))  # a sibling
            one.faults = [7]
            await http.post("/x/e1/v1/messages", json=chat(2))
        async with serve_proxy(run, one, two) as served, served.http() as http:
            await http.post("/x/e1/v1/messages", json=chat(3))
    calls, nodes = check_run(run, one, two), nodes_of(run)
    assert [len(call.attempts) for call in calls] == [1, 1, 2, 1]
    rows = from_table("routed_experts", open_run(run).table("routed_experts"))
    covered, by = {}, {}
    for row in rows:
        node = nodes[row.node_id]
        assert (row.num_layers, row.top_k) == (2, 3)
        num_tokens = len(row.experts) // 6
        assert (row.start or 0) == covered.get(row.node_id, 0)  # in order, without a gap, each once
        covered[row.node_id] = (row.start or 0) + num_tokens
        positions = node.start_pos + row.start + np.arange(num_tokens)
        assert row.experts.tolist() == routed(positions).reshape(-1).tolist()
        by.setdefault(row.node_id, []).append(row.call_id)
    first, _, second, third = calls
    continued = second.continues_from
    for node in nodes.values():
        missing = len(node.token_ids) - covered[node.node_id]
        leaf = node.node_id in (call.output_node for call in calls if call.call_id not in (continued, second.call_id))
        assert missing == (1 if leaf else 0)  # the last token of a reply was an input to those that go on from it
    assert by[first.prompt_node] == [first.call_id]
    assert by[second.output_node] == [second.call_id, third.call_id]


async def test_engines_without_experts_are_not_asked_for_them(tmp_path):
    policy, run = Policy(lambda prompt: [*toy.encode(TEXT), 257]), tmp_path / "run"
    one = engine_of(policy, 0, tmp_path / "no-config")
    async with one.serving(), serve_proxy(run, one) as served, served.http() as http:
        assert (await http.post("/x/e1/v1/messages", json=chat(1))).status_code == 200
    assert "return_routed_experts" not in one.requests[0]
    assert open_run(run).table("routed_experts").num_rows == 0


async def test_experts_of_another_size_are_left_out_and_the_reply_is_good(tmp_path, caplog):
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 5, "num_experts_per_tok": 3}})
    )
    policy, run = Policy(lambda prompt: [*toy.encode(TEXT), 257]), tmp_path / "run"
    one = engine_of(policy, 0, tmp_path)
    async with one.serving(), serve_proxy(run, one) as served, served.http() as http:
        assert (await http.post("/x/e1/v1/messages", json=chat(1))).status_code == 200
    assert "wanted routed experts for (token, layer, k)" in caplog.text
    assert open_run(run).table("routed_experts").num_rows == 0
    assert len(check_run(run, one)) == 1


def test_what_is_no_routing_is_refused():
    shape = ExpertShape(num_layers=1, top_k=2)
    with pytest.raises(EngineError, match="base64"):
        Routing.read("no base64!", shape, 0, 1)
    with pytest.raises(EngineError, match=r"\(2, 1, 2\), got 2 values"):
        Routing.read(base64.b64encode(np.arange(2, dtype=np.int32)).decode(), shape, 0, 2)


def test_a_gap_is_not_papered_over():
    known = KnownExperts()
    routing = Routing(start=3, experts=np.zeros((4, 1, 1), np.int16))
    rows = known.rows("c", [("a", 0, 5), ("b", 5, 9)], routing)
    assert [(row.node_id, row.start, len(row.experts)) for row in rows] == [("b", 0, 2)]
    assert known.unknown_from([("a", 0, 5), ("b", 5, 9)]) == 0
