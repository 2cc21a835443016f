"""Every tracker takes a run's figures, goes on after a resume, and cannot stop training by failing."""

import logging
import math
import sqlite3
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from prometheus_client.parser import text_string_to_metric_families

from gyre_data.errors import ConfigError
from gyre_train.sinks import SINKS, Sinks, SinkSettings, open_sinks

Read = Callable[[Path], list[tuple[int, float]]]


def settings(folder: Path, step: int) -> SinkSettings:
    return SinkSettings(folder=folder, project="gyre-test", run="run-1", step=step, config={"train": {"lr": 1e-3}})


def read_tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("loss")]


def read_wandb(folder: Path) -> list[tuple[int, float]]:
    """The offline file is a LevelDB log: a head of 7 bytes, then (CRC u32, length u16, type u8, protobuf) records."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        data, at = file.read_bytes(), 7
        while at < len(data):
            _, length, kind = struct.unpack_from("<IHB", data, at)
            assert kind == 1, "a small file has whole records only"
            record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "loss" in items:
                found.append((int(items["_step"]), float(items["loss"])))
            at += 7 + length
    return found


def read_trackio(folder: Path) -> list[tuple[int, float]]:
    import json

    with sqlite3.connect(folder / "trackio/gyre-test.db") as db:
        rows = db.execute("select step, metrics from metrics order by step").fetchall()
    return [(step, json.loads(metrics)["loss"]) for step, metrics in rows]


READ: dict[str, Read] = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio}


def _so_far(name: str, folder: Path) -> list[tuple[int, float]]:
    """What can be read while it may still be written: nothing, where a record or a table is not whole yet."""
    try:
        return READ[name](folder)
    except (struct.error, DecodeError, sqlite3.OperationalError):
        return []


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.mark.filterwarnings("ignore")  # of the trackers' own imports
@pytest.mark.parametrize("name", READ)
def test_rows_arrive_and_a_resume_adds_to_them(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = open_sinks([name], settings(tmp_path, 0))
    for step in (1, 2):
        first.write({"step": step, "loss": 1.0 / step, "version": f"run-1:{step}"})
    first.close()
    again = open_sinks([name], settings(tmp_path, 2))
    again.write({"step": 3, "loss": 0.25})
    again.close()
    wanted, until = [(1, 1.0), (2, 0.5), (3, 0.25)], time.monotonic() + 60
    while _so_far(name, tmp_path) != wanted and time.monotonic() < until:
        time.sleep(0.1)  # a tracker's own process may still be writing
    assert READ[name](tmp_path) == wanted
    assert capfd.readouterr().out == ""  # stdout belongs to --json


def test_prometheus_text_holds_the_newest_step(tmp_path: Path) -> None:
    assert READ.keys() | {"prometheus"} == SINKS.keys()
    sinks = open_sinks(["prometheus"], replace(settings(tmp_path, 0), run='a"b'))
    for step in (1, 2):
        sinks.write({"step": step, "loss": 1.0 / step, "mismatch_age_0": float("nan"), "version": f"run-1:{step}"})
    sinks.close()
    (exposed,) = tmp_path.iterdir()
    found = {one.name: one.samples for one in text_string_to_metric_families(exposed.read_text())}
    assert [(s.labels, s.value) for s in found["gyre_train_loss"]] == [({"run": 'a"b'}, 0.5)]
    assert found["gyre_train_step"][0].value == 2
    assert math.isnan(found["gyre_train_mismatch_age_0"][0].value)
    assert time.time() - found["gyre_train_step_time_seconds"][0].value < 60


def test_a_tracker_that_fails_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def write(self, step: int, row: object) -> None:
            raise ConnectionError("no route")

        def close(self) -> None:
            raise AssertionError("it was let go of")

    class Whole:
        rows: list[int]

        def __init__(self) -> None:
            self.rows = []

        def write(self, step: int, row: object) -> None:
            self.rows.append(step)

        def close(self) -> None:
            self.rows.append(-1)

    whole = Whole()
    sinks = Sinks({"broken": Broken(), "whole": whole})
    with caplog.at_level(logging.WARNING):
        sinks.write({"step": 1, "loss": 1.0})
        sinks.write({"step": 2, "loss": 1.0})
        sinks.close()
    assert whole.rows == [1, 2, -1]
    assert [r.getMessage() for r in caplog.records] == [
        "broken failed and gets no more figures: no route; metrics.jsonl goes on"
    ]


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="wanted some of tensorboard, wandb, trackio, prometheus, got 'mlflow'; pick one"
    ):
        open_sinks(["mlflow"], settings(tmp_path, 0))
