"""Inference engines as the tests start them: the embedded one and real SGLang, each a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre_data.child import free_port

ROOT = Path(__file__).resolve().parents[2]
SGLANG_VENV = ROOT / ".venv-sglang"


@dataclass(kw_only=True, slots=True)
class Engine:
    """A running engine: its address and the calls the tests make."""

    url: str
    pid: int = 0
    """Of the server and of the process group it leads."""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120, trust_env=False))

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return self.client.post(self.url + path, json=body or {})

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def generate(self, ids: list[int], **more: Any) -> dict[str, Any]:
        response = self.post("/generate", request(ids, **more))
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, ids: list[int], **more: Any) -> Iterator[dict[str, Any]]:
        body = {**request(ids, **more), "stream": True}
        with self.client.stream("POST", self.url + "/generate", json=body) as response:
            assert response.status_code == 200
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[len("data: ") :])


def request(ids: list[int], *, extra_key: str = "k", rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """A body of /generate: greedy and blind to the model's own stop token unless the test says otherwise."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "logprob_start_len": -1,
        "extra_key": extra_key,
    }
    return body if rid is None else {**body, "rid": rid}


class Background:
    """A streaming request that runs while the test does something to the engine."""

    def __init__(self, engine: Engine, ids: list[int], **more: Any) -> None:
        self.num = 0
        self.last: dict[str, Any] = {}
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(engine, ids, more), daemon=True)
        self._thread.start()

    def _read(self, engine: Engine, ids: list[int], more: dict[str, Any]) -> None:
        try:
            # A client of its own: one httpx.Client is not meant for two threads' streams.
            for chunk in Engine(url=engine.url).stream(ids, **more):
                self.last = chunk
                self.num = len(chunk["output_ids"])
        except (httpx.HTTPError, AssertionError, ValueError) as error:
            self._failure = error

    def wait_for(self, num: int) -> None:
        """Until `num` tokens have come."""
        wait_until(lambda: self.num >= num or self._failure is not None, f"{num} tokens")
        assert self._failure is None

    def result(self) -> dict[str, Any]:
        """The last chunk, once the stream has ended."""
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "the stream did not end"
        assert self._failure is None
        return self.last


def wait_until(done: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Poll `done`; a test that waits for ever is a failure that says what it waited for."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def embedded_engine(model_dir: Path, *flags: str) -> Iterator[Engine]:
    """`gyre engine` on a port of its own."""
    port = free_port()
    start = "import sys; from gyre_data.main import run; sys.exit(run())"
    command = [sys.executable, "-c", start, "engine", str(model_dir), "--port", str(port), "--threads", "1", *flags]
    path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
    with _served(command, port, {"PYTHONPATH": path}) as engine:
        yield engine


def sglang_venv() -> Path:
    """The environment that `make sglang` makes; another checkout's serves as well."""
    venv = Path(os.environ.get("GYRE_TEST_SGLANG_VENV", SGLANG_VENV))
    if not (venv / ".ready").exists():
        pytest.fail(f"{venv} is not there: run `make sglang` first (or set GYRE_TEST_SGLANG_VENV)")
    return venv


@contextlib.contextmanager
def sglang_engine(model_dir: Path, *flags: str) -> Iterator[Engine]:
    """Real SGLang on a port of its own."""
    port = free_port()
    script = ROOT / "tools" / "sglang" / "serve.py"
    command = [sys.executable, str(script), str(sglang_venv()), str(model_dir), str(port), *flags]
    with _served(command, port, {"PYTHONPATH": ""}, seconds=480) as engine:
        yield engine


@contextlib.contextmanager
def _served(command: list[str], port: int, more: dict[str, str], seconds: float = 120) -> Iterator[Engine]:
    # A session of its own, so that the server's own children end with it.
    process = subprocess.Popen(
        command,
        env={**os.environ, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    engine = Engine(url=f"http://127.0.0.1:{port}", pid=process.pid)
    tail: list[str] = []
    reader = threading.Thread(target=_drain, args=(process, tail), daemon=True)
    reader.start()
    try:
        wait_until(lambda: process.poll() is not None or _answers(engine), f"{command[:3]} to be ready", seconds)
        assert process.poll() is None, "".join(tail)
        yield engine
    finally:
        engine.client.close()
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(timeout=10)
        if process.stdout is not None:
            process.stdout.close()


def _drain(process: subprocess.Popen[str], tail: list[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        tail.append(line)
        del tail[:-50]


def _answers(engine: Engine) -> bool:
    try:
        return engine.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
