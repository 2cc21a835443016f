"""I1-I12 as a state machine: time passes, cells fail, groups are given up, messages come twice or late."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gyre_sched.actions import (
    Action,
    CellFailed,
    Event,
    GroupDropped,
    MicrostepDone,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
)
from gyre_sched.api import Role
from gyre_sched.durations import TwoLevel
from gyre_sched.invariants import Invariants
from gyre_sched.policies import Async, CarryOver, Cohort, Colocate, Planner, Waterlevel
from gyre_sched.scenario import Failures, Scenario
from gyre_sched.simulate import Simulation
from gyre_sched.state import Refusal

POLICIES = [
    Waterlevel(),
    Waterlevel(burst=1, depth=2.5),
    Waterlevel(theta=0.75),
    CarryOver(),
    Cohort(),
    Planner(),
    Colocate(burst=2, depth=2.0),
    Async(rollout_cells=1, streaming=True),
]


class Cluster(RuleBasedStateMachine):
    """A simulation that is disturbed between events."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        cells=st.sampled_from([3, 4, 8]),
        saturation=st.sampled_from([1.5, 4.0]),
        seed=st.integers(0, 99),
    )
    def start(self, policy: Waterlevel, cells: int, saturation: float, seed: int) -> None:
        scenario = Scenario(
            durations=TwoLevel(mean_s=3600.0, cv_query=0.3, cv_execution=0.4),
            steps=10_000,
            cells=cells,
            batch_groups=2,
            group_size=2,
            saturation_batches=saturation,
            train_cell_h=1.5,
            timeout_h=2.5,
            failures=Failures(repair_h=0.2),
        )
        self.simulation = Simulation(scenario, policy, seed=seed)
        self.told: list[Action | Event] = []
        self.rules = Invariants(self.simulation, also=lambda now_s, record: self.told.append(record))

    @rule(events=st.integers(1, 25))
    def time_passes(self, events: int) -> None:
        for _ in range(events):
            self.simulation.advance()
            self.rules.check()

    @rule(which=st.integers(0, 7))
    def a_cell_fails(self, which: int) -> None:
        cells = list(self.simulation.state.cells.values())
        cell = cells[which % len(cells)]
        if cell.role is not Role.DOWN:
            self.simulation.tell(CellFailed(cell=cell.id, epoch=cell.epoch))
            self.simulation.settle()

    @rule()
    def a_group_is_given_up(self) -> None:
        waiting = [group.query for group in self.simulation.state.groups.outstanding.values() if not group.ready]
        if waiting:
            self.simulation.tell(GroupDropped(query=waiting[0], reason="evaluator failed"))
            self.simulation.settle()

    @rule(back=st.integers(0, 30))
    def a_message_comes_again(self, back: int) -> None:
        """I9: whatever carries an epoch, a version or a member was applied once; its copy changes nothing."""
        once = (MicrostepDone, SwitchDone, StepApplied, CellFailed, ToTrain, ToRollout)
        old = [record for record in self.told if isinstance(record, once)]
        if old:
            state = self.simulation.state
            seq = state.seq
            assert state.apply(old[-1 - back % len(old)], self.simulation.now_s) is Refusal.STALE
            assert state.seq == seq

    @invariant()
    def the_rules_hold(self) -> None:
        if hasattr(self, "rules"):
            self.rules.check()


Cluster.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCluster = Cluster.TestCase


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: repr(one)[:40])
def test_a_replayed_log_gives_the_same_state(policy: Waterlevel) -> None:
    scenario = Scenario(
        durations=TwoLevel(mean_s=3600.0, cv_query=0.3, cv_execution=0.4),
        steps=4,
        cells=4,
        batch_groups=2,
        group_size=2,
        train_cell_h=1.5,
        failures=Failures(mean_between_h=5.0),
    )

    class Still:
        def decide(self, snapshot: object) -> list[Action]:
            return []

    simulation = Simulation(scenario, Still(), seed=5)
    rules = Invariants(simulation)
    simulation.policy = policy
    simulation.settle()
    while simulation.state.version < 4:
        simulation.advance()
    ours = rules.replayed().snapshot(simulation.now_s)
    theirs = simulation.state.snapshot(simulation.now_s)
    assert (ours.cells, ours.step, ours.ready, ours.ledger) == (theirs.cells, theirs.step, theirs.ready, theirs.ledger)
    assert policy.decide(ours) == policy.decide(theirs)
