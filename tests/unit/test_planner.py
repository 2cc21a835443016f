"""The planner: it refits what was simulated, its plans hold the staleness, and planning takes a bounded time."""

import random
from dataclasses import replace

import pytest

from gyre_sched.actions import Action, Dispatch, Event, Planned, QueriesOffered
from gyre_sched.api import Cell, Params, Plan, Query
from gyre_sched.durations import TwoLevel
from gyre_sched.errors import ScenarioError
from gyre_sched.fit import estimate_error, two_level
from gyre_sched.history import History, Sample
from gyre_sched.invariants import Invariants
from gyre_sched.policies import Planner, Waterlevel
from gyre_sched.policies import planner as module
from gyre_sched.policies.elastic import by_cohort
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import Simulation, simulate
from gyre_sched.state import State

DURATIONS = TwoLevel(mean_s=3600.0, cv_query=0.3, cv_execution=0.4)
SMALL = Scenario(
    durations=DURATIONS, steps=8, cells=4, batch_groups=8, group_size=8, train_cell_h=1.5, timeout_h=2.5, publish_s=7.0
)


@pytest.mark.parametrize("timeout_h", [10.0, 1.8])
def test_the_fit_finds_what_was_drawn_though_a_timeout_cuts_it(timeout_h: float) -> None:
    rng, timeout_s = random.Random(1), timeout_h * 3600
    samples = []
    for _ in range(400):
        seconds = DURATIONS.draw(rng, 16).seconds
        ended = [one for one in seconds if one < timeout_s]
        samples.append(Sample(predicted_s=None, started_s=0.0, ended=ended, cut=[timeout_s] * (16 - len(ended))))
    found = two_level(samples)
    assert found.mean_s == pytest.approx(3600, rel=0.03)
    assert (found.cv_query, found.cv_execution) == pytest.approx((0.3, 0.4), rel=0.1)
    with pytest.raises(ScenarioError, match="after the first burst"):
        two_level([Sample(predicted_s=None, started_s=0.0, cut=[60.0])])


class Listens(Waterlevel):
    """Keeps the history that a planner is given, and plans nothing."""

    seen: History

    def plan(self, history: History) -> None:
        Listens.seen = history


@pytest.mark.parametrize("saturation", [4.0, 2.0])
def test_a_history_tells_durations_and_costs_of_the_run(saturation: float) -> None:
    """With contention too: executions took longer, but what they would take alone is what is simulated next."""
    scenario = replace(SMALL, saturation_batches=saturation, steps=24, timeout_h=9.0)
    simulate(scenario, Listens(), seed=3)
    history = Listens.seen
    found = two_level(history.samples())
    assert found.mean_s == pytest.approx(3600, rel=0.1)
    assert (found.cv_query, found.cv_execution) == pytest.approx((0.3, 0.4), abs=0.07)
    assert estimate_error(history.samples(), found) == pytest.approx(0.1, abs=0.05)
    costs = history.costs
    told = (costs.to_train_s, costs.to_rollout_s, costs.optimiser_s, costs.pull_s, history.mean_s("publish_s"))
    assert told == pytest.approx((8.52, 3.46, 60.0, 10.0, 7.0))
    # All cells train 1.5 cell-hours a step of 64 executions of an hour.
    assert history.training_share == pytest.approx(1.5 / 64, rel=1e-6)


def test_a_group_that_took_no_time_says_nothing_of_estimates() -> None:
    """A clock that was set back, or work that was heard of all at once by the controller that came back."""
    at_once = [Sample(predicted_s=60.0, started_s=0.0, ended=[0.0, 0.0]) for _ in range(3)]
    assert estimate_error(at_once, DURATIONS) == -1.0


def test_executions_that_still_run_are_not_left_out() -> None:
    """They are the longest: a fit without them would be of the short ones."""
    history = History(State(Params(batch_groups=1, group_size=2), [CORE]), timeout_s=9e9, engine_share=0.6)
    history._open["q"] = Sample(predicted_s=None, started_s=100.0, ended=[50.0], left={1})
    history.progress_s = 400.0
    (sample,) = history.samples()
    assert (sample.ended, sample.cut) == ([50.0], [300.0])


CORE = Cell(id="c0", position=0, capacity=4, core=True)


@pytest.mark.parametrize("target", [0.0, 0.5, 1.5, 2.2])
def test_every_plan_has_the_depth_of_the_target_and_bursts_that_fill(target: float) -> None:
    params = Params(batch_groups=8, group_size=4)
    for plan in Planner(target=target)._plans(params, estimates=True):
        assert plan.outstanding / 8 - (plan.burst + 1) / 2 <= target
        assert plan.outstanding >= plan.burst * 8
    assert Planner()._plans(params)[0] == Plan(burst=4, outstanding=32)


def test_it_plans_after_the_first_burst_and_keeps_the_staleness() -> None:
    told: list[Action | Event] = []
    simulation = Simulation(SMALL, Planner(), seed=2)
    rules = Invariants(simulation, also=lambda now_s, record: told.append(record))
    while simulation.state.version < SMALL.steps:
        simulation.advance()
        rules.check()
    plans = [record for record in told if isinstance(record, Planned)]
    assert len(plans) == 1  # the second burst brings no four times as many executions
    assert simulation.state.groups.plan == plans[0].plan
    assert simulation.measured().staleness_groups <= 1.5


def test_the_choice_is_the_fastest_of_its_own_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = {(4, 1): 3.0, (3, 1): 2.0, (4, 2): 2.5}
    monkeypatch.setattr(Planner, "_hours", lambda self, scenario, params, plan, seeds: hours[plan.burst, plan.window])
    simulate(SMALL, Listens(), seed=3)
    history = Listens.seen
    assert Planner().plan(history) == Plan(burst=3, outstanding=28, since=history.dispatched)
    hours[4, 2] = 1.0
    assert Planner(window=1).plan(history) == Plan(burst=3, outstanding=28, since=history.dispatched)
    assert Planner().plan(history) == Plan(burst=4, outstanding=32, window=2, since=history.dispatched)
    history.state.groups.plan = stands = Plan(burst=4, outstanding=32, window=2, since=32)
    assert Planner().plan(history) == stands  # its windows go on


def test_nothing_is_planned_on_what_nothing_finished_of() -> None:
    simulate(SMALL, Listens(), seed=3)
    history = Listens.seen
    for sample in history._done:
        sample.cut += sample.ended
        sample.ended.clear()
    assert Planner().plan(history) is None


def test_windows_are_counted_from_the_plan() -> None:
    """A window that began before it would be half used up, and what is left of it sorted alone."""
    state = State(Params(batch_groups=1, group_size=1), [CORE])
    queries = tuple(Query(id=f"q{i}", predicted_s=float(9 - i)) for i in range(9))
    state.apply(QueriesOffered(queries=queries), 0.0)
    state.apply(Dispatch(queries=("q0", "q1", "q2"), version=0), 0.0)
    snapshot = state.snapshot(0.0)
    assert [one.id for one in by_cohort(snapshot, 3, size=4, since=3)] == ["q6", "q5", "q4"]
    assert [one.id for one in by_cohort(snapshot, 3, size=4)] == ["q3", "q7", "q6"]


def test_where_the_timeout_cuts_the_tail_it_awaits_all() -> None:
    """CarryOver is 1.2 times slower where most queries end at the timeout."""
    scenario = replace(SMALL, batch_groups=4, group_size=4, timeout_h=1.1, steps=4)
    simulate(scenario, Listens(), seed=3)
    chosen = Planner(window=1).plan(Listens.seen)
    assert chosen is not None
    assert chosen.burst == 4


def test_a_plan_of_a_large_run_is_made_on_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Scenario] = []
    policies = set()

    def simulated(scenario: Scenario, policy: Planner, **more: object) -> object:
        runs.append(scenario)
        policies.add(policy)
        return simulate(replace(scenario, steps=1), policy)

    scenario = replace(SMALL, cells=40, batch_groups=80, group_size=4, train_cell_h=30.0, steps=4)
    simulate(scenario, Listens(), seed=3)
    monkeypatch.setattr(module, "simulate", simulated)
    planner = Planner()
    planner.plan(Listens.seen)
    assert policies == {planner}  # what decides in the forecast is what decides in the run
    assert len(runs) == 6
    assert sum(one.steps * one.batch_groups * one.group_size for one in runs) <= 6 * 6144
    for one in runs:
        assert (one.cells, one.batch_groups) == (16, 16)
        assert one.saturation_batches == pytest.approx(4.0)
        assert one.train_cell_h / one.cells == pytest.approx(30.0 / 40, rel=0.2)  # a step takes as long
