"""E0, Colocate and Async lived through by real processes, against the simulator's forecast: 12 steps on 8 cells.

Run: python benchmarks/emulation.py [--quick] [--json]. Controller, ledger, proxy and cells are the real ones; engines,
trainers and harnesses only sleep, an hour in 15 seconds (6 quickly). Batches are 8 groups of 4 executions, durations
those of the published 122B runs, seed 0. `simulated` is with the scenario's own costs of switches and steps, `replayed`
with the means of those that the ledger shows. A quick run takes about 7 minutes, most of which is sleep; a loaded
machine makes processes late, and with them the hours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _frame import Bounds, Figures, run

from gyre_sched.cells.emulation import emulate
from gyre_sched.durations import TwoLevel
from gyre_sched.scenario import Scenario
from gyre_train.tiny import make_tiny

POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "e0": ("waterlevel", {}),
    "colocate": ("colocate", {}),
    "async": ("async", {"rollout_cells": 4, "depth": 2.72}),
}
SCENARIO = Scenario(
    durations=TwoLevel(mean_s=1.93 * 3600, cv_query=0.213, cv_execution=0.261),
    steps=12,
    cells=8,
    batch_groups=8,
    group_size=4,
)
SEED = 0
HOUR_S, QUICK_HOUR_S = 15.0, 6.0
BOUNDS: Bounds = {f"{name}_x_simulated": (0.95, 1.05) for name in POLICIES} | {
    "colocate_x_e0": (1.0, None),
    "async_x_colocate": (1.0, None),
}


def measure(folder: Path, quick: bool) -> Figures:
    tokenizer = make_tiny(folder / "tokenizer", texts=("the quick brown fox",))
    figures: dict[str, float] = {}
    for name, (policy, settings) in POLICIES.items():
        lived = emulate(
            SCENARIO, policy, settings, folder=folder / name, tokenizer=tokenizer, seed=SEED,
            hour_s=QUICK_HOUR_S if quick else HOUR_S,
        )  # fmt: skip
        figures[f"{name}_h"], figures[f"{name}_simulated_h"] = lived.hours, lived.simulated_h
        figures[f"{name}_x_simulated"] = lived.hours / lived.simulated_h
        figures[f"{name}_x_replayed"] = lived.hours / lived.replayed_h
        figures[f"{name}_staleness"] = lived.staleness
    figures["colocate_x_e0"] = figures["colocate_h"] / figures["e0_h"]
    figures["async_x_e0"] = figures["async_h"] / figures["e0_h"]
    figures["async_x_colocate"] = figures["async_h"] / figures["colocate_h"]
    return figures


if __name__ == "__main__":
    sys.exit(run("emulation", __doc__ or "", BOUNDS, measure))
