"""Cells that serve with `gyre engine` and train with `gyre train` and a satellite, under a real controller.

Two steps of Waterlevel with bursts of one: both cells serve a group, leave, share a step, and serve what it made.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from gyre_data import ledger as trained
from gyre_sched.actions import CellFailed, StepApplied, SwitchDone, WeightsPublished
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.settings import to_toml
from gyre_sched.ledger import read
from tests.support.engines import embedded_engine
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import nodes_of
from tests.support.training import tiny_model

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

STEPS, SIZE = 2, 2


def harnesses(url: str, over: threading.Event) -> None:
    """Claim, call once, end, judge, until it is over."""
    with httpx.Client(timeout=300, trust_env=False) as http:
        while not over.wait(0.2):
            for one in http.post(f"{url}/api/executions/claim", json={"limit": 8}).json()["executions"]:
                ask = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": one["task"]}]}
                answer = http.post(f"{one['base_url']}/v1/messages", json=ask, headers={"x-api-key": one["key"]})
                assert answer.status_code == 200, answer.text
                http.post(f"{url}/api/executions/{one['id']}/end", json={"reason": "finished"})
                verdict = {"evaluator": "toy", "status": "scored", "value": float(one["sample_index"])}
                http.post(f"{url}/api/executions/{one['id']}/scores", json=verdict)


def settings(folder: Path, model: Path, proxy: ProxyProcess) -> dict[str, object]:
    gyre, out = [sys.executable, "-m", "gyre_data"], folder / "out"
    train = [
        f"--model.path={model}", f'--data.runs=["{proxy.run}"]', f'--data.live=["{proxy.run}"]', "--train.steps=9",
        f"--train.executions_per_step={SIZE}", "--train.lr=1e-3", f"--output.dir={out}", "--output.policy_id=rl",
        "--stream.satellites=true", "--stream.controlled=true", "--stream.parts=2", "--stream.host={host}",
        "--stream.port={port}", "--output.keep=9",
    ]  # fmt: skip
    (folder / "empty.toml").touch()
    engine = ["engine", "{weights}", "--port", "{port}", "--threads", "1", "--weight-version", "{label}"]
    return {
        "folder": str(folder / "sched"), "proxy": proxy.url, "queries": ["t0", "t1", "t2"], "batch_groups": 1,
        "group_size": SIZE, "microsteps_per_group": 2, "steps": STEPS, "base_weights": str(model),
        "base_label": "tiny:0", "weights": f"{out}/checkpoints/step-{{version:08}}", "label": "rl:{version}",
        "policy_settings": {"burst": 1, "depth": 1.0},
        "cells": [{"id": "c0", "capacity": 2}, {"id": "c1", "capacity": 2}],
        "rollout": {"command": [*gyre, *engine]},
        "train": {
            "core_command": [*gyre, "train", str(folder / "empty.toml"), *train],
            "command": [
                sys.executable, "-m", "gyre_train.streaming.satellite", str(out), "--name", "{cell}",
                "--listen", "{host}:{port}",
            ],
        },
    }  # fmt: skip


def test_two_cells_serve_and_share_steps_in_turns(tmp_path: Path) -> None:
    model, over = tiny_model(tmp_path / "tiny"), threading.Event()
    with embedded_engine(model, "--weight-version", "tiny:0") as first:
        proxy = ProxyProcess(tmp_path / "run", first.url, model, "--port", "0")
        httpx.post(f"{proxy.url}/api/engines", json={"action": "drain", "url": first.url}, trust_env=False)
        file = tmp_path / "fleet.toml"
        file.write_text(to_toml(settings(tmp_path, model, proxy)))
        harness = threading.Thread(target=harnesses, args=(proxy.url, over))
        harness.start()
        try:
            command = [sys.executable, "-m", "gyre_sched.cells", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        finally:
            over.set()
            harness.join()
            place = LocalProcesses(tmp_path / "sched" / "cells")
            for cell in ("c0", "c1"):
                place.release(cell)
            proxy.stop()
    records = [record for _, record in read(tmp_path / "sched" / "ledger.jsonl")]
    # A satellite that is not ready when the core leaves has nothing to join: it ends, and its cell serves again.
    assert {record.cell for record in records if isinstance(record, CellFailed)} <= {"c1"}
    assert [record.version for record in records if isinstance(record, StepApplied)] == [1, 2]
    assert [record.version for record in records if isinstance(record, WeightsPublished)] == [1]
    assert sum(isinstance(record, SwitchDone) and record.cell == "c0" for record in records) == 2 * STEPS - 1
    rows = [(row.step, row.execution_id) for row in trained.ledger(tmp_path / "out")]
    assert len({name for _, name in rows}) == STEPS * SIZE  # each execution in one step
    assert len(set(rows)) == STEPS * SIZE
    spans = [span for node in nodes_of(tmp_path / "run").values() for span in node.policy_versions or ()]
    sampled = Counter((span.policy_id, span.n) for span in spans)
    assert (sampled["tiny", 0], sampled["rl", 1]) == (SIZE, SIZE)
