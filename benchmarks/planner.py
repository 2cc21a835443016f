"""Planner against the best fixed policy, in four regimes of which each wants another: paired seeds.

Run: python benchmarks/planner.py [--quick] [--json]. Figures are ratios of simulated hours: load does not change them;
in full it takes about 15 minutes of one core. The best fixed policy of a regime is the one with the least mean hours
a step on the same seeds. Quickly, four seeds are run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from _frame import Bounds, Figures, run

from gyre_sched.actions import Action
from gyre_sched.api import Plan, Policy, Snapshot
from gyre_sched.durations import TwoLevel
from gyre_sched.experiment import interval
from gyre_sched.history import History
from gyre_sched.policies import CarryOver, Cohort, Planner, Waterlevel
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate

_122B = TwoLevel(mean_s=1.93 * 3600, cv_query=0.213, cv_execution=0.261)
REGIMES: Mapping[str, Scenario] = {
    "122b": Scenario(durations=_122B),
    "contention": Scenario(durations=replace(_122B, mean_s=0.83 * _122B.mean_s), saturation_batches=2.5),
    "timeout_4h": Scenario(durations=_122B, timeout_h=4.0),
    "2.4t": Scenario(durations=replace(_122B, mean_s=2.89 * 3600), timeout_h=5.8, train_cell_h=3.2),
}
FIXED: Mapping[str, Policy] = {
    "waterlevel": Waterlevel(),
    # A little deeper than its own 3.5, so that E[d] over 1.5 as that of the others.
    "carryover": CarryOver(depth=3.53),
    "cohort": Cohort(),
}
SEEDS = range(900, 916)
BOUNDS: Bounds = {f"{regime}_x_best_upper": (None, 1.03) for regime in REGIMES} | {
    "regimes_better_than_waterlevel": (2, None),
    "staleness_most": (None, 1.5),
}
STEPS = 24
"""Of a fixed policy: whole bursts of 3 and 4, whole windows of 8."""
PLANNED_STEPS = 28
"""Of the planner: a first burst of 4 before there is anything to plan on, then whole bursts or windows again. A run
that ends within a window, after its short half, looks faster than it is."""


class Timed:
    """A planner whose plans are timed."""

    def __init__(self) -> None:
        self.planner, self.seconds = Planner(), list[float]()

    def decide(self, snapshot: Snapshot) -> list[Action]:
        return self.planner.decide(snapshot)

    def plan(self, history: History) -> Plan | None:
        start = time.process_time()
        plan = self.planner.plan(history)
        if plan is not None:
            self.seconds.append(time.process_time() - start)
        return plan


def once(regime: str, seed: int) -> dict[str, float]:
    """Hours a step of every policy, and what the planner's took to plan."""
    scenario, timed = REGIMES[regime], Timed()
    hours = {
        name: simulate(replace(scenario, steps=STEPS), policy, seed=seed).hours / STEPS
        for name, policy in FIXED.items()
    }
    planned = simulate(replace(scenario, steps=PLANNED_STEPS), timed, seed=seed)
    hours["planner"] = planned.hours / PLANNED_STEPS
    return hours | {"staleness": planned.staleness_groups, "plan_s": max(timed.seconds)}


def figures(found: Mapping[str, Sequence[Mapping[str, float]]]) -> Figures:
    """Of all regimes, each with the runs of its seeds."""
    told: dict[str, float] = {}
    better = 0
    for regime, runs in found.items():
        best = min(FIXED, key=lambda name: sum(one[name] for one in runs))
        for name, against in (("best", best), ("waterlevel", "waterlevel")):
            ratio = interval([one["planner"] / one[against] for one in runs])
            told[f"{regime}_x_{name}"], told[f"{regime}_x_{name}_upper"] = ratio.mean, ratio.upper
        better += told[f"{regime}_x_waterlevel_upper"] < 1
        for name in FIXED:
            told[f"{regime}_{name}_step_h"] = sum(one[name] for one in runs) / len(runs)
    every = [one for runs in found.values() for one in runs]
    told["regimes_better_than_waterlevel"] = better
    told["staleness_most"] = max(one["staleness"] for one in every)
    told["plan_cpu_s_most"] = max(one["plan_s"] for one in every)
    return told


def measure(folder: Path, quick: bool) -> Figures:
    seeds = SEEDS[:4] if quick else SEEDS
    return figures({regime: [once(regime, seed) for seed in seeds] for regime in REGIMES})


if __name__ == "__main__":
    sys.exit(run("planner", __doc__ or "", BOUNDS, measure))
