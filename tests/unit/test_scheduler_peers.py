"""What went wrong in other schedulers, on the state and the policies that real cells and the simulator share."""

import pytest

from gyre_sched.actions import (
    CellFailed,
    CellRecovered,
    Dispatch,
    Drained,
    Event,
    ExecutionEnded,
    GroupDropped,
    GroupReady,
    MicrostepDone,
    OpenBurst,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
    WeightsPublished,
)
from gyre_sched.api import Cell, Params, Query, Role
from gyre_sched.controller import Task, duties
from gyre_sched.durations import TwoLevel
from gyre_sched.policies import Async, Waterlevel
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import simulate
from gyre_sched.state import Refusal, State


def cluster(cells: int = 3, capacity: int = 4) -> State:
    params = Params(batch_groups=2, group_size=2, microsteps_per_group=1)
    state = State(params, [Cell(id=f"c{i}", position=i, capacity=capacity, core=i == 0) for i in range(cells)])
    state.apply(QueriesOffered(queries=tuple(Query(id=f"q{i}") for i in range(200))), 0.0)
    return state


def tell(state: State, *records: Event | ToTrain | ToRollout | Dispatch | OpenBurst) -> None:
    for record in records:
        assert state.apply(record, 0.0) is None, record


def to_train(state: State, cell: str) -> None:
    tell(state, ToTrain(cell=cell, epoch=state.cells[cell].epoch))
    epoch = state.cells[cell].epoch
    tell(state, Drained(cell=cell, epoch=epoch), SwitchDone(cell=cell, epoch=epoch, version=state.version))


def ready(state: State, *queries: str) -> None:
    for query in queries:
        tell(state, *(ExecutionEnded(query=query, member=m) for m in (0, 1)), GroupReady(query=query))


def settle(state: State, policy: Waterlevel | Async) -> None:
    for _ in range(20):
        actions = policy.decide(state.snapshot(0.0))
        if not actions:
            return
        for action in actions:
            assert state.apply(action, 0.0) is not Refusal.UNSAFE
    raise AssertionError("does not settle")


@pytest.mark.parametrize("depth", [1.5, 2.5, 3.5])
def test_depth_sets_the_mean_and_nothing_is_discarded(depth: float) -> None:
    """AReaL, tinker-cookbook 822: a cap on submissions put the mean at the bound; stale groups were thrown away."""
    scenario = Scenario(
        durations=TwoLevel(mean_s=3600.0, cv_query=0.2, cv_execution=0.3),
        steps=40,
        batch_groups=4,
        group_size=4,
        train_cell_h=1.0,
    )
    found = simulate(scenario, Waterlevel(burst=1, depth=depth))
    assert found.staleness_groups == pytest.approx(depth - 1, abs=0.15)


def test_roles_change_however_many_executions_wait() -> None:
    """verl 7990, 7587: control calls starved behind generation when requests outnumbered what engines take at once."""
    state = cluster(cells=3, capacity=1)
    tell(state, Dispatch(queries=tuple(f"q{i}" for i in range(150)), version=0))
    assert state.snapshot(0.0).unfinished == 300
    to_train(state, "c1")
    tell(state, ToRollout(cell="c1", epoch=state.cells["c1"].epoch))
    assert state.cells["c1"].role is Role.TO_ROLLOUT


def test_a_cell_serves_only_when_its_swap_is_confirmed() -> None:
    """verl 7846, SGLang 6367: requests were admitted while ranks still resumed, with weights not yet loaded."""
    state = cluster(cells=2)
    to_train(state, "c1")
    tell(state, ToRollout(cell="c1", epoch=state.cells["c1"].epoch))
    seen = state.snapshot(0.0).cells
    assert (seen.capacity, seen.capacity_soon) == (4, 8)
    late = SwitchDone(cell="c1", epoch=state.cells["c1"].epoch - 1, version=0)
    assert state.apply(late, 0.0) is Refusal.STALE  # of the switch before
    tell(state, SwitchDone(cell="c1", epoch=state.cells["c1"].epoch, version=0))
    assert state.snapshot(0.0).cells.capacity == 8


def in_training() -> State:
    """A full step whose two micro-steps are held by the core; four executions still run."""
    state = cluster()
    tell(state, Dispatch(queries=("q0", "q1", "q2", "q3"), version=0))
    ready(state, "q0", "q1")
    tell(state, OpenBurst(steps=1))
    to_train(state, "c0")
    for _ in range(2):
        for action in Waterlevel(burst=1, depth=2.0).decide(state.snapshot(0.0)):
            if type(action).__name__ == "AssignMicrostep":
                state.apply(action, 0.0)
        core = state.cells["c0"]
        assert core.running is not None
        tell(state, MicrostepDone(cell="c0", epoch=core.epoch, key=core.running))
    return state


def test_a_step_is_applied_while_no_cell_serves() -> None:
    """verl 7010: a lock held while rollout capacity was awaited kept the version from moving."""
    state = in_training()
    for cell in ("c1", "c2"):
        tell(state, CellFailed(cell=cell, epoch=state.cells[cell].epoch))
    tell(state, StepApplied(version=1, generation=0))
    assert (state.version, state.snapshot(0.0).unfinished) == (1, 4)


def test_publishing_touches_no_execution() -> None:
    """miles 2372, 2589: a new version label aborted every request in flight and lost whole groups."""
    state = in_training()
    tell(state, StepApplied(version=1, generation=0))
    before = state.groups.execution_views()
    tell(state, WeightsPublished(version=1))
    assert state.groups.execution_views() == before
    assert {state.cells[name].version for name in ("c1", "c2")} == {1}


def test_a_cell_that_comes_back_under_its_name_serves_again() -> None:
    """miles 690, 692: an engine added again at its old address stayed in the router's set of the dead."""
    state = cluster(cells=2)
    tell(state, CellFailed(cell="c1", epoch=0))
    assert state.snapshot(0.0).cells.capacity == 4
    tell(state, CellRecovered(cell="c1", epoch=state.cells["c1"].epoch))
    assert state.snapshot(0.0).cells.capacity == 8
    assert state.apply(CellFailed(cell="c1", epoch=0), 0.0) is Refusal.STALE  # a late copy


def test_the_last_serving_cell_stays_while_anything_is_unfinished() -> None:
    """rlops/miles PR 4: demand known only inside the rollout call let every pool shrink to nothing, and hang."""
    state = cluster(cells=2)
    to_train(state, "c1")
    tell(state, Dispatch(queries=("q0",), version=0))
    assert state.apply(ToTrain(cell="c0", epoch=state.cells["c0"].epoch), 0.0) is Refusal.UNSAFE


def test_when_nothing_serves_an_idle_satellite_goes() -> None:
    """The same hang by a failure: the only serving cell is lost with executions unfinished."""
    policy = Async(rollout_cells=1, depth=1.0)
    state = cluster()
    settle(state, policy)
    for cell in ("c0", "c1"):
        epoch = state.cells[cell].epoch
        tell(state, Drained(cell=cell, epoch=epoch), SwitchDone(cell=cell, epoch=epoch, version=0))
    settle(state, policy)
    tell(state, CellFailed(cell="c2", epoch=state.cells["c2"].epoch))
    settle(state, policy)
    assert state.cells["c1"].role is Role.TO_ROLLOUT


def test_staleness_counts_from_the_dispatch() -> None:
    """slime 2278: groups were stamped when they were done, with weights refreshed meanwhile."""
    state = in_training()
    tell(state, StepApplied(version=1, generation=0), WeightsPublished(version=1))
    assert {view.version for view in state.groups.execution_views()} == {0}


def test_held_gradients_of_a_lost_satellite_are_computed_again() -> None:
    """Our own first prototype: only the running micro-step came back."""
    state = cluster()
    tell(state, Dispatch(queries=("q0", "q1", "q2"), version=0))
    ready(state, "q0", "q1")
    tell(state, OpenBurst(steps=1))
    to_train(state, "c0")
    to_train(state, "c1")
    for action in Waterlevel().decide(state.snapshot(0.0)):
        assert state.apply(action, 0.0) is None
    satellite = state.cells["c1"]
    assert satellite.running == (0, "q1", 0)
    tell(state, MicrostepDone(cell="c1", epoch=satellite.epoch, key=satellite.running))
    tell(state, CellFailed(cell="c1", epoch=satellite.epoch))
    step = state.step
    assert step is not None
    assert (step.pending, step.running, step.held) == ([(0, "q1", 0)], {(0, "q0", 0): "c0"}, {})


def test_an_optimiser_step_of_a_lost_core_is_void() -> None:
    """I6: it is applied zero or one time."""
    state = in_training()
    tell(state, CellFailed(cell="c0", epoch=state.cells["c0"].epoch))
    assert state.apply(StepApplied(version=1, generation=0), 0.0) is Refusal.STALE
    assert state.version == 0
    step = state.step
    assert step is not None
    assert len(step.pending) == 2


def test_a_step_that_is_complete_while_the_core_is_lost_is_made_when_it_is_back() -> None:
    """Our own: a core that was being brought back was told to make it, which ended the bringing back for good."""
    state = cluster()
    tell(state, Dispatch(queries=("q0", "q1", "q2"), version=0))
    ready(state, "q0", "q1")
    tell(state, OpenBurst(steps=1))
    to_train(state, "c0")
    to_train(state, "c1")
    tell(state, CellFailed(cell="c0", epoch=state.cells["c0"].epoch))
    for _ in range(2):
        settle(state, Waterlevel())
        satellite = state.cells["c1"]
        assert satellite.running is not None
        tell(state, MicrostepDone(cell="c1", epoch=satellite.epoch, key=satellite.running))
    assert state.step is not None
    assert state.step.closing
    assert all(duty.of != "c0" for duty in duties(state))
    tell(state, CellRecovered(cell="c0", epoch=state.cells["c0"].epoch))
    assert [duty.task for duty in duties(state) if duty.of == "c0"] == [Task.OPTIMISE]


def test_a_burst_that_would_be_over_at_once_is_not_opened() -> None:
    """Our own: with nothing serving and too few groups, Async opened and closed one for ever."""
    policy = Async(rollout_cells=1, depth=1.0, streaming=True)
    state = cluster(cells=2)
    settle(state, policy)
    epoch = state.cells["c0"].epoch
    tell(state, Drained(cell="c0", epoch=epoch), SwitchDone(cell="c0", epoch=epoch, version=0))
    ready(state, "q0")
    tell(state, GroupDropped(query="q1", reason="evaluator failed"), CellFailed(cell="c1", epoch=0))
    settle(state, policy)
    assert state.burst is None


def test_no_cell_serves_where_a_dispatch_has_to_wait_for_the_end_of_the_burst() -> None:
    """Our own: groups were given up in a burst, and its idle cells went to and fro until their step was done."""
    policy = Waterlevel(burst=2, depth=2.0)
    state = cluster()
    tell(state, Dispatch(queries=("q0", "q1", "q2", "q3"), version=0))
    ready(state, "q0", "q1", "q2")
    tell(state, OpenBurst(steps=2))
    for cell in ("c0", "c1"):
        to_train(state, cell)
    settle(state, policy)
    assert state.step is not None
    for key, cell in dict(state.step.running).items():
        tell(state, MicrostepDone(cell=cell, epoch=state.cells[cell].epoch, key=key))
    tell(state, StepApplied(version=1, generation=0))
    settle(state, policy)
    tell(state, GroupDropped(query="q3", reason="evaluator failed"))
    settle(state, policy)
    assert list(state.step.running.values()) == ["c0"], "of the group that is left"
    assert [state.cells[name].role for name in ("c1", "c2")] == [Role.TRAIN, Role.DRAINING]
