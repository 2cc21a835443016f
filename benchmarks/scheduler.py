"""Speed of the simulator and of decide(): 48 steps on 8 cells, and 1,000 cells with 100,000 executions.

Run: python benchmarks/scheduler.py [--quick] [--json]. Times are CPU seconds of one core. Quickly, a tenth of the large
case is run (100 cells, 10,000 executions); its decide() is held to the bounds of the large one.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from _frame import Bounds, Figures, run

from gyre_sched.actions import Action
from gyre_sched.api import Policy, Snapshot
from gyre_sched.durations import TwoLevel
from gyre_sched.policies import Waterlevel
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate

BOUNDS: Bounds = {
    "small_cpu_s": (None, 2.0),
    "large_cpu_s": (None, 300.0),
    "decide_mean_ms": (None, 0.5),
    "decide_p99_ms": (None, 5.0),
}


class Timed:
    """A policy whose calls are timed."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seconds: list[float] = []

    def decide(self, snapshot: Snapshot) -> list[Action]:
        start = time.process_time()
        actions = self.policy.decide(snapshot)
        self.seconds.append(time.process_time() - start)
        return actions


def measure(folder: Path, quick: bool) -> Figures:
    durations = TwoLevel(mean_s=1.93 * 3600, cv_query=0.213, cv_execution=0.261)
    start = time.process_time()
    simulate(Scenario(durations=durations), Waterlevel())
    small_s = time.process_time() - start
    scale = 10 if quick else 1
    # 16 steps x 391 groups x 16 executions; a step's work grows with its batch.
    batch = 391 // scale
    large = Scenario(
        durations=durations,
        steps=16,
        cells=1000 // scale,
        batch_groups=batch,
        train_cell_h=4.85 * batch / 32,
    )
    timed = Timed(Waterlevel())
    start = time.process_time()
    found = simulate(large, timed)
    large_s = time.process_time() - start
    calls = sorted(timed.seconds)
    return {
        "small_cpu_s": small_s,
        "large_cpu_s": large_s,
        "large_executions": found.executions,
        "decide_calls": len(calls),
        "decide_mean_ms": 1e3 * sum(calls) / len(calls),
        "decide_p99_ms": 1e3 * calls[len(calls) * 99 // 100],
    }


if __name__ == "__main__":
    sys.exit(run("scheduler", __doc__ or "", BOUNDS, measure))
