"""Two steps of the learning example on real SGLang: what is measured by benchmarks/learns.py happens at all."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

import gyre_data
from gyre_data import ledger
from gyre_data.execution import executions
from gyre_data.scores import scores_by_execution
from gyre_data.verify import verify
from gyre_train.metrics import read_metrics
from tests.support.engines import ROOT, sglang_engine

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

JAMMED, UNJUDGED = ("t09", 4), ("t07", 2)
"""Task and sample with a fault on purpose; each is in one of the two groups that make two steps."""


def test_two_steps_are_published_and_its_faults_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "proxy")]))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    learns = importlib.import_module("learns")
    model = learns.prepare(tmp_path, seed=0, steps=8, conversations=128)
    said = [
        f"--rollout.tasks={some_tasks(tmp_path)}", '--data.eval_tasks=["h00", "h01"]', "--rollout.eval_every=2",
        "--rollout.attempts=5", "--train.executions_per_step=5", "--train.steps=2",
    ]  # fmt: skip
    before = {process.pid for process in psutil.process_iter()}
    with sglang_engine(model, "--weight-version", learns.version(model)) as engine:
        found = learns.learn(tmp_path, model, seed=0, engine=engine.url, said=said)
        assert engine.get("/model_info").json()["weight_version"] == "rl:2"
    after = [one for one in psutil.process_iter(["cmdline"]) if one.pid not in before]
    assert not [one for one in after if str(tmp_path) in str(one.info["cmdline"])], "nothing is left running"
    assert [row["step"] for row in found["steps"]] == [1, 2]
    assert [(row["step"], row["version"].partition(":")[2]) for row in found["evaluations"]] == [(0, "0"), (2, "2")]
    assert all(row["scored"] == 8 for row in found["evaluations"]), "two tasks, four executions of each"
    assert not any("publish_error" in row for row in read_metrics(tmp_path / "rl" / "metrics.jsonl"))

    run = gyre_data.open(tmp_path / "rl-run")
    scores = scores_by_execution(run)
    by_name = {(info.task_id, info.sample_index): info for info in executions(run).values()}
    assert found["scores"]["failed"] >= 1
    assert [row.status for row in scores[by_name[UNJUDGED].execution_id]] == ["failed"]
    jammed = by_name[JAMMED]
    assert jammed.end_reason == "harness_timeout"
    assert [(row.status, row.partial) for row in scores[jammed.execution_id]] == [("scored", True)]
    trained = {row.execution_id for row in ledger.ledger(tmp_path / "rl")}
    assert jammed.execution_id in trained
    assert by_name[UNJUDGED].execution_id not in trained
    assert not verify(tmp_path / "rl-run").problems


def some_tasks(tmp_path: Path) -> Path:
    """The example's task file with four of its tasks, the programs still those of the example."""
    head, *tasks = (ROOT / "examples" / "learns" / "tasks.toml").read_text().split("\n[[task]]\n")
    named = {re.search(r'id = "(\w+)"', text)[1]: text for text in tasks}
    path = tmp_path / "tasks.toml"
    path.write_text(
        head.replace("{tasks}", str(ROOT / "examples" / "learns"))
        + "".join(f"\n[[task]]\n{named[name]}" for name in ("t07", "t09", "h00", "h01"))
    )
    return path
