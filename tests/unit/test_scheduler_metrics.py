"""A controller's figures as Prometheus text: what the state holds, in a file that a scraper can read."""

from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gyre_sched.actions import Event, QueriesOffered
from gyre_sched.api import Query
from gyre_sched.controller import Controller, Duty
from gyre_sched.policies import Waterlevel
from tests.support.controlled import BATCH, MEMBERS, fresh


class Offers:
    """A world with some queries, in which nothing ends."""

    def events(self, after: int) -> Sequence[tuple[int, Event]]:
        return [(1, QueriesOffered(queries=tuple(Query(id=f"q{i}") for i in range(9))))] if after < 1 else []

    def do(self, duty: Duty) -> None:
        pass


def read(path: Path) -> dict[str, dict[str, float]]:
    """Values by figure and by its only label, which is empty where it has none."""
    return {
        sample.name: {"".join(s.labels.values()): s.value for s in family.samples}
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
    }


def test_a_scraper_reads_what_the_controller_holds(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    controller = Controller(fresh(), Waterlevel(burst=2, depth=2.0), Offers(), tmp_path / "ledger.jsonl", metrics=path)
    controller.turn()
    controller.close()
    found = read(path)
    assert found["gyre_sched_cells"] == {
        "rollout": 3, "draining": 0, "to_train": 0, "train": 0, "to_rollout": 0, "down": 0,
    }  # fmt: skip
    groups = found["gyre_sched_groups_dispatched_total"][""]
    assert groups == found["gyre_sched_groups_outstanding"][""] == 2 * BATCH  # depth 2
    assert found["gyre_sched_executions_unfinished"] == {"": groups * MEMBERS}
    assert found["gyre_sched_version"] == {"": 0}
    assert set(found["gyre_sched_mean_seconds"]) == {"to_train", "to_rollout", "optimiser", "pull", "publish"}


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    where = tmp_path / "gone" / "metrics.prom"
    controller = Controller(fresh(), Waterlevel(), Offers(), tmp_path / "ledger.jsonl", metrics=where)
    assert controller.turn()
    controller.close()
    assert not where.exists()
