"""What publishing must do by every method, as tests that an engine's own test module subclasses.

The subclass gives `served` (a running Engine) and `models` (its folder and two more checkpoints of the same shape).
"""

import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from safetensors.torch import load_file, save_file

from gyre_data.errors import EngineError
from gyre_data.types import PolicyVersion
from gyre_train.publish import Publisher, broadcast
from gyre_train.publish.digests import FolderDigests
from gyre_train.publish.open import open_publisher
from gyre_train.publish.receiver import receive
from gyre_train.publish.settings import PublishConfig
from gyre_train.tiny import make_tiny
from tests.support.engines import Engine, request, wait_until
from tests.support.publishing import PROMPT, served_gap
from tests.support.training import TEXTS, VOCAB

TOLERANCE = 1e-4
CONTEXT = 8192
LENGTHS = (170, 230, 310)
"""Of the replies that go on under a publish: they do not end together."""


def make_checkpoints(folder: Path) -> tuple[Path, Path, Path]:
    one, two, three = (
        make_tiny(folder / name, vocab=VOCAB, hidden=32, heads=4, kv_heads=2, context=CONTEXT, texts=TEXTS, seed=seed)
        for seed, name in enumerate(("one", "two", "three"))
    )
    return one, two, three


def version(n: int, policy_id: str = "run") -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, n=n)


@contextmanager
def asking_on(engine: Engine) -> Iterator[list[dict[str, Any]]]:
    """Some request is in flight at any moment of the block; gives what the engine says of each, whole at the end.

    One after the other, and short: however long the engine takes to listen, none outlives the block by much.
    """
    told: list[dict[str, Any]] = []
    over, going = threading.Event(), threading.Barrier(len(LENGTHS) + 1)

    def ask(length: int) -> None:
        own = Engine(url=engine.url)
        going.wait(60)
        while not over.is_set():
            told.append(own.generate(PROMPT, temperature=1.0, max_new_tokens=length)["meta_info"])

    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        asked = [pool.submit(ask, length) for length in LENGTHS]
        going.wait(60)
        wait_until(lambda: len(told) >= len(LENGTHS) or any(one.done() for one in asked), "the first replies")
        try:
            yield told
        finally:
            over.set()
    for one in asked:
        one.result()


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running `gyre receive`."""
    bound: list[ThreadingHTTPServer] = []
    ready = threading.Event()

    def tell(server: ThreadingHTTPServer) -> None:
        bound.append(server)
        ready.set()

    folder = tmp_path_factory.mktemp("received")
    thread = threading.Thread(target=receive, args=(folder,), kwargs={"on_bound": tell}, daemon=True)
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{bound[0].server_address[1]}"
    bound[0].shutdown()
    thread.join(30)


@pytest.fixture
def publisher(method: Literal["files", "broadcast", "mooncake"], served: Engine, receiver: str) -> Iterator[Publisher]:
    if method == "mooncake" and sys.platform != "linux":
        pytest.skip("Mooncake has wheels for Linux only")
    receivers = (receiver,) if method == "mooncake" else ()
    config = PublishConfig(engines=(served.url,), method=method, receivers=receivers, timeout_s=120)
    opened = open_publisher(config)
    yield opened
    opened.close()


@pytest.mark.parametrize("method", ["files", "broadcast", "mooncake"])
class PublishContract:
    def test_log_probs_digests_and_version_are_those_of_the_folder_and_requests_go_on(
        self, method: str, served: Engine, publisher: Publisher, models: tuple[Path, Path, Path]
    ) -> None:
        _, two, three = models
        (first,) = publisher.publish(two, version(1))
        assert (first.error, first.usable) == (None, True)
        assert served_gap(served, two, "run:1") < TOLERANCE
        with asking_on(served) as replies:
            (second,) = publisher.publish(three, version(2))
        assert second.error is None
        assert {reply["finish_reason"]["type"] for reply in replies} == {"length"}, "none was aborted"
        crossed = [reply["weight_versions"] for reply in replies if len(reply["weight_versions"]) > 1]
        assert crossed, "those in flight went on under the new weights"
        assert {tuple(span["version"] for span in spans) for spans in crossed} == {("run:1", "run:2")}
        assert served.get("/model_info").json()["weight_version"] == "run:2"
        assert served_gap(served, three, "run:2") < TOLERANCE
        assert served_gap(served, two, "run:2") > 1e-2  # the weights differ enough for the check to see
        digests = served.post("/weights_checker", {"action": "checksum"}).json()["ranks"][0]["checksums"]
        FolderDigests(three).check(digests)
        with pytest.raises(EngineError, match="differ"):
            FolderDigests(two).check(digests)

    def test_weights_that_do_not_fit_leave_no_mix(
        self,
        method: str,
        served: Engine,
        publisher: Publisher,
        models: tuple[Path, Path, Path],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(broadcast, "_BUCKET_BYTES", 1)  # tensors go one by one, and the first ones fit
        one, two, _ = models
        (before,) = publisher.publish(one, version(3))
        assert before.error is None
        broken = tmp_path / "broken"
        shutil.copytree(models[2], broken)
        tensors = load_file(broken / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        save_file({**tensors, name: tensors[name][:, :7].contiguous()}, broken / "model.safetensors")
        (done,) = publisher.publish(broken, version(4))
        assert done.error is not None
        if method != "broadcast" and done.usable:  # it says that it serves the old weights: it does, and goes on
            assert "goes on with run:3" in done.error
            assert served.get("/model_info").json()["weight_version"] == "run:3"
            assert served_gap(served, one, "run:3") < TOLERANCE
        else:
            assert not done.usable
            assert "out of service until the next complete publish" in done.error
            with pytest.raises(httpx.ReadTimeout):  # it computes nothing until then
                served.client.post(f"{served.url}/generate", json=request(PROMPT, rid=f"waits-{method}"), timeout=1)
        (after,) = publisher.publish(two, version(5))
        assert (after.error, after.usable) == (None, True)
        assert served_gap(served, two, "run:5") < TOLERANCE
