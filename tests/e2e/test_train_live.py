"""Training while it is recorded, with an engine, a proxy and a trainer in processes of their own."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from gyre_data import ledger
from gyre_data.verify import verify
from gyre_train.metrics import read_metrics
from tests.support.engines import embedded_engine
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import calls_of, nodes_of
from tests.support.training import tiny_model

STEPS = 3


def post(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=300, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def record_group(url: str, number: int) -> None:
    """Two executions of one task, a call and a verdict each."""
    group = post(f"{url}/api/groups", {"id": f"g{number}", "task": f"t{number}", "size": 2})["id"]
    for index in range(2):
        made = post(f"{url}/api/executions", {"task": f"t{number}", "group": group, "sample_index": index})
        ask = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": f"task {number}"}]}
        answer = httpx.post(
            f"{made['base_url']}/v1/messages", json=ask, headers={"x-api-key": made["key"]}, timeout=300,
            trust_env=False,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        post(f"{url}/api/executions/{made['id']}/end", {"reason": "finished"})
        verdict = {"evaluator": "toy", "status": "scored", "value": float(index)}
        post(f"{url}/api/executions/{made['id']}/scores", verdict)


def test_each_group_is_trained_and_the_next_is_sampled_by_what_it_made(tmp_path: Path) -> None:
    model, run, out = tiny_model(tmp_path / "tiny"), tmp_path / "run", tmp_path / "out"
    with embedded_engine(model, "--weight-version", "tiny:0") as engine:
        proxy = ProxyProcess(run, engine.url, model, "--port", "0")
        settings = [
            f"--model.path={model}", f'--data.runs=["{run}"]', f'--data.live=["{run}"]', f"--train.steps={STEPS}",
            "--train.executions_per_step=2", "--train.lr=1e-3", f"--output.dir={out}", "--output.policy_id=rl",
            f'--publish.engines=["{engine.url}"]', f"--publish.proxy={proxy.url}",
        ]  # fmt: skip
        (tmp_path / "empty.toml").touch()
        trainer = subprocess.Popen(
            [sys.executable, "-m", "gyre_data", "train", str(tmp_path / "empty.toml"), *settings],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            for number in range(STEPS):
                record_group(proxy.url, number)
                while httpx.get(f"{engine.url}/model_info", timeout=300).json()["weight_version"] != f"rl:{number + 1}":
                    assert trainer.poll() is None, trainer.communicate()[1]
                    time.sleep(0.1)
            told = trainer.communicate(timeout=120)[1]
            assert trainer.returncode == 0, told
        finally:
            trainer.kill()
            assert proxy.stop() == 0
    assert "step 2: 0 of 2 executions; waiting for more to be complete in run run" in told
    assert "published rl:1 to 1 of 1 engine in " in told
    groups = [{row.group_id for row in ledger.ledger(out) if row.step == step} for step in range(1, STEPS + 1)]
    assert groups == [{"g0"}, {"g1"}, {"g2"}]
    assert len({row.execution_id for row in ledger.ledger(out)}) == 2 * STEPS
    sampled_by = [nodes_of(run)[call.output_node].policy_versions[0] for call in calls_of(run) if call.output_node]
    assert [(span.policy_id, span.n) for span in sampled_by[::2]] == [("tiny", 0), ("rl", 1), ("rl", 2)]
    rows = read_metrics(out / "metrics.jsonl")
    assert all(row["mismatch_max"] < 1e-3 for row in rows)  # whatever weights sampled them: those that train them
    assert all(row["rollout_seconds"] > 0 for row in rows[1:])
    assert [row.get("mismatch_age_0") is not None for row in rows[1:]] == [True, True]  # paced: nothing is stale
    assert not verify(run).problems
