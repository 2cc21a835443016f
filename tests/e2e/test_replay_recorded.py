"""Router replay end to end: an engine tells its experts, the proxy records them once, the trainer replays them."""

from pathlib import Path

import httpx
import numpy as np

from gyre_data.arrays import from_table
from gyre_data.store import open as open_run
from gyre_train.loop import train
from gyre_train.metrics import read_metrics
from tests.support.engines import embedded_engine
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import nodes_of
from tests.support.training import config, tiny_experts


def converse(url: str, execution: str, turns: int) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"turn {turn} of {execution}"})
        body = {"model": "any", "max_tokens": 10, "messages": messages}
        reply = httpx.post(f"{url}/x/{execution}/v1/messages", json=body, timeout=120, trust_env=False).json()
        messages.append({"role": "assistant", "content": "".join(b.get("text", "") for b in reply["content"])})
    end = f"{url}/api/executions/{execution}/end"
    ended = httpx.post(end, json={"reason": "finished"}, timeout=120, trust_env=False)
    assert ended.status_code == 200, ended.text


def test_what_an_engine_routed_is_what_is_trained(tmp_path: Path) -> None:
    model, run = tiny_experts(tmp_path / "experts"), tmp_path / "run"
    with embedded_engine(model, "--weight-version", "tiny:0") as engine:
        refused = engine.post("/generate", {"input_ids": [1], "return_routed_experts": True,
                                            "routed_experts_start_len": -1})  # fmt: skip
        assert refused.status_code == 400
        proxy = ProxyProcess(run, engine.url, model, "--port", "0")
        try:
            for execution in ("e1", "e2"):
                converse(proxy.url, execution, 3)
        finally:
            assert proxy.stop() == 0
    covered = dict.fromkeys(nodes_of(run), 0)
    for row in from_table("routed_experts", open_run(run).table("routed_experts")):
        assert row.start == covered[row.node_id]
        covered[row.node_id] += len(row.experts) // 4
        assert np.all((row.experts >= 0) & (row.experts < 4))
    missing = sum(len(node.token_ids) - covered[name] for name, node in nodes_of(run).items())
    assert missing == 2  # the last token of either conversation
    train(config(model, tmp_path / "out", "--loss.kind=sft", "--model.router_replay=R3", runs=run))
    (step,) = read_metrics(tmp_path / "out/metrics.jsonl")
    assert step["tokens_without_routes"] == 0
    assert step["tokens_with_routes"] == step["trained_tokens"] > 30
    assert step["mismatch_max"] < 1e-4
