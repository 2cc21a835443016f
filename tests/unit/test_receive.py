"""`gyre receive`: a folder is there when every byte is right, and only for whom holds the key."""

import hashlib
import os
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_data.errors import ConfigError, EngineError
from gyre_train.publish.control import Deadline, ask
from gyre_train.publish.mooncake import KEY_VARIABLE
from gyre_train.publish.receiver import Receiver, receive

DATA = bytes(range(256)) * 8


class Wire:
    """In Mooncake's place: delivers `data`, whatever was asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data

    def read(self, session: str, address: int, into: np.ndarray, deadline: Deadline) -> None:
        into[:] = np.frombuffer(self.data, np.uint8)


def offer(n: int = 1, **more: Any) -> dict[str, Any]:
    file = {"name": "model.safetensors", "bytes": len(DATA), "address": 1, "sha256": hashlib.sha256(DATA).hexdigest()}
    return {
        "version": f"run:{n}", "session": "s", "timeout_s": 5, "files": [{**file, **more}],
        "texts": {"config.json": "{}"},
    }  # fmt: skip


def test_two_versions_stay_and_each_is_whole(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path, Wire())
    for n in (1, 2, 2, 3):
        made = receiver.pull(offer(n))
        assert (made / "model.safetensors").read_bytes() == DATA
        assert (made / "config.json").read_text() == "{}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run_2", "run_3"]


def test_the_version_that_came_last_stays_whatever_the_clock_said(tmp_path: Path) -> None:
    """A file system may give all that was made within some milliseconds one time, and a clock may be set back."""
    receiver = Receiver(tmp_path, Wire())
    for n in (1, 2):
        os.utime(receiver.pull(offer(n)), (100 - n, 100 - n))
    receiver.pull(offer(3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run_2", "run_3"]


def test_what_is_there_is_not_fetched_again_for_a_second_engine(tmp_path: Path) -> None:
    wire = Wire()
    receiver = Receiver(tmp_path, wire)
    made = receiver.pull(offer())
    kept = made.stat().st_ino
    wire.data = b""  # a fetch would fail
    assert receiver.pull(offer()) == made
    assert made.stat().st_ino == kept
    wire.data = DATA[::-1]
    receiver.pull(offer(sha256=hashlib.sha256(wire.data).hexdigest()))  # other bytes under the same name
    assert (made / "model.safetensors").read_bytes() == wire.data


def test_a_changed_byte_leaves_nothing(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path, Wire(DATA[:-1] + b"x"))
    with pytest.raises(EngineError, match="wanted sha256"):
        receiver.pull(offer())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../model.safetensors", "model/../../x.safetensors", "config.json", "", None])
def test_names_outside_the_folder_are_refused(tmp_path: Path, name: str | None) -> None:
    with pytest.raises(ConfigError, match=r"wanted a version, model\*\.safetensors"):
        Receiver(tmp_path, Wire()).pull(offer(name=name))
    assert list(tmp_path.iterdir()) == []


def test_other_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wanted a version"):
        Receiver(tmp_path, Wire()).pull({**offer(), "texts": {"../../x": "y"}})


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    bound: list[ThreadingHTTPServer] = []
    ready = threading.Event()
    thread = threading.Thread(
        target=receive, args=(tmp_path,), kwargs={"on_bound": lambda s: (bound.append(s), ready.set())}, daemon=True
    )
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{bound[0].server_address[1]}/pull"
    bound[0].shutdown()
    thread.join(30)


def test_without_the_key_nothing_is_fetched(guarded: str) -> None:
    for key in (None, "wrong"):
        with pytest.raises(EngineError, match="got 401"):
            ask("POST", guarded, offer(), timeout_s=30, key=key)
    with pytest.raises(EngineError, match="got 400"):
        ask("POST", guarded, {"version": "run:1"}, timeout_s=30, key="secret")


def test_off_loopback_a_key_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"set {KEY_VARIABLE}"):
        receive(tmp_path, host="0.0.0.0")
