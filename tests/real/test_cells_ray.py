"""Cells on a Ray cluster of this machine, against the same contract as local ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from gyre_sched.cells.ray import RayProcesses
from tests.contract.cells_contract import CellsContract, Make, gone, running, sleeper
from tests.support.engines import ROOT, wait_until

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """Room for two cells: Ray counts CPUs, it does not take them."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        ray.init(num_cpus=2, namespace="gyre", include_dashboard=False, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Opens the same folder of cells, as another controller would."""
    yield lambda: RayProcesses(tmp_path / "cells", {"CPU": 1.0})
    place = RayProcesses(tmp_path / "cells", {"CPU": 1.0})
    for cell in ("c0", "c1"):
        place.release(cell)


class TestRayCells(CellsContract):
    """The contract."""


def test_a_cell_takes_its_place_and_a_third_waits_for_one(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gyre_sched.cells.ray._PLACE_S", 1.0)
    place = make()
    place.start("c0", sleeper())
    place.start("c1", sleeper())
    with pytest.raises(TimeoutError, match="for cell c2"):
        place.start("c2", sleeper())
    assert place.slot("c2") is None


def test_a_lost_actor_is_replaced_and_its_cell_found_or_started_again(make: Make) -> None:
    place = make()
    slot = place.start("c0", sleeper())
    keeper = ray.get_actor(f"{place._name}-c0")  # type: ignore[attr-defined]
    ray.kill(keeper)

    def answers() -> bool:
        try:
            place.slot("c0")
        except ConnectionError:
            return False
        return True

    wait_until(answers, "another actor", 60)
    again = place.start("c0", sleeper())
    assert running(place) == again
    if again.pid != slot.pid:
        assert gone(slot.pid), "Ray ended it with its actor: never two"
