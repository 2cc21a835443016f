"""A trainer's folder as onlookers read it, a scheduler's ledger as cells by time, and what the page makes of both."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

import gyre_data
from gyre_data import training_folder
from gyre_data.cell_spans import CellsByTime, CellsLedger
from gyre_data.child import answers, free_port
from gyre_data.errors import ConfigError, DataError
from gyre_data.main import app
from gyre_data.store import find_run
from gyre_data.training_folder import TrainingFolder, find_training
from gyre_data.view.training import Training, open_training, step_model
from gyre_sched.actions import AssignMicrostep, CellFailed, CellRecovered, MicrostepDone, ToTrain
from gyre_sched.ledger import Ledger
from gyre_train.config import OutputConfig
from gyre_train.page import Page
from tests.support.training_beside import TrainedFolder, write_cells
from tests.support.view_case import view_case


@pytest.fixture
def run(tmp_path: Path) -> gyre_data.Run:
    opened: gyre_data.Run = view_case().write(tmp_path / "run")
    return opened


@pytest.fixture
def trained(run: gyre_data.Run, tmp_path: Path) -> Iterator[TrainedFolder]:
    made = TrainedFolder(tmp_path / "rl", [run.path])
    for _ in range(5):
        made.step([("e_b02c00000001", "n_a"), ("e_e7f300000002", "n_b")])
    yield made
    made.close()


@pytest.mark.parametrize("name", ["doing.json", "evals.jsonl", "metrics.jsonl", "run.json"])
def test_a_step_that_is_taken_between_two_files_is_told_whole_or_not_at_all(
    trained: TrainedFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder, stamp = TrainingFolder(trained.path), training_folder._stamp

    def stamped(path: Path) -> tuple[int, int] | None:
        if path.name == name and trained.steps == 5:
            trained.step([("e_9d1e00000003", "n_c")])
            trained.says("computing step 7")
        return stamp(path)

    monkeypatch.setattr(training_folder, "_stamp", stamped)
    folder.refresh()
    last = len(folder.steps)
    assert folder.consumed(last)
    assert folder.doing is None or last == 6


def test_a_folder_is_read_as_it_grows(trained: TrainedFolder) -> None:
    folder = TrainingFolder(trained.path)
    assert [row["step"] for row in folder.steps] == [1, 2, 3, 4, 5]
    assert [e["step"] for e in folder.evals] == [5]
    assert folder.running
    assert folder.doing is None
    assert not folder.refresh()
    trained.says("step 6: 0 of 16 executions; waiting for run", since=12.5)
    assert folder.refresh()
    assert folder.doing is not None
    assert (folder.doing.text[:6], folder.doing.waiting, folder.doing.since) == ("step 6", True, 12.5)
    trained.step([("e_9d1e00000003", "n_c")])
    assert folder.refresh()
    assert [row.execution_id for row in folder.consumed(6)] == ["e_9d1e00000003"]
    assert len(folder.consumed(5)) == 2
    trained.close()
    assert folder.refresh()
    assert not folder.running


def test_ls_of_a_training_names_what_it_trains_on(trained: TrainedFolder, run: gyre_data.Run) -> None:
    told = CliRunner().invoke(app, ["ls", str(trained.path)], env={"COLUMNS": "1000"}).output
    assert told == (
        f"{trained.path} is the folder of a training: gyre view {trained.path}\nwhat it trains on: gyre ls {run.path}\n"
    )


def test_a_step_taken_again_and_a_torn_line(trained: TrainedFolder) -> None:
    with (trained.path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "version": "run:9", "loss": 0.5}) + "\nno json\n" + '{"step": 6, "lo')
    folder = TrainingFolder(trained.path)
    assert [row["step"] for row in folder.steps] == [1, 2, 3, 4, 5]
    assert folder.steps[-1]["version"] == "run:9"


def test_training_is_found_beside_its_run_and_nowhere_else(
    run: gyre_data.Run, trained: TrainedFolder, tmp_path: Path
) -> None:
    assert find_training(run.path) == trained.path
    other = view_case().write(tmp_path / "other")
    assert open_training(other, None) == (other, None)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl; name the folder"):
        open_training(other, tmp_path / "other")
    with pytest.raises(ConfigError, match="give --training"):
        open_training(other, None, cells=tmp_path / "ledger.jsonl")
    shown, training = open_training(gyre_data.open(trained.path), None)  # the trainer's own folder
    assert shown.path == run.path
    assert training is not None
    assert training.folder.path == trained.path


def test_damaged_training_that_nobody_named_hides_no_run(
    run: gyre_data.Run, trained: TrainedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    trained.close()
    for segment in trained.path.glob("ledger/*.arrow"):
        segment.write_bytes(b"no arrow")
    assert open_training(run, None) == (run, None)
    assert "cannot be shown" in caplog.text
    with pytest.raises(DataError):
        open_training(run, trained.path)


def test_the_models_of_the_page(run: gyre_data.Run, trained: TrainedFolder) -> None:
    write_cells(trained.path / "ledger.jsonl", steps=2)
    told = Training(trained.path, run.path).model()
    assert told["columns"]["step"] == [1, 2, 3, 4, 5]
    assert all(len(values) == 5 for values in told["columns"].values())
    assert told["consumed"] == {"e_b02c00000001": 5, "e_e7f300000002": 5}
    assert told["elsewhere"] == []
    assert told["evals"][0]["unscored"] == 1
    assert told["cells"]["names"] == ["cell-0", "cell-1", "cell-2"]
    assert [version for _, version in told["cells"]["steps"]] == [1]
    json.dumps(told, allow_nan=False)
    step = step_model(TrainingFolder(trained.path), run.path, 3)
    assert [(e["execution_id"], e["here"], e["owned_tokens"], e["reward"]) for e in step["executions"]] == [
        ("e_b02c00000001", True, 120, 0.0),
        ("e_e7f300000002", True, 130, 1.0),
    ]
    assert step["executions"][1]["trajectories"] == [{"index": 0, "leaf": "n_b", "tokens": 130}]


def test_figures_that_are_no_numbers_are_unknown(run: gyre_data.Run, trained: TrainedFolder) -> None:
    with (trained.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": NaN, "reward_mean": Infinity, "note": "x", "flag": true}\n')
    told = Training(trained.path, run.path).model()
    assert told["columns"]["loss"][-1] is None
    assert told["columns"]["reward_mean"][-1] is None
    assert "flag" not in told["columns"]


def cells_by_time(path: Path) -> CellsByTime | None:
    ledger = CellsLedger(path)
    ledger.refresh()
    return ledger.cells()


def test_a_ledger_that_grows_is_read_on_and_no_line_twice(tmp_path: Path) -> None:
    write_cells(tmp_path / "whole.jsonl", steps=2)
    whole = (tmp_path / "whole.jsonl").read_bytes()
    growing = CellsLedger(_file(tmp_path / "growing.jsonl", ""))
    for end in range(0, len(whole), 333):
        (tmp_path / "growing.jsonl").write_bytes(whole[:end])
        growing.refresh()
    (tmp_path / "growing.jsonl").write_bytes(whole)
    assert growing.refresh()
    assert not growing.refresh()
    assert growing.cells() == cells_by_time(tmp_path / "whole.jsonl")
    write_cells(tmp_path / "growing.jsonl.new", steps=1)
    (tmp_path / "growing.jsonl.new").replace(tmp_path / "growing.jsonl")  # another one in its place
    assert growing.refresh()
    assert growing.cells() == cells_by_time(tmp_path / "growing.jsonl")


def test_cells_by_time_from_a_ledger(tmp_path: Path) -> None:
    write_cells(tmp_path / "ledger.jsonl", steps=1)
    found = cells_by_time(tmp_path / "ledger.jsonl")
    assert found is not None
    mine = [(s.what, s.start_s - found.start_s, s.end_s - found.start_s) for s in found.spans if s.cell == "cell-0"]
    assert mine == [("draining", 0, 30), ("to_train", 30, 45), ("busy", 50, 90), ("busy", 95, 135), ("busy", 140, 180),
                    ("train", 45, found.end_s - found.start_s)]  # fmt: skip
    assert cells_by_time(_file(tmp_path / "empty.jsonl", "")) is None
    with pytest.raises(DataError, match="line 0"):
        cells_by_time(_file(tmp_path / "other.jsonl", '{"step": 1}\n{"step": 2}\n'))
    torn = (tmp_path / "ledger.jsonl").read_text()[:-9] + "\n"
    assert cells_by_time(_file(tmp_path / "torn.jsonl", torn)) is not None


def test_a_lost_core_that_comes_back_trains_when_it_works(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for at, record in enumerate([
            ToTrain(cell="c", epoch=1), CellFailed(cell="c", epoch=1), CellRecovered(cell="c", epoch=2),
            AssignMicrostep(cell="c", epoch=2, key=(0, "q", 0)), MicrostepDone(cell="c", epoch=2, key=(0, "q", 0)),
        ]):  # fmt: skip
            ledger.append(float(at), record)
    found = cells_by_time(tmp_path / "ledger.jsonl")
    assert found is not None
    assert [(s.what, s.start_s, s.end_s) for s in found.spans] == [
        ("draining", 0, 1), ("down", 1, 2), ("busy", 3, 4), ("train", 2, 4),
    ]  # fmt: skip


def test_the_proxys_word_is_asked_of_this_machine_only(
    run: gyre_data.Run, trained: TrainedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gyre_data.view.training._ANSWER_S", 60.0)
    asked: list[str] = []

    class Status(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            engine = {"url": "http://e", "state": "down", "error": "refused"}
            told = {"in_flight": 3, "engines": [engine, {"state": "up"}], "executions": {"running": 2, "ended": 7}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Status) as server, gyre_data.RunWriter(run.path) as writer:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        writer.update_info({"endpoints": {"proxy": "http://192.0.2.1:80"}})
        training = Training(trained.path, run.path)
        training.refresh()
        assert training.model()["proxy"] is None
        writer.update_info({"endpoints": {"proxy": f"http://127.0.0.1:{server.server_address[1]}"}})
        training = Training(trained.path, run.path)
        assert training.refresh()
        want = "proxy: 3 calls wait for 1 of 2 engines, 2 executions running, http://e is down: refused"
        assert training.model()["proxy"] == want
        server.shutdown()
    assert asked == ["/api/status"]


def test_a_page_beside_training(trained: TrainedFolder, caplog: pytest.LogCaptureFixture) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    page = Page(OutputConfig(dir=str(trained.path), page=port))
    try:
        deadline = time.monotonic() + 60
        while not answers(url) and time.monotonic() < deadline:
            time.sleep(0.1)
        with urlopen(f"{url}/api/training", timeout=10) as answer:
            assert json.load(answer)["whole"]["columns"]["step"] == [1, 2, 3, 4, 5]
        with caplog.at_level("INFO"):
            Page(OutputConfig(dir=str(trained.path), page=port)).close()  # another leaves it alone
        assert "is served already" in caplog.text
        assert answers(url)
    finally:
        page.close()
    assert not answers(url)


def test_a_trainer_that_has_just_begun_can_be_shown(tmp_path: Path) -> None:
    trained = TrainedFolder(tmp_path / "rl", [])
    shown, training = open_training(gyre_data.open(find_run(tmp_path / "rl")), None)
    assert shown.path == tmp_path / "rl"
    assert training is not None
    assert training.model()["columns"] == {}
    trained.close()


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
