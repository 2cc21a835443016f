"""Publishing weights to engines that refuse, hang, drip, die halfway or come back: nothing holds the trainer up."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gyre_data.errors import ConfigError, EngineError
from gyre_data.types import PolicyVersion
from gyre_train.config import load_config
from gyre_train.publish import Published
from gyre_train.publish.digests import FolderDigests, _digest
from gyre_train.publish.open import open_publisher
from gyre_train.publish.settings import PublishConfig
from tests.support.engines import embedded_engine, wait_until
from tests.support.publishing import check_publish
from tests.support.training import tiny_model

ONE = PolicyVersion(policy_id="run", n=1)


class Fake(ThreadingHTTPServer):
    """Answers the control routes as a whole and honest engine does, but for `faults`: path -> what to do instead."""

    daemon_threads = True

    def __init__(self, weights: str = "old", version: str = "run:0") -> None:
        self.weights, self.version = weights, version
        self.faults: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.heard: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/update_weights_from_disk":
            self.weights, self.version = Path(body["model_path"]).name, body["weight_version"]
        if path == "/weights_checker":
            return {"success": True, "ranks": [{"checksums": {"w": self.weights}}]}
        return {"success": True, "weight_version": self.version, "device": "cuda"}


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.server.heard.append(self.path)
        self.server.bodies.append(body)
        fault = self.server.faults.get(self.path)
        if fault is not None:
            fault(self)
            return
        self.say(200, self.server.reply(self.path, body))

    do_GET = do_POST

    def say(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(*servers: Fake) -> Iterator[None]:
    threads = [threading.Thread(target=s.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True) for s in servers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def publish(*engines: Fake, folder: str = "/w/new", proxy: Fake | None = None, timeout_s: float = 5) -> list[Published]:
    urls = tuple(engine.url for engine in engines)
    opened = open_publisher(PublishConfig(engines=urls, proxy=proxy.url if proxy else None, timeout_s=timeout_s))
    try:
        return list(opened.publish(Path(folder), ONE))
    finally:
        opened.close()


def refuse(handler: Any) -> None:
    handler.say(400, {"success": False, "message": "no"})


def never(handler: Any) -> None:
    time.sleep(30)


def actions(proxy: Fake) -> list[str]:
    return [body["action"] for body in proxy.bodies]


def test_what_was_trained_is_served(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    with embedded_engine(model) as engine:
        check_publish(engine, model, tmp_path)


def test_the_order_of_a_publish_and_what_the_proxy_hears() -> None:
    engine, proxy = Fake(), Fake()
    with serving(engine, proxy):
        (done,) = publish(engine, proxy=proxy)
    assert (done.error, done.usable) == (None, True)
    told = [path for path in engine.heard if path not in ("/model_info", "/server_info", "/weights_checker")]
    assert told == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert engine.bodies[0] == {"mode": "retract"}
    load = engine.bodies[engine.heard.index("/update_weights_from_disk")]
    assert (load["flush_cache"], load["abort_all_requests"], load["weight_version"]) == (True, False, "run:1")
    assert proxy.bodies == [{"action": "version", "url": engine.url, "version": "run:1"}]


def test_a_refused_load_leaves_the_old_weights_in_service() -> None:
    engine, proxy = Fake(), Fake()
    engine.faults["/update_weights_from_disk"] = refuse
    with serving(engine, proxy):
        (done,) = publish(engine, proxy=proxy)
    assert done.usable
    assert done.error is not None
    assert "update_weights_from_disk: wanted success, got 400" in done.error
    assert "goes on with run:0" in done.error
    assert engine.heard[-1] == "/continue_generation"
    assert proxy.heard == []


def test_a_refused_pause_touches_nothing_and_the_engine_is_told_to_continue() -> None:
    engine = Fake()
    engine.faults["/pause_generation"] = refuse
    with serving(engine):
        (done,) = publish(engine)
    assert done.usable
    assert done.error is not None
    assert engine.heard == ["/pause_generation", "/continue_generation"]


@pytest.mark.parametrize("version", ["run:0", "run:1"])
def test_a_mix_is_never_continued_and_leaves_the_proxy_until_the_next_complete_publish(version: str) -> None:
    engine, proxy = Fake(), Fake()

    def half(handler: Any) -> None:
        engine.weights, engine.version = "mix", version
        refuse(handler)

    engine.faults["/update_weights_from_disk"] = half
    with serving(engine, proxy):
        opened = open_publisher(PublishConfig(engines=(engine.url,), proxy=proxy.url, timeout_s=5))
        (done,) = opened.publish(Path("/w/new"), ONE)
        assert not done.usable
        assert done.error is not None
        assert "may hold a mix of weights and is out of service until the next complete publish" in done.error
        assert "/continue_generation" not in engine.heard
        assert actions(proxy) == ["remove"]
        del engine.faults["/update_weights_from_disk"]
        (again,) = opened.publish(Path("/w/new"), ONE)
        opened.close()
    assert (again.error, again.usable) == (None, True)
    assert engine.heard[-1] == "/continue_generation"
    assert actions(proxy) == ["remove", "add"]


def test_another_version_than_wanted_is_no_success() -> None:
    engine = Fake()

    def unnamed(handler: Any) -> None:
        engine.weights = "new"
        handler.say(200, {"success": True})

    engine.faults["/update_weights_from_disk"] = unnamed
    with serving(engine):
        (done,) = publish(engine)
    assert not done.usable
    assert done.error is not None
    assert "wanted it to serve run:1, it says run:0" in done.error


def test_a_hanging_engine_costs_its_time_only_and_the_others_go_on() -> None:
    hangs, fine, proxy = Fake(), Fake(), Fake()
    gate = threading.Event()

    def waits(handler: Any) -> None:
        gate.wait()
        handler.say(200, {"success": True})

    hangs.faults = dict.fromkeys(("/update_weights_from_disk", "/continue_generation"), waits)
    with serving(hangs, fine, proxy):
        opened = open_publisher(PublishConfig(engines=(hangs.url, fine.url), proxy=proxy.url, timeout_s=3))
        for _ in range(2):
            hung, other = opened.publish(Path("/w/new"), ONE)  # which nobody but its time limit ends
            assert other.error is None
            assert hung.error is not None
            assert "hangs" in hung.error
            assert not hung.usable
        assert {"action": "remove", "url": hangs.url} in proxy.bodies
        hangs.faults = {}
        gate.set()
        # It answers again: it holds the old weights whole, so it is told to continue, and the proxy has it back.
        wait_until(lambda: {"action": "add", "url": hangs.url} in proxy.bodies, "the engine to be taken back")
        assert hangs.heard[-1] == "/continue_generation"
        opened.close()


def test_an_answer_that_drips_is_cut_off_at_the_deadline() -> None:
    engine = Fake()

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        with contextlib.suppress(OSError):  # the other side hangs up
            while True:
                handler.wfile.write(b" ")
                time.sleep(0.05)

    engine.faults = {"/pause_generation": drip, "/continue_generation": drip}
    with serving(engine):
        (done,) = publish(engine, timeout_s=0.5)
    assert done.error is not None
    assert "pause_generation: wanted an answer within 0.5 s, got none; the engine hangs" in done.error
    assert engine.heard.count("/continue_generation") >= 2  # at once, and when the publisher was closed


def test_an_engine_that_is_gone_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    opened = open_publisher(PublishConfig(engines=(url, "http://[::1"), timeout_s=5))
    gone, nonsense = opened.publish(tmp_path, ONE)
    opened.close()
    assert gone.error is not None
    assert f"{url}/pause_generation: wanted an answer" in gone.error
    assert "is the engine up?" in gone.error
    assert nonsense.error is not None
    assert "http://[::1/pause_generation: wanted an answer, got InvalidURL" in nonsense.error


def test_a_broadcast_that_the_engine_refuses_ends_at_once(tmp_path: Path) -> None:
    engine = Fake()
    engine.faults["/init_weights_update_group"] = refuse
    opened = open_publisher(PublishConfig(engines=(engine.url,), method="broadcast", timeout_s=900))
    with serving(engine):
        (done,) = opened.publish(tiny_model(tmp_path / "m"), ONE)  # a test has less time than that
    opened.close()
    assert done.usable
    assert done.error is not None
    assert "init_weights_update_group: wanted success, got 400" in done.error


def test_digests_of_fused_stacked_padded_and_tied_tensors(tmp_path: Path) -> None:
    at = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (70, 4),
        **{f"{at}self_attn.{x}_proj.weight": (4 if x == "q" else 2, 4) for x in "qkv"},
        **{f"{at}mlp.experts.{i}.{x}_proj.weight": (4, 4) for i in range(11) for x in ("gate", "up", "down")},
    }
    tensors = {name: torch.randn(*shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    rows = torch.cat((tensors["model.embed_tokens.weight"], torch.zeros(58, 4)))
    experts = range(11)
    served = {
        "model.embed_tokens.weight": rows,
        "lm_head.weight": rows[:70],
        f"{at}self_attn.qkv_proj.weight": torch.cat([tensors[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"]),
        f"{at}mlp.experts.w13_weight": torch.stack(
            [torch.cat([tensors[f"{at}mlp.experts.{i}.{x}_proj.weight"] for x in ("gate", "up")]) for i in experts]
        ),
        f"{at}mlp.experts.w2_weight": torch.stack([tensors[f"{at}mlp.experts.{i}.down_proj.weight"] for i in experts]),
    }
    found = {name: _digest(tensor) for name, tensor in served.items()}
    FolderDigests(tmp_path).check(found)
    halves = {name: _digest(tensor.bfloat16()) for name, tensor in served.items()}
    FolderDigests(tmp_path, torch.bfloat16).check(halves)
    for wrong in (
        {**found, "lm_head.weight": "0" * 16},
        {**found, "extra": "0" * 16},
        {k: v for k, v in found.items() if "w2" not in k},
    ):
        with pytest.raises(EngineError, match="differ"):
            FolderDigests(tmp_path).check(wrong)


BASE = ["--model.path=m", "--output.dir=o", '--data.runs=["r"]']


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--publish.every=2"], "publish.every has no effect without engines"),
        (["--publish.engines=e", "--publish.host=h"], "publish.host has no effect with publish.method = files"),
        (["--publish.engines=e", "--publish.backend=nccl"], "choose broadcast, or remove it"),
        (["--publish.engines=e", "--publish.method=broadcast", "--publish.receivers=r"], "choose mooncake"),
        (["--publish.engines=e", "--publish.method=mooncake"], "wanted one beside each of 1 engines, got 0"),
        (
            ["--publish.engines=e", "--publish.method=mooncake", "--publish.receivers=r", "--publish.device=mlx5_0"],
            "publish.device has no effect with publish.protocol = tcp",
        ),
        (["--publish.engines=e", "--publish.method=nfs"], "wanted one of files, broadcast, mooncake"),
    ],
)
def test_settings_without_effect_are_refused(more: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(None, [*BASE, *more])
