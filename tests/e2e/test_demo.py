"""The demo from end to end with real processes, and what must hold of the run that it leaves."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from gyre_data import open as open_run
from gyre_data.child import free_port, gyre_child
from gyre_data.execution import executions
from gyre_data.schema import NodeKind
from gyre_data.verify import verify
from gyre_train.config import ParallelConfig
from gyre_train.demo.steps import write_tasks
from gyre_train.demo.teacher import conversations
from gyre_train.lineage import base_version
from gyre_train.megatron.parallel import run_ranks
from tests.support.engines import ROOT, wait_until
from tests.support.megatron_folder import check_recorded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def gyre(*words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proxy")])}
    command = [sys.executable, "-m", "gyre_data", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "gyre-demo"
    child = gyre("demo", "--dir", str(folder), "--json")
    out, err = child.communicate(timeout=800)
    assert child.returncode == 0, err[-3000:]
    assert json.loads(out) == json.loads((folder / "demo" / "summary.json").read_text())
    return folder


@pytest.fixture(scope="module")
def summary(demo: Path) -> dict[str, object]:
    return json.loads((demo / "demo" / "summary.json").read_text())


def test_a_demo_that_is_asked_to_end_leaves_nothing_running(tmp_path: Path) -> None:
    child = gyre("demo", "--dir", str(tmp_path / "demo"), "--json")
    try:
        found = psutil.Process(child.pid)
        wait_until(lambda: bool(found.children()), "the warm-up trainer", 600)
        started = found.children(recursive=True)
        child.terminate()
        _, err = child.communicate(timeout=600)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, err.splitlines()[-1]) == (143, "gyre: SIGTERM: what the demo started is ended")
    _, alive = psutil.wait_procs(started, timeout=600)
    assert not alive


def test_the_recorded_trees_branch_in_each_way(summary: dict[str, object]) -> None:
    assert {"retry", "sub_agent", "compaction"} <= set(summary["forks"])
    assert summary["false_forks"] == 0
    assert summary["occurrences"] > summary["message_nodes"] > 0


def test_one_evaluator_failed_and_one_timeout_was_scored(demo: Path) -> None:
    run = open_run(demo)
    scores = {row["execution_id"]: row for row in run.table("scores").to_pylist()}
    failed = [row for row in scores.values() if row["status"] == "failed"]
    assert len(failed) == 1
    assert failed[0]["value"] is None
    (late,) = [info for info in executions(run).values() if info.end_reason == "harness_timeout"]
    assert scores[late.execution_id]["status"] == "scored"
    assert scores[late.execution_id]["partial"] is True


def test_training_was_exact_and_published(summary: dict[str, object]) -> None:
    assert summary["max_gradient_difference"] <= 1e-9
    assert summary["max_logprob_difference_before_publish"] < 1e-4
    assert summary["max_logprob_difference_after_publish"] < 1e-4
    assert summary["versions_served"][-1] == "run:2"
    assert summary["trained_tokens"] > 0
    assert summary["packed_tokens"] < summary["row_tokens"]


def test_the_last_execution_ran_under_the_new_weights(demo: Path) -> None:
    run = open_run(demo)
    newest = list(executions(run).values())[-1]
    spans = [
        span
        for row in run.table("nodes").to_pylist()
        if row["execution_id"] == newest.execution_id
        for span in row["policy_versions"] or ()
    ]
    assert {(span["policy_id"], span["n"]) for span in spans} == {("run", 2)}


def test_the_folder_verifies(demo: Path) -> None:
    assert verify(demo).problems == ()


def test_the_policy_was_warmed_up_on_the_very_prompts_it_sees(demo: Path) -> None:
    """The teacher's text, rendered by the trainer's tokenizer, is token for token what the proxy sends."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo / "demo" / "model-base")
    taught = []
    for record in conversations(1):
        rendered = tokenizer.apply_chat_template(
            record["messages"][:2], tools=record["tools"], add_generation_prompt=True
        )
        taught.append(tuple(rendered["input_ids"] if not isinstance(rendered, list) else rendered))
    run = open_run(demo)
    for info in executions(run).values():
        tree = run[info.execution_id].tree
        opening = [i for i in range(len(tree)) if tree.kind_N[i] == NodeKind.GENERATION_PROMPT and tree.depth_N[i] <= 2]
        assert opening
        for node in opening:
            assert tuple(int(token) for token in tree.path_ids(node)) in taught


def test_the_readmes_commands_work_on_what_the_demo_left(demo: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("gyre ")]
    assert len(commands) >= 4
    for line in commands:
        child = gyre(*shlex.split(line, comments=True)[1:], cwd=demo.parent)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, f"{line}: {err}"
        assert out.strip(), line


@pytest.mark.parametrize("tp", [1, 2])
def test_the_contract_holds_on_the_demos_own_trees(demo: Path, tp: int) -> None:
    run_ranks(check_recorded, ParallelConfig(tp=tp), str(demo), str(demo / "demo" / "model-base"))


def test_a_killed_proxy_loses_nothing_that_was_acknowledged(demo: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of the demo's recording: started again, the harnesses finish as if nothing had been."""
    base = demo / "demo" / "model-base"
    run, port, engine_port = tmp_path / "run", free_port(), free_port()
    engine = f"http://127.0.0.1:{engine_port}"
    with ExitStack() as services:
        arguments = ["engine", str(base), "--port", str(engine_port), "--weight-version", str(base_version(base))]
        services.enter_context(gyre_child(arguments, tmp_path / "engine.log", f"{engine}/ready"))
        proxy = ["proxy", "--run", str(run), "--engine", engine, "--tokenizer", str(base), "--port", str(port)]
        first = services.enter_context(ExitStack())
        first.enter_context(gyre_child(proxy, tmp_path / "proxy.log", f"http://127.0.0.1:{port}/api/status"))
        tasks = write_tasks(tmp_path / "tasks.toml")
        launcher = gyre("run", "-p", str(tasks), "--run", str(run), "-k", "2", "-j", "4", "--json")
        deadline = time.monotonic() + 120
        while (num_before := _num_calls(run)) < 4:
            assert time.monotonic() < deadline, "no calls were recorded"
            time.sleep(0.02)
        os.kill(json.loads((run / "run.json").read_text())["pid"], signal.SIGKILL)
        first.close()
        acknowledged = _rows(run, "calls")
        assert len(acknowledged) >= num_before
        services.enter_context(gyre_child(proxy, tmp_path / "proxy.log", f"http://127.0.0.1:{port}/api/status"))
        out, err = launcher.communicate(timeout=300)
        assert launcher.returncode == 0, err[-3000:]
        assert json.loads(out)["ended"] == {"finished": 4}
    calls, nodes = _rows(run, "calls"), _rows(run, "nodes")
    assert {call["call_id"] for call in acknowledged} <= {call["call_id"] for call in calls}
    assert verify(run).problems == ()
    assert all(call["fork_check"] is None for call in calls)
    ids = {node["node_id"]: np.asarray(node["token_ids"]) for node in nodes}
    assert len(ids) == len(nodes), "no node was written twice"


def _rows(run: Path, table: str) -> list[dict[str, object]]:
    return open_run(run).table(table).to_pylist()


def _num_calls(run: Path) -> int:
    return len(_rows(run, "calls")) if (run / "run.json").exists() else 0
