"""The ledger is a chain of records: any crash leaves a prefix, damage is told, a replay gives the same state."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_sched.actions import Planned, QueriesOffered, from_json, to_json
from gyre_sched.api import Plan, Query
from gyre_sched.durations import TwoLevel
from gyre_sched.errors import LedgerError
from gyre_sched.invariants import Invariants
from gyre_sched.ledger import Ledger, read, replay
from gyre_sched.policies import Waterlevel
from gyre_sched.scenario import Failures, Scenario
from gyre_sched.simulate import Simulation

SCENARIO = Scenario(
    durations=TwoLevel(mean_s=3600.0, cv_query=0.2, cv_execution=0.3),
    steps=3,
    cells=3,
    batch_groups=2,
    group_size=2,
    train_cell_h=1.0,
    failures=Failures(mean_between_h=4.0),
)


class Nothing:
    def decide(self, snapshot: object) -> list[object]:
        return []


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Simulation]:
    simulation = Simulation(replace(SCENARIO, cells=3), Nothing(), seed=1)
    simulation.policy = Waterlevel()
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        Invariants(simulation, also=ledger.append)
        simulation.settle()
        while simulation.state.version < 3:
            simulation.advance()
    return path, simulation


def test_a_replay_gives_the_same_state_and_the_same_actions(written: tuple[Path, Simulation]) -> None:
    path, simulation = written
    fresh = Simulation(SCENARIO, Nothing(), seed=1).state
    now_s = replay(path, fresh)
    ours, theirs = fresh.snapshot(now_s), simulation.state.snapshot(now_s)
    for name in ("version", "cells", "unfinished", "outstanding", "ready", "step", "burst", "upcoming", "ledger"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert Waterlevel().decide(ours) == Waterlevel().decide(theirs)


def test_any_cut_leaves_a_prefix_and_writing_goes_on(written: tuple[Path, Simulation], tmp_path: Path) -> None:
    path, _ = written
    data, entries = path.read_bytes(), read(path)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in sorted({0, 1, ends[0] - 1, ends[0], ends[3] + 7, ends[-1] - 1}):
        torn = tmp_path / f"cut-{cut}"
        torn.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert read(torn) == entries[:whole]
        with Ledger(torn) as ledger:
            ledger.append(*entries[whole])
        assert read(torn) == entries[: whole + 1]


def test_records_that_hold_records_come_back() -> None:
    plan = Planned(plan=Plan(burst=3, outstanding=112, window=2, since=256))
    offered = QueriesOffered(queries=(Query(id="q1", predicted_s=60.5), Query(id="q2")))
    for record, told in ((plan, [3, 112, 2, 256]), (offered, [["q1", 60.5], ["q2", None]])):
        assert list(to_json(record).values())[1] == told
        assert from_json(json.loads(json.dumps(to_json(record)))) == record
    with pytest.raises(ValueError, match="a newer release wrote it"):
        from_json({"kind": "Teleported"})


@pytest.mark.parametrize("change", ["byte", "missing", "doubled"])
def test_damage_is_told(written: tuple[Path, Simulation], change: str) -> None:
    path, _ = written
    lines = path.read_bytes().splitlines(keepends=True)
    if change == "byte":
        lines[2] = lines[2].replace(b"entry", b"entrz")
    elif change == "missing":
        del lines[2]
    else:
        lines.insert(2, lines[1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(LedgerError, match=r"line [23] of"):
        read(path)
