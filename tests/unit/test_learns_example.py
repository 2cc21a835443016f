"""The learning example: its files agree, what is held out occurs nowhere else, and its control shuffles."""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gyre_proxy.launch.tasks import load_tasks
from gyre_train.config import load_config
from gyre_train.tree_input import TrajectoryInput, TreeInput

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "learns"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return SimpleNamespace(**{name: importlib.import_module(name) for name in ("workshop", "teacher")})


def test_the_task_file_is_what_the_program_writes() -> None:
    done = subprocess.run([sys.executable, "workshop.py"], cwd=EXAMPLE, capture_output=True, text=True, check=True)
    assert done.stdout == (EXAMPLE / "tasks.toml").read_text()
    names = {task.id for task in load_tasks(EXAMPLE / "tasks.toml")}
    config = load_config(EXAMPLE / "rl.toml", [])
    assert {name for name in names if name.startswith("h")} == set(config.data.eval_tasks)
    load_config(EXAMPLE / "warm.toml", [])


def test_what_is_held_out_occurs_nowhere_else(example: SimpleNamespace) -> None:
    tasks = [task.id for task in load_tasks(EXAMPLE / "tasks.toml")]
    pairs: dict[str, set[Any]] = {"t": set(), "h": set()}
    for task in tasks:
        pairs[task[0]] |= set(example.workshop.parts_of(task))
    read = re.findall(r"part: (\w+) (\d+)", json.dumps(list(example.teacher.conversations(200, 0))))
    assert not pairs["h"] & pairs["t"]
    assert not pairs["h"] & {(material, int(number)) for material, number in read}
    assert {material for material, _ in pairs["h"]} == {material for material, _ in read}


def test_the_score_counts_parts(example: SimpleNamespace) -> None:
    workshop = example.workshop.Workshop([("oak", 12), ("wool", 13)])
    assert workshop.prompt() == "part: oak 12"
    assert workshop.call("saw", {"part": 12}) == "part: wool 13"
    assert workshop.call("saw", None) == "all done"
    assert (workshop.num_right, workshop.num_done) == (1, 2)


@dataclass(frozen=True, kw_only=True)
class Given:
    advantage: float | None
    tree: Any


def test_the_control_shuffles_the_advantages_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    control = importlib.import_module("_shuffled")

    def tree(number: int, advantage: float) -> TreeInput:
        of_it = TrajectoryInput(path_P=np.array([0, 1], np.int32), owned_O=np.array([1], np.int32), advantage=advantage)
        return TreeInput(
            execution=number, parent_N=np.array([-1, 0]), ids=(np.array([9]), np.array([number])),
            temperature_N=np.ones(2),
            trajectories=(of_it,),
        )  # fmt: skip

    given = [Given(advantage=float(n), tree=lambda number, n=n: tree(number, float(n))) for n in range(8)]
    found = control.shuffled(given, random.Random(0))
    trees = [one.tree(number) for number, one in enumerate(found)]
    advantages = [one.trajectories[0].advantage for one in trees]
    assert sorted(advantages) == list(range(8))
    assert advantages != list(range(8))
    assert [one.advantage for one in found] == advantages
    assert [int(one.ids[1][0]) for one in trees] == list(range(8)), "the tokens stay where they were"
