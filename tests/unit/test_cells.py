"""What the controller of real cells makes of answers and settings."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gyre_sched.actions import (
    AssignMicrostep,
    CloseBurst,
    Dispatch,
    Drained,
    ExecutionEnded,
    GroupReady,
    MicrostepDone,
    OpenBurst,
    QueriesOffered,
    StepApplied,
    SwitchDone,
    ToRollout,
    ToTrain,
    WeightsPublished,
    WeightsPulled,
)
from gyre_sched.api import Cell, Params, Query
from gyre_sched.cells.executions import settled
from gyre_sched.cells.lane import CellLostError, Lane, Turn
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.processes import Processes, Program, Slot, SlotTakenError
from gyre_sched.cells.proxy import ProxyApi
from gyre_sched.cells.rollout import Rollout
from gyre_sched.cells.run import place
from gyre_sched.cells.settings import FleetSettings, load
from gyre_sched.cells.world import CellWorld
from gyre_sched.controller import Duty, duties
from gyre_sched.errors import CoreError, ScenarioError
from gyre_sched.history import History
from gyre_sched.policies import Waterlevel
from gyre_sched.state import State


def one(index: int, state: str = "ended", reason: str | None = "finished", scored: bool = True) -> dict[str, Any]:
    return {"sample_index": index, "state": state, "end_reason": reason if state == "ended" else None, "scored": scored}


def ended(member: int, status: str = "finished") -> ExecutionEnded:
    return ExecutionEnded(query="q", member=member, status=status)


READY = GroupReady(query="q")


@pytest.mark.parametrize(
    ("known", "unfinished", "told"),
    [
        ([], {0, 1}, []),
        ([one(0, "running"), one(1, "queued")], {0, 1}, []),
        ([one(0), one(1, "running")], {0, 1}, [ended(0)]),
        ([one(0), one(1, "running")], {1}, []),
        (
            [one(0, reason="overall_timeout"), one(1, reason="crashed")],
            {0, 1},
            [ended(0, "timed_out"), ended(1, "failed"), READY],
        ),
        ([one(0), one(1, scored=False)], {0, 1}, [ended(0), ended(1)]),
        ([one(0), one(1)], set(), [READY]),
        # Nobody is to blame: the group goes on until another has taken the place.
        ([one(0), one(1, reason="infra_fault")], {0, 1}, [ended(0)]),
        ([one(0), one(1, reason="infra_fault"), one(2, "running")], {1}, []),
        ([one(0), one(1, reason="infra_fault"), one(2)], {1}, [ended(1), READY]),
        ([one(0), one(1, reason="infra_fault"), one(2)], set(), [READY]),
        (
            [one(0, reason="cancelled"), one(1, reason="infra_fault"), one(2), one(3)],
            {0, 1},
            [ended(0), ended(1), READY],
        ),
        # Two replaced the same one: the second changes nothing.
        ([one(0), one(1, reason="infra_fault"), one(2), one(3)], set(), [READY]),
    ],
)
def test_what_executions_say_of_their_group(known: list[dict[str, Any]], unfinished: set[int], told: list[Any]) -> None:
    assert settled("q", known, size=2, unfinished=frozenset(unfinished), judged=True) == told


def test_a_group_that_is_not_judged_is_ready_when_it_has_ended() -> None:
    known = [one(0, scored=False), one(1, scored=False)]
    assert settled("q", known, size=2, unfinished=frozenset(), judged=False) == [READY]


SETTINGS = """
folder = "sched"
proxy = "http://127.0.0.1:1"
queries = ["swe-1", "swe-1#2"]
batch_groups = 2
group_size = 4
steps = 3
base_weights = "model"
base_label = "base:0"
weights = "out/{version}"
label = "run:{version}"
[rollout]
command = ["engine", "{weights}", "--port", "{port}"]
[train]
command = ["satellite", "{core}"]
core_command = ["core"]
[[cells]]
id = "c0"
capacity = 4
[[cells]]
id = "c1"
capacity = 4
"""


CELLS = [Cell(id=f"c{i}", position=i, capacity=4, core=i == 0) for i in range(2)]


def read(tmp_path: Path, text: str) -> FleetSettings:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return load(path)


def test_settings_are_read_whole(tmp_path: Path) -> None:
    settings = read(tmp_path, SETTINGS)
    assert settings.rollout.command == ("engine", "{weights}", "--port", "{port}")
    assert [(cell.id, cell.core) for cell in settings.fresh_cells()] == [("c0", True), ("c1", False)]
    assert settings.weights_of(0) == ("model", "base:0")
    assert settings.weights_of(3) == ("out/3", "run:3")
    assert settings.params.group_size == 4


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("steps = 3", "step = 3", "nearest steps"),
        ("steps = 3", "", "wanted steps"),
        ("steps = 3", "steps = true", "wanted steps as int"),
        ("steps = 3", 'backend = "slurm"\nsteps = 3', "wanted backend as local or ray"),
        ("capacity = 4", "capacity = 4\ncores = 1", "unknown key cells.cores"),
        ("[train]", '[rollout.cache]\nstorage = "file"\n[train]', "cache.folder: wanted"),
        ("[train]", '[rollout.cache]\nstorage = "s3"\n[train]', "cache.storage as file or mooncake"),
        ('id = "c1"', 'id = "c0"', "ids that differ"),
        ('id = "c1"', 'id = "../c1"', "names of folders"),
        ('"swe-1#2"', '"swe-1"', "queries that differ"),
        ('command = ["satellite", "{core}"]', 'command = "satellite"', "wanted train.command"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path, before: str, after: str, told: str) -> None:
    assert before in SETTINGS
    with pytest.raises(ScenarioError, match=told):
        read(tmp_path, SETTINGS.replace(before, after, 1))


def test_without_ray_the_error_names_the_extra_that_the_doctor_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gyre_sched.cells.ray", None)
    settings = read(tmp_path, SETTINGS.replace("steps = 3", 'backend = "ray"\nsteps = 3'))
    with pytest.raises(ScenarioError, match=r"extra (\w+), for which `gyre doctor`.*backend = \"local\"") as told:
        place(settings)
    extra = str(told.value).partition("the extra ")[2].partition(",")[0]
    assert f'{extra} = ["ray' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_a_shared_cache_is_flags_and_environment_of_the_engines(tmp_path: Path) -> None:
    """As generated; it has not been run, for it needs GPUs."""
    told = '[rollout.cache]\nstorage = "mooncake"\nmaster = "10.0.0.1:50051"\n[train]'
    cache = read(tmp_path, SETTINGS.replace("[train]", told)).rollout.cache
    assert cache is not None
    assert " ".join(cache.flags) == (
        "--enable-hierarchical-cache --hicache-ratio 2 --hicache-write-policy write_through "
        "--hicache-mem-layout page_first_direct --hicache-io-backend direct --hicache-storage-backend mooncake"
    )
    assert cache.env == {
        "MOONCAKE_MASTER": "10.0.0.1:50051",
        "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
        "MOONCAKE_PROTOCOL": "rdma",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(4 << 30),
    }
    told = '[rollout.cache]\nstorage = "file"\nfolder = "/shared/kv"\n[train]'
    cache = read(tmp_path, SETTINGS.replace("[train]", told)).rollout.cache
    assert cache is not None
    assert cache.env == {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/shared/kv"}


def test_the_engine_is_started_with_the_shared_cache(tmp_path: Path) -> None:
    told = '[rollout.cache]\nstorage = "file"\nfolder = "/shared/kv"\n[train]'
    started: list[Program] = []

    class Place:
        def slot(self, cell: str) -> None:
            return None

        def start(self, cell: str, program: Program) -> Any:
            started.append(program)
            raise SlotTakenError("enough")

    settings = read(tmp_path, SETTINGS.replace("[train]", told))
    rollout = Rollout(settings, cast(Processes, Place()), ProxyApi("http://127.0.0.1:1", key=None, call_s=1.0))
    with pytest.raises(SlotTakenError):
        rollout.serve(Turn(), "c0", 0, 3)
    assert started[0].command[:4] == ("engine", "out/3", "--port", "{port}")
    assert started[0].command[4:] == settings.rollout.cache.flags  # type: ignore[union-attr]
    assert dict(started[0].env) == settings.rollout.cache.env  # type: ignore[union-attr]


def test_an_engine_loads_what_the_core_brings_and_the_folder_when_the_core_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = '[rollout]\nreceiver = "http://{host}:30100"'
    settings, asked = read(tmp_path, SETTINGS.replace("[rollout]", told)), list[tuple[str, Any]]()
    answers: dict[str, Any] = {}

    def ask(url: str, body: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
        asked.append((url.partition("//")[2], body))
        if url.endswith("/weights") and not answers:
            raise ConnectionError("no core")
        return answers if url.endswith("/weights") else {"weight_version": "run:2"}

    class Place:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def slot(self, cell: str) -> Slot:
            return Slot(kind=self.kind, epoch=1, running=True, address="core:1", pid=1)

    def load(kind: str = "train") -> list[str]:
        asked.clear()
        rollout = Rollout(settings, cast(Processes, Place(kind)), ProxyApi("http://127.0.0.1:1", key=None, call_s=1.0))
        rollout.load(Turn(), "http://gpu-3:8000", 2)
        return [url.partition("/")[2] for url, _ in asked]

    monkeypatch.setattr("gyre_sched.cells.rollout.ask", ask)
    swap = ["pause_generation", "update_weights_from_disk", "model_info", "continue_generation"]
    assert load() == ["weights", *swap]
    assert asked[0] == ("core:1/weights", {"version": 2, "label": "run:2", "receiver": "http://gpu-3:30100"})
    assert asked[2][1]["model_path"] == "out/2"
    answers["folder"] = "/dev/shm/run_2"
    assert load() == ["weights", *swap]
    assert asked[2][1]["model_path"] == "/dev/shm/run_2"
    assert load("rollout") == swap  # the core serves
    assert asked[1][1]["model_path"] == "out/2"


@pytest.mark.parametrize(
    ("kind", "epoch", "running", "told"),
    [
        # Another turn of the cell, which was superseded while it drained.
        ("rollout", 1, True, ["remove http://here:1", "end", "admit http://here:2"]),
        # This very turn, whose engine and controller died together after it was admitted.
        ("rollout", 3, False, ["remove http://here:1", "end", "admit http://here:2"]),
        ("rollout", 3, True, ["admit http://here:1"]),
        ("train", 2, True, ["end", "admit http://here:2"]),
    ],
)
def test_an_engine_that_is_replaced_leaves_the_proxy_before_the_next_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, epoch: int, running: bool, told: list[str]
) -> None:
    did = list[str]()

    class Place:
        def __init__(self) -> None:
            self.now = Slot(kind=kind, epoch=epoch, running=running, address="here:1", pid=1)

        def slot(self, cell: str) -> Slot:
            return self.now

        def end(self, cell: str, *, grace_s: float) -> bool:
            did.append("end")
            self.now = replace(self.now, running=False)
            return True

        def start(self, cell: str, program: Program) -> Slot:
            if not self.now.running:
                self.now = Slot(kind="rollout", epoch=program.epoch, running=True, address="here:2", pid=2)
            return self.now

    class Proxy(ProxyApi):
        def admit(self, url: str) -> str:
            did.append(f"admit {url}")
            return "run:3"

        def remove(self, url: str) -> None:
            did.append(f"remove {url}")

    monkeypatch.setattr("gyre_sched.cells.rollout.ask", lambda *_, **__: {"weight_version": "run:3"})
    proxy = Proxy("http://127.0.0.1:1", key=None, call_s=1.0)
    Rollout(read(tmp_path, SETTINGS), cast(Processes, Place()), proxy).serve(Turn(), "c1", 3, 3)
    assert did == told


def test_a_cell_that_joins_late_does_not_make_pulls_look_long() -> None:
    cells = [Cell(id=f"c{i}", position=i, capacity=4, core=i == 0) for i in range(3)]
    state = State(Params(batch_groups=1, group_size=1, microsteps_per_group=1), cells)
    history = History(state, timeout_s=1e9, engine_share=0.6)
    records: list[tuple[float, Any]] = [
        (0, QueriesOffered(queries=(Query(id="q"),))),
        (0, Dispatch(queries=("q",), version=0)),
        (5, ExecutionEnded(query="q", member=0)),
        (5, GroupReady(query="q")),
        (5, OpenBurst(steps=2)),
        (5, ToTrain(cell="c0", epoch=0)),
        (5, Drained(cell="c0", epoch=1)),
        (6, SwitchDone(cell="c0", epoch=1, version=0)),
        (6, AssignMicrostep(cell="c0", epoch=1, key=(0, "q", 0))),
        (7, MicrostepDone(cell="c0", epoch=1, key=(0, "q", 0))),
        (8, StepApplied(version=1, generation=0)),
        (1000, ToTrain(cell="c1", epoch=0)),
        (1000, Drained(cell="c1", epoch=1)),
        (1010, SwitchDone(cell="c1", epoch=1, version=0)),
        (1013, WeightsPulled(cell="c1", epoch=1, version=1)),
    ]
    for at, record in records:
        assert state.apply(record, at) is None, record
        history.record(at, record)
    assert history.mean_s("pull_s") == 3.0


def test_a_satellite_that_is_too_late_for_its_burst_is_there_and_goes_back(tmp_path: Path) -> None:
    class Empty:
        def slot(self, cell: str) -> None:
            return None

        def start(self, cell: str, program: Program) -> Any:
            raise SlotTakenError("it never comes up")

    state, settings = (
        State(Params(batch_groups=1, group_size=1, microsteps_per_group=1), CELLS),
        read(tmp_path, SETTINGS),
    )
    for record in (
        QueriesOffered(queries=(Query(id="q"),)), Dispatch(queries=("q",), version=0),
        ExecutionEnded(query="q", member=0), GroupReady(query="q"), OpenBurst(steps=1), ToTrain(cell="c0", epoch=0),
        ToTrain(cell="c1", epoch=0), Drained(cell="c0", epoch=1), Drained(cell="c1", epoch=1),
        SwitchDone(cell="c0", epoch=1, version=0), AssignMicrostep(cell="c0", epoch=1, key=(0, "q", 0)),
        MicrostepDone(cell="c0", epoch=1, key=(0, "q", 0)), StepApplied(version=1, generation=0), CloseBurst(done=1),
        WeightsPublished(version=1),
    ):  # fmt: skip
        assert state.apply(record, 0.0) is None, record
    world = CellWorld(state, settings, cast(Processes, Empty()))
    try:
        assert not [event for _, event in world.events(0) if isinstance(event, SwitchDone)]
        assert state.apply(ToRollout(cell="c0", epoch=1), 0.0) is None
        arrived = SwitchDone(cell="c1", epoch=1, version=0)
        assert arrived in [event for _, event in world.events(0)]
        assert state.apply(arrived, 0.0) is None
        assert ToRollout(cell="c1", epoch=1) in Waterlevel(burst=1, depth=1).decide(state.snapshot(0.0))
    finally:
        world.close()


def test_a_core_that_never_comes_up_ends_the_run_and_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_sched.cells.world._AGAIN_S", 0.01)
    text = SETTINGS.replace('core_command = ["core"]', 'core_command = ["sh", "-c", "echo no such model; exit 1"]')
    settings = read(tmp_path, text.replace('"sched"', f'"{tmp_path}/sched"'))
    state = State(Params(batch_groups=1, group_size=1, microsteps_per_group=1), CELLS)
    for record in (
        QueriesOffered(queries=(Query(id="q"),)), Dispatch(queries=("q",), version=0),
        ExecutionEnded(query="q", member=0), GroupReady(query="q"), OpenBurst(steps=1), ToTrain(cell="c0", epoch=0),
    ):  # fmt: skip
        assert state.apply(record, 0.0) is None, record
    place = LocalProcesses(tmp_path / "sched" / "cells")
    world = CellWorld(state, settings, place)

    def turns() -> None:
        # As the controller takes them, until it raises.
        told: set[Duty] = set()
        while True:
            for _, event in world.events(0):
                state.apply(event, 0.0)
            for duty in set(duties(state)) - told:
                if duty.of == "c0":
                    world.do(duty)
                told.add(duty)
            world.wait(0.05)

    try:
        with pytest.raises(CoreError, match=r"make step 1, it was lost 5 times.*mend what \S+/sched/cells/c0/log says"):
            turns()
    finally:
        world.close()
        place.release("c0")
    starts = (tmp_path / "sched" / "cells" / "c0" / "log").read_text().count("no such model")
    assert starts >= 5, "one more may have begun"


def test_what_is_wanted_last_of_a_cell_replaces_what_was_wanted_before() -> None:
    lane, began, did = Lane("c0", lambda error: None), threading.Event(), list[str]()

    def first(turn: Turn) -> None:
        began.set()
        turn.wait(60)
        did.append("first")

    lane.begin(first)
    assert began.wait(60)
    lane.begin(lambda turn: did.append("second"))
    lane.begin(lambda turn: did.append("third"))
    deadline = time.monotonic() + 60
    while lane.busy and time.monotonic() < deadline:
        time.sleep(0.005)
    lane.close()
    assert did == ["third"]


def test_a_call_is_tried_again_until_it_answers_but_not_for_a_cell_that_is_lost() -> None:
    answers: list[Any] = [ConnectionError("no"), ConnectionError("no"), "yes"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    class Quick(Turn):
        def wait(self, seconds: float = 0.0) -> None:
            super().wait(0.0)

    assert Quick().insist(call) == "yes"
    answers = [CellLostError("gone"), "yes"]
    with pytest.raises(CellLostError):
        Quick().insist(call)
