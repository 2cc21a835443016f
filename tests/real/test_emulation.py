"""Two steps of E0, Colocate and Async with real processes: as stale as the simulator says, and never faster than it.

How much later they are is measured by benchmarks/emulation.py; a loaded machine makes every process late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_sched.cells.emulation import emulate
from gyre_sched.choose import policy
from gyre_sched.durations import TwoLevel
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate
from tests.support.training import tiny_model

pytestmark = pytest.mark.real

SCENARIO = Scenario(
    durations=TwoLevel(mean_s=1.93 * 3600, cv_query=0.213, cv_execution=0.261),
    steps=2,
    cells=4,
    batch_groups=2,
    group_size=2,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tokenizer") / "tiny")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("waterlevel", {"burst": 2, "depth": 2.0}),
        ("colocate", {"burst": 2, "depth": 2.0}),
        ("async", {"rollout_cells": 2, "depth": 2.0}),
    ],
)
def test_two_steps(tmp_path: Path, tokenizer: Path, name: str, settings: dict[str, Any]) -> None:
    lived = emulate(SCENARIO, name, settings, folder=tmp_path, tokenizer=tokenizer, hour_s=2.0)
    simulated = simulate(SCENARIO, policy(name, settings))
    assert lived.steps == 2
    assert lived.staleness == simulated.staleness_groups
    assert lived.simulated_h == simulated.hours
    assert lived.hours > 0.97 * simulated.hours
    print(f"{name}: {lived.hours:.2f} h lived, {simulated.hours:.2f} h simulated")
