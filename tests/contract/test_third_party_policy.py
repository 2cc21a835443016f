"""The policy of docs/scheduler.md, installed as a package of its own: found by its entry point, sound, and it acts."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.main import app
from gyre_sched.actions import Action, Event, ExecutionEnded, ReturnPartial, ToTrain, from_json, to_json
from gyre_sched.api import Snapshot
from gyre_sched.choose import policy
from gyre_sched.durations import TwoLevel
from gyre_sched.errors import PolicyError, ScenarioError
from gyre_sched.invariants import Invariants, check_policy
from gyre_sched.policies import Waterlevel
from gyre_sched.scenario import Scenario
from gyre_sched.simulate import Simulation, simulate
from gyre_sched.state import Refusal

DOC = (Path(__file__).parents[2] / "docs" / "scheduler.md").read_text()
SMALL = Scenario(
    durations=TwoLevel(mean_s=3600.0, cv_query=0.3, cv_execution=0.4),
    steps=4,
    cells=3,
    batch_groups=4,
    group_size=4,
    train_cell_h=1.0,
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As pip leaves it: a module beside a dist-info folder."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL) if "# patient.py" in block)
    (tmp_path / "patient.py").write_text(code)
    info = tmp_path / "patient-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: patient\nVersion: 1.0\n")
    (told,) = re.findall(r"```toml\n\[project\.entry-points\.\"gyre\.schedulers\"\]\n(.*?)```", DOC, re.DOTALL)
    (info / "entry_points.txt").write_text(f"[gyre.schedulers]\n{told.replace(chr(34), '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield
    sys.modules.pop("patient", None)


TABLE = """
[scenario]
cells = 3
steps = 2
batch_groups = 2
group_size = 2
durations = { mean_h = 1.0, cv_query = 0.3, cv_execution = 0.4 }
[[rung]]
name = "E0"
policy = "waterlevel"
"""


def test_an_installed_policy_is_found_by_its_name_and_by_its_path(installed: None, tmp_path: Path) -> None:
    found = policy("patient", {"most_h": 2})
    assert found == policy("patient:Patient", {"most_h": 2})
    with pytest.raises(ScenarioError, match=r"unknown key patient\.most; nearest most_h"):
        policy("patient", {"most": 2})
    table = tmp_path / "small.toml"
    table.write_text(TABLE)
    words = ["simulate", str(table), "--seeds", "1", "--policy", "patient", "--json"]
    told = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    assert [outcome["name"] for outcome in told["outcomes"]] == ["E0", "patient"]


def test_it_is_sound(installed: None) -> None:
    assert check_policy(lambda: policy("patient", {"most_h": 1.5}), seeds=(0,), steps=3) == []


def test_it_ends_what_runs_too_long_and_keeps_it(installed: None) -> None:
    found: list[tuple[float, Action | Event]] = []
    simulation = Simulation(SMALL, policy("patient", {"most_h": 1.5}), seed=1)
    Invariants(simulation, also=lambda now_s, record: found.append((now_s, record)))
    while simulation.state.version < 4:
        simulation.advance()
    measured = simulation.measured()
    partial = [record for _, record in found if isinstance(record, ExecutionEnded) and record.status == "partial"]
    assert len(partial) == sum(isinstance(record, ReturnPartial) for _, record in found) > 0
    assert measured.staleness_groups == 1.5  # every group was trained on, those with an ended member too
    assert measured.hours < simulate(SMALL, Waterlevel(), seed=1).hours
    # Asked again each minute, it is late by no more.
    assert simulation.watch.execution_s / simulation.watch.ended < 1.5 * 3600 + 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Insists(Waterlevel):
    """Asks for what is no longer so, for ever."""

    def decide(self, snapshot: Snapshot) -> list[Action]:
        return [ToTrain(cell="c2", epoch=-1)]


def test_one_who_asks_for_the_same_for_ever_never_settles() -> None:
    with pytest.raises(PolicyError, match="settle"):
        simulate(SMALL, Insists())


def test_an_end_that_was_asked_for_fits_in_a_ledger_and_a_copy_is_stale() -> None:
    record = ReturnPartial(query="q1", member=2)
    assert from_json(json.loads(json.dumps(to_json(record)))) == record
    state = Simulation(replace(SMALL, steps=1), Waterlevel(), seed=1).state
    assert state.apply(record, 0.0) is None
    assert [(one.query, one.member) for one in state.snapshot(0.0).executions() if one.returning] == [("q1", 2)]
    assert state.apply(record, 0.0) is Refusal.STALE
