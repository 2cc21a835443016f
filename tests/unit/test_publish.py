"""Publishing weights: the embedded engine serves what was trained, and no engine can hold the trainer up."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_data.types import PolicyVersion
from gyre_train.publish.files import FilePublisher
from tests.support.engines import Engine, embedded_engine
from tests.support.publishing import PROMPT, check_publish
from tests.support.training import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with embedded_engine(model) as running:
        yield running


def test_the_engine_serves_what_was_trained(engine: Engine, model: Path, tmp_path: Path) -> None:
    check_publish(engine, model, tmp_path)


def test_a_refused_load_is_reported_and_the_engine_goes_on(engine: Engine, tmp_path: Path) -> None:
    version = PolicyVersion(policy_id="run", n=9)
    (done,) = FilePublisher([engine.url]).publish(tmp_path / "nothing", version)
    assert done.error is not None
    assert "update_weights_from_disk: wanted success, got 400" in done.error
    assert engine.generate(PROMPT)["output_ids"]
    assert engine.get("/model_info").json()["weight_version"] != "run:9"


def test_a_hanging_engine_costs_the_time_out_and_no_more(tmp_path: Path) -> None:
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        done = FilePublisher([url, url + "/"], timeout_s=0.3).publish(tmp_path, PolicyVersion(policy_id="run", n=1))
        assert time.monotonic() - started < 60
    assert len(done) == 2
    for one in done:
        assert one.error is not None
        assert "pause_generation: wanted an answer within 0.3 s, got none; the engine hangs" in one.error
        assert "continue_generation" in one.error  # it was told to go on, whatever happened before


def test_an_engine_that_is_gone_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    (done,) = FilePublisher([url], timeout_s=5).publish(tmp_path, PolicyVersion(policy_id="run", n=1))
    assert done.error is not None
    assert f"{url}/pause_generation: wanted an answer" in done.error
    assert "is the engine up?" in done.error
    (done,) = FilePublisher(["http://[::1"], timeout_s=5).publish(tmp_path, PolicyVersion(policy_id="run", n=1))
    assert done.error is not None
    assert "http://[::1/pause_generation: wanted an answer, got InvalidURL" in done.error
