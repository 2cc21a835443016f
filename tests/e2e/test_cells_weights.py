"""An engine that a controller drives gets its weights out of the core's memory, or from the folder when it cannot.

Core, engine, receivers and proxy are processes of their own; the test does what a controller's lane does.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_data.child import answers, free_port
from gyre_data.store import open as open_run
from gyre_data.verify import verify
from gyre_sched.cells.lane import Turn
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.proxy import ProxyApi
from gyre_sched.cells.rollout import Rollout
from gyre_sched.cells.settings import CellSettings, FleetSettings, RolloutSettings, TrainSettings
from gyre_sched.cells.training import Training, read_state
from gyre_train.publish.mooncake import KEY_VARIABLE
from tests.support.engines import Engine, wait_until
from tests.support.live import recording
from tests.support.proxy_process import ProxyProcess
from tests.support.proxy_server import calls_of
from tests.support.training import recorded_run, tiny_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Mooncake has wheels for Linux only"),
    pytest.mark.timeout(1800),
]

PATIENCE_S = 600
PROMPT = list(range(5, 45))
TOKENS = 400
STUCK = """
import sys, time
from pathlib import Path
from gyre_train.publish import mooncake, receiver
read = mooncake.Transfer.read
def half(self, session, address, into, deadline):
    read(self, session, address, into[: into.nbytes // 2], deadline)
    Path(sys.argv[3]).touch()
    time.sleep(600)
mooncake.Transfer.read = half
receiver.receive(Path(sys.argv[1]), port=int(sys.argv[2]))
"""
"""A receiver that stops when it has half of a file, and says so."""


@contextmanager
def receiver(*command: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *command])
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/"), "a receiver", PATIENCE_S)
        yield process
    finally:
        process.kill()
        process.wait()


def fleet(folder: Path, model: Path, out: Path, live: Path, proxy: str) -> FleetSettings:
    gyre = (sys.executable, "-m", "gyre_data")
    core = (
        f"--model.path={model}", f'--data.runs=["{live}"]', f'--data.live=["{live}"]', f"--output.dir={out}",
        "--output.policy_id=rl", "--train.steps=9", "--train.executions_per_step=2", "--train.lr=1e-2",
        "--stream.satellites=true", "--stream.controlled=true", "--stream.parts=1", "--stream.host={host}",
        "--stream.port={port}", "--publish.method=mooncake",
    )  # fmt: skip
    (folder / "empty.toml").touch()
    engine = ("engine", "{weights}", "--port", "{port}", "--threads", "1", "--weight-version", "{label}")
    return FleetSettings(
        folder=folder / "sched", proxy=proxy, queries=("g0",), batch_groups=1, group_size=2, steps=9,
        cells=(CellSettings(id="c0", capacity=2), CellSettings(id="c1", capacity=2)), microsteps_per_group=1,
        rollout=RolloutSettings(command=(*gyre, *engine), ready_s=PATIENCE_S),
        train=TrainSettings(command=(), core_command=(*gyre, "train", str(folder / "empty.toml"), *core)),
        base_weights=str(model), base_label="tiny:0",
        weights=f"{out}/checkpoints/step-{{version:08}}", label="rl:{version}",
    )  # fmt: skip


def swap(settings: FleetSettings, place: LocalProcesses, proxy: ProxyApi, version: int) -> None:
    Rollout(settings, place, proxy).swap(Turn(), "c1", version)


def test_a_driven_engine_takes_weights_from_the_cores_memory_or_else_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "gyre_sched")
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    model, out = tiny_model(tmp_path / "tiny"), tmp_path / "out"
    whole = open_run(recorded_run(tmp_path / "whole", model, groups=1, shift=-0.1))
    ports, half = (free_port(), free_port()), tmp_path / "half"
    sound = ("-m", "gyre_data", "receive", str(tmp_path / "received"), "--port", str(ports[0]))
    stuck = ("-c", STUCK, str(tmp_path / "torn"), str(ports[1]), str(half))
    proxy = ProxyProcess(tmp_path / "run", None, model)
    place = LocalProcesses(tmp_path / "sched" / "cells")
    try:
        with (
            recording(whole, tmp_path / "live") as live,
            receiver(*sound, port=ports[0]),
            receiver(*stuck, port=ports[1]) as torn,
        ):
            live.add("g0")
            by_folder = fleet(tmp_path, model, out, live.path, proxy.url)
            api = ProxyApi(proxy.url, key=None, call_s=30.0)
            core = threading.Thread(target=Training(by_folder, place).join, args=(Turn(), "c0", 1))
            core.start()
            Rollout(by_folder, place, api).serve(Turn(), "c1", 0, 0)
            core.join()
            make_version(by_folder, place)

            def brought(port: int, **more: Any) -> FleetSettings:
                return replace(
                    by_folder, rollout=replace(by_folder.rollout, receiver=f"http://{{host}}:{port}"), **more
                )

            engine = Engine(url=Rollout(by_folder, place, api).url("c1"))
            base = engine.generate(PROMPT)
            # The folder is nowhere: what the engine loads can only have come out of the core's memory.
            swap(brought(ports[0], weights=str(tmp_path / "nowhere" / "{version}")), place, api, 1)
            from_memory = engine.generate(PROMPT)
            assert "the core brought rl:1" in caplog.text
            assert from_memory["meta_info"]["weight_version"] == "rl:1"
            assert api.engines()[engine.url]["version"] == "rl:1"
            swap(by_folder, place, api, 0)
            assert sampled(engine.generate(PROMPT)) == sampled(base)
            assert sampled(base) != sampled(from_memory)
            swap(by_folder, place, api, 1)
            assert sampled(engine.generate(PROMPT)) == sampled(from_memory)

            swap(by_folder, place, api, 0)
            torn_swap = threading.Thread(target=swap, args=(brought(ports[1]), place, api, 1))
            torn_swap.start()
            wait_until(half.exists, "half of a file to have come", PATIENCE_S)
            replies: list[httpx.Response] = []
            call = threading.Thread(target=lambda: replies.append(ask(proxy.url)))
            call.start()
            wait_until(lambda: api.engines()[engine.url]["in_flight"] > 0, "a call in flight", PATIENCE_S)
            torn.kill()
            for thread in (torn_swap, call):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
            assert "the core did not bring rl:1" in caplog.text
            assert api.engines()[engine.url]["version"] == "rl:1"
            assert sampled(engine.generate(PROMPT)) == sampled(from_memory)
            assert [reply.status_code for reply in replies] == [200], replies[0].text
            engine.client.close()
    finally:
        for cell in ("c0", "c1"):
            place.release(cell)
        proxy.stop()
    (recorded,) = calls_of(tmp_path / "run")
    assert (recorded.status, recorded.output_tokens) == ("ok", replies[0].json()["usage"]["output_tokens"])
    assert not verify(tmp_path / "run").problems


def make_version(settings: FleetSettings, place: LocalProcesses) -> None:
    """The core takes a step and saves it."""
    training, slot = Training(settings, place), place.slot("c0")
    assert slot is not None
    training.tell(Turn(), "c0", "run", {"epoch": 1, "key": [0, "g0", 0]})
    training.tell(Turn(), "c0", "optimise", {"version": 1, "generation": 0})

    def made() -> bool:
        return read_state(slot.address, after=-1, wait_s=0, timeout_s=30).applied == ((1, 0),)

    wait_until(made, "the core's step", PATIENCE_S)


def sampled(reply: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Greedy tokens, and every log-prob."""
    return reply["output_ids"], reply["meta_info"]["output_token_logprobs"]


def ask(url: str) -> httpx.Response:
    asked = {"model": "any", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "say 0"}]}
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as client:
        return client.post(f"{url}/x/e1/v1/messages", json=asked, headers={"x-api-key": "any"})
