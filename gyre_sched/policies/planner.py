"""A policy that looks ahead: at the end of a burst it simulates itself on the run's own durations, and takes the best.

Which way of dispatching is best depends on the tail of the durations, the timeout and the capacity (docs/scheduler.md),
all of which the ledger tells. What no plan can change is the staleness: every plan has the depth that gives `target`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gyre_sched.actions import Action
from gyre_sched.api import Params, Plan, Snapshot
from gyre_sched.fit import estimate_error, two_level
from gyre_sched.history import History, Sample
from gyre_sched.rules import in_arrival_order
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate

from .elastic import by_cohort, elastic
from .settings import checked

__all__ = ["Planner"]

_STEPS = 24
"""The most of one simulation, which ends with a window of bursts."""
_SEEDS = 2
_BATCH, _GROUP, _CELLS = 16, 16, 16
"""A larger run is planned on a smaller one of the same proportions, so that plan() takes a bounded time."""
_GROWTH = 4
"""Executions must have ended since the last plan that it is these times as many: a fit hardly moves on less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planner:
    """Waterlevel until the first burst ended, then what the simulator says is fastest at the staleness `target`."""

    target: float = 1.5
    """E[d] that no plan exceeds."""
    window: int = 2
    """The widest window of bursts that is sorted by estimates, as in Cohort; 1 keeps the order of the data."""
    theta: float = 1.0

    def __post_init__(self) -> None:
        checked(self, target=0, window=1, theta=0.1)

    def decide(self, snapshot: Snapshot) -> list[Action]:
        """As Waterlevel, by the plan that stands."""
        plan = snapshot.ledger.plan or self._plans(snapshot.params)[0]
        size = plan.window * plan.burst * snapshot.params.batch_groups
        by_estimate = partial(by_cohort, size=size, since=plan.since)
        choose = by_estimate if plan.window > 1 else in_arrival_order
        return elastic(snapshot, burst=plan.burst, outstanding=plan.outstanding, theta=self.theta, choose=choose)

    def plan(self, history: History) -> Plan | None:
        """Refit durations, costs and estimates, simulate every plan on the same seeds, and return the fastest.

        None when too little is new. At most 6 simulations of 24 steps and 6,144 executions each.
        """
        samples = history.samples()
        known = history.training_share and any(one.ended for one in samples)
        if not known or history.executions < _GROWTH * history.planned_at:
            return None
        scenario = self._forecast(history, samples)
        plans = self._plans(history.params, estimates=scenario.prediction_error >= 0)
        # Fresh seeds for every plan, so that a wrong choice does not stay one.
        seeds = range(_SEEDS * history.bursts, _SEEDS * (history.bursts + 1))
        best = min(plans, key=lambda plan: self._hours(scenario, history.params, plan, seeds))
        stands = history.plan is not None and replace(history.plan, since=0) == best
        return history.plan if stands else replace(best, since=history.dispatched)

    def _plans(self, params: Params, *, estimates: bool = False) -> list[Plan]:
        """What may be chosen, Waterlevel's own first: it wins a tie.

        E[d] = N / B - (K + 1) / 2, and N >= K B or the last step of a burst could not fill: K <= 2 E[d] + 1.
        """
        longest = int(2 * self.target + 1)
        choices = [(longest, 1)]
        if longest > 1:
            choices.append((longest - 1, 1))
        if estimates and self.window > 1:
            choices.append((longest, self.window))
        return [
            Plan(burst=burst, outstanding=int((self.target + (burst + 1) / 2) * params.batch_groups), window=window)
            for burst, window in choices
        ]

    def _hours(self, scenario: Scenario, params: Params, plan: Plan, seeds: Sequence[int]) -> float:
        """Hours a step, over whole windows of bursts: the first half of one looks better than it is."""
        bursts = plan.burst * plan.window
        steps = bursts * max(1, _STEPS // bursts)
        outstanding = plan.outstanding * scenario.batch_groups // params.batch_groups
        scaled = Plan(burst=plan.burst, outstanding=outstanding, window=plan.window)
        runs = [simulate(replace(scenario, steps=steps), self, seed=seed, plan=scaled) for seed in seeds]
        return statistics.fmean(run.hours / steps for run in runs)

    def _forecast(self, history: History, samples: Sequence[Sample]) -> Scenario:
        params, cells, costs = history.params, history.cells, history.costs
        batch, group, count = min(_BATCH, params.batch_groups), min(_GROUP, params.group_size), min(_CELLS, len(cells))
        durations = two_level(samples)
        all_s = history.training_share * durations.mean_s * params.group_size * params.batch_groups
        return Scenario(
            durations=durations,
            steps=_STEPS,
            cells=count,
            batch_groups=batch,
            group_size=group,
            microsteps_per_group=params.microsteps_per_group,
            min_rollout=min(count, params.min_rollout),
            saturation_batches=sum(cell.capacity for cell in cells) / (params.batch_groups * params.group_size),
            engine_share=history.engine_share,
            timeout_h=history.timeout_s / 3600,
            train_cell_h=all_s / 3600 * count / len(cells),
            optimiser_s=costs.optimiser_s,
            pull_s=costs.pull_s,
            publish_s=history.mean_s("publish_s"),
            to_train_s=costs.to_train_s,
            to_rollout_s=costs.to_rollout_s,
            prediction_error=estimate_error(samples, durations),
        )
