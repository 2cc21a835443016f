"""The elastic benchmark's report on a small made run: what it counts, and that it sees what is lost or doubled."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gyre_data import RunWriter
from gyre_data.types import Attempt, LedgerRow, Step
from gyre_sched.actions import (
    AssignMicrostep,
    Dispatch,
    Drained,
    ExecutionEnded,
    GroupReady,
    MicrostepDone,
    OpenBurst,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    ToTrain,
)
from gyre_sched.api import Query
from gyre_sched.ledger import Ledger
from tests.support.rows import START, one_execution

FLEET = """
folder = "sched"
proxy = "http://127.0.0.1:1"
queries = ["t0"]
batch_groups = 1
group_size = 1
microsteps_per_group = 1
steps = 1
base_weights = "m"
base_label = "base:0"
weights = "w"
label = "rl:{version}"

[rollout]
command = ["engine"]

[train]
command = ["satellite"]
core_command = ["core"]

[[cells]]
id = "c0"
capacity = 1
"""
PHASES = (("replies", 1.0), ("engine_stop", 2.0), ("trainer_start", 5.0))
LEDGER: list[tuple[float, Any]] = [
    (100.0, QueriesOffered(queries=(Query(id="t0"),))),
    (100.0, Dispatch(queries=("t0",), version=0)),
    (110.0, ExecutionEnded(query="t0", member=0)),
    (111.0, GroupReady(query="t0")),
    (111.0, OpenBurst(steps=1)),
    (111.0, ToTrain(cell="c0", epoch=0)),
    (112.0, Drained(cell="c0", epoch=1)),
    (120.0, SwitchDone(cell="c0", epoch=1, version=0, phases=PHASES)),
    (120.0, AssignMicrostep(cell="c0", epoch=1, key=(0, "t0", 0))),
    (121.0, MicrostepDone(cell="c0", epoch=1, key=(0, "t0", 0))),
    (125.0, StepApplied(version=1, generation=0)),
]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    found: Callable[[Path], dict[str, Any]] = importlib.import_module("_elastic_report").report
    return found


def made(folder: Path, *, steps: tuple[int, ...] = (1,)) -> Path:
    """One execution of three calls; the last one's four tokens come from two engines."""
    (folder / "sched").mkdir(parents=True)
    (folder / "fleet.toml").write_text(FLEET)
    with Ledger(folder / "sched" / "ledger.jsonl") as ledger:
        for at_s, record in LEDGER:
            ledger.append(at_s, record)
    rows = one_execution(num_calls=3)
    calls = {row.call_id: row for row in rows if hasattr(row, "attempts")}
    split = (
        Attempt(engine="a", start=0, end=2, error="left in mid-reply"),
        Attempt(engine="b", start=2, end=3),
    )
    calls["e_1_c2"] = replace(calls["e_1_c2"], attempts=split)
    with RunWriter(folder / "run") as writer:
        writer.write([calls.get(getattr(row, "call_id", ""), row) if hasattr(row, "attempts") else row for row in rows])
    work = folder / "run" / "workspaces" / "e_1" / "work"
    work.mkdir(parents=True)
    told = [{"id": f"msg_{name}", "tokens": call.output_tokens} for name, call in calls.items()]
    (work / "replies.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    with RunWriter(folder / "out") as writer:
        for step in steps:
            writer.write(trained(step))
    return folder


def trained(step: int) -> list[Any]:
    at = START + timedelta(minutes=step)
    row = LedgerRow(
        step=step, policy_id="rl", data_run="run", manifest=1, execution_id="e_1", group_id="g_1", trajectory=0,
        leaf_node="e_1_o2", owned_tokens=6, reward=0.5, advantage=0.0, score_ids=("s_e_1",), at=at,
    )  # fmt: skip
    made = Step(
        step=step, policy_id="rl", n=step, parent_policy_id="rl", parent_n=step - 1, num_executions=1,
        trained_tokens=6, at=at,
    )  # fmt: skip
    return [row, made]


def test_figures_of_a_small_run(report: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    found = report(made(tmp_path))
    assert found["wrong"] == []
    assert (found["seconds"], found["step_ends_s"], found["switching_share"]) == (25.0, [25.0], 0.36)
    train = found["switches"]["train"]
    assert found["micro_steps"] == {"c0": 1}
    assert (train["count"], train["mean_s"], found["switches"]["rollout"]["count"]) == (1, 9.0, 0)
    assert {name: one["mean_s"] for name, one in train["phases"].items()} == {**dict(PHASES), "told": 1.0}
    assert (found["replies"], found["replies_moved"], found["tokens_kept_by_moves"]) == (3, 1, 2)
    assert found["tokens_prefilled_again"] == 12 + 2  # the third call's prompt, and what the first engine had sampled
    assert found["tokens_by_version"] == {"base:0": 6}


def test_what_is_lost_or_doubled_is_told(report: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    folder = made(tmp_path, steps=(1, 2))
    file = folder / "run" / "workspaces" / "e_1" / "work" / "replies.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[1:], lines[1], '{"id": "msg_gone", "tokens": 3}']) + "\n")
    told = "\n".join(report(folder)["wrong"])
    for part in (
        "msg_gone of 3 tokens is recorded as []", "msg_e_1_c1 was given out 2 times",
        "msg_e_1_c0 is recorded and no harness got it", "execution e_1 is in steps [1, 2]",
        "the trainer's steps are [1, 2]",
    ):  # fmt: skip
        assert part in told, part
