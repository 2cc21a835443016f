"""The parts of streaming training by themselves: what travels, how a group is cut, what a controller may say."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre_data.errors import ConfigError, EngineError
from gyre_train.edges import Ratio
from gyre_train.figures import Max, Mean, Sum
from gyre_train.pack import Pack
from gyre_train.plan import plan
from gyre_train.publish.control import Deadline
from gyre_train.streaming.acts import Task, Weights, check_place
from gyre_train.streaming.board import Gone
from gyre_train.streaming.carrier import open_carrier
from gyre_train.streaming.client import Client, Over, ended_before
from gyre_train.streaming.filling import micro_steps
from gyre_train.streaming.hub import Hub
from gyre_train.streaming.satellite import satellite, stopping
from gyre_train.streaming.server import ADDRESS_FILE, tell_over
from gyre_train.streaming.settings import StreamConfig
from gyre_train.streaming.told import Told
from gyre_train.streaming.wire import figures_from_json, figures_to_json, packs_from_bytes, packs_to_bytes
from tests.support.tree_inputs import make_tree


def packs() -> tuple[Pack, ...]:
    """Two executions in packs so small that a trajectory has its owned tokens in several."""
    trees = [
        make_tree([-1, 0, 1, 2, 2], [3, 4, 2, 3, 3], [False, True, False, True, True], seed=seed, execution=seed)
        for seed in range(2)
    ]
    return plan(trees, tokens=13).packs


def same(one: Any, two: Any) -> bool:
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(two, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two, equal_nan=one.dtype.kind == "f")
    return bool(one == two)


def test_packs_arrive_as_they_were_sent() -> None:
    sent = packs()
    assert len(sent) > 1
    sent = (*sent, dataclasses.replace(sent[0], routes_TLK=np.ones((sent[0].num_tokens, 2, 1), np.int16)))
    got = packs_from_bytes(packs_to_bytes(sent))
    assert len(got) == len(sent)
    assert all(same(one, two) for one, two in zip(sent, got, strict=True))
    assert packs_from_bytes(packs_to_bytes(())) == ()


def test_packs_are_never_unpickled() -> None:
    evil = io.BytesIO()
    np.savez(evil, packs=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        packs_from_bytes(evil.getvalue())


def test_figures_arrive_as_they_were_sent() -> None:
    figures = {"loss": Sum(amount=1.5), "ratio": Mean(amount=2.0, count=4.0), "gap": Max(amount=float("inf"))}
    assert figures_from_json(figures_to_json(figures)) == figures


@pytest.mark.parametrize(("ratio", "most"), [(Ratio.TOKEN, 3), (Ratio.EXECUTION, 2)])
def test_a_sequence_is_in_one_micro_step(ratio: Ratio, most: int) -> None:
    """Parts of an execution whose ratio is taken over all of it must meet; without such a ratio they need not."""
    whole = packs()
    cut = micro_steps(whole, 3, ratio)
    assert len(cut) == 3
    assert sorted(id(pack) for part in cut for pack in part) == sorted(map(id, whole))
    assert sum(bool(part) for part in cut) <= most
    if ratio is Ratio.EXECUTION:
        homes = [{int(e) for pack in part for e in pack.execution_E} for part in cut]
        assert not any(a & b for i, a in enumerate(homes) for b in homes[:i])


@pytest.mark.parametrize("method", ["files", "mooncake"])
def test_tensors_arrive_whole_or_not_at_all(tmp_path: Path, method: Any) -> None:
    stream = StreamConfig(satellites=True, method=method)
    here, there = (open_carrier(stream, tmp_path / "stream", "127.0.0.1") for _ in range(2))
    tensors = {"a": torch.arange(6, dtype=torch.float64).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}
    offer = here.offer("gradients-1", tensors)
    got = there.fetch(offer, Deadline(30))
    assert all(got[name].dtype == tensors[name].dtype and torch.equal(got[name], tensors[name]) for name in tensors)
    with pytest.raises(EngineError, match="wanted sha256 0"):
        there.fetch({**offer, "sha256": "0"}, Deadline(30))
    here.withdraw("gradients-1")
    here.withdraw("gradients-1")
    if method == "files":
        with pytest.raises(EngineError, match="do all see this folder"):
            there.fetch(offer, Deadline(30))
        with pytest.raises(EngineError, match="wanted the name of a file"):
            there.fetch({"file": "../../secret", "sha256": ""}, Deadline(30))


def test_replicas_of_another_layout_are_told() -> None:
    with pytest.raises(EngineError, match=r"wanted tensors for t1c0p0, got \['t0c0p0'\]; .* share tp, pp and cp"):
        check_place({"t0c0p0": {}}, "t1c0p0")


def test_a_name_that_is_no_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose another"):
        satellite("http://127.0.0.1:9", name="../up")


class Satellite:
    """Asks a hub as a satellite does."""

    def __init__(self, hub: Hub, name: str) -> None:
        self.hub, self.session = hub, hub.session
        self.epoch = hub.join({"session": self.session, "worker": name})["epoch"]

    def ask(self, route: str, **body: Any) -> Any:
        return getattr(self.hub, route)({"session": self.session, "epoch": self.epoch, **body})


def opened(told: Told | None = None, lease_s: float = 60.0) -> tuple[Hub, Satellite]:
    """A hub with step 1 open and one satellite that is ready for it."""
    hub = Hub(lease_s, "run:0", {}, told)
    one = Satellite(hub, "a")
    hub.open(1)
    assert hub.next(0).task is Task.OFFER
    hub.offered(Weights(step=1, weights={}, anchor=None))
    one.ask("pulled", step=1)
    return hub, one


def test_gradients_that_cannot_be_fetched_are_asked_for_again_and_count_once() -> None:
    hub, one = opened(lease_s=3.0)
    hub.offer({(1, "g", 0): ()}, whole=True)
    assert one.ask("claim") == {"run": (1, "g", 0)}
    assert one.ask("claim", done=[1, "g", 0])["hand_in"] == [(1, "g", 0)]
    asked = {"keys": [[1, "g", 0]], "offers": {}, "figures": {"loss": ["Sum", 2.0]}}
    assert one.ask("hand_in", **asked) == {"again": True}  # the core is busy
    assert hub.next(0).task is Task.ADD
    assert not hub.settle("the network is down")
    assert hub.next(0).task is not Task.CLOSE
    assert one.ask("hand_in", **asked) == {"again": True}
    assert hub.next(0).task is Task.ADD
    assert hub.settle(None)
    assert one.ask("hand_in", **asked) == {"added": False}  # its answer was lost
    assert hub.figures == {"loss": Sum(amount=2.0)}
    assert hub.next(0).task is Task.CLOSE


def test_a_core_that_began_anew_takes_nothing_of_before() -> None:
    hub, one = opened()
    hub.offer({(1, "g", 0): ()}, whole=True)
    one.session = "before"
    for route in ("claim", "beat", "hand_in", "leave"):
        with pytest.raises(Gone, match="the core began anew; join again"):
            one.ask(route)
    assert hub.next(0).task is Task.RUN


def test_whoever_is_said_to_be_dead_is() -> None:
    hub, one = opened()
    hub.offer({(1, "g", 0): ()}, whole=True)
    one.ask("claim")
    assert hub.next(0).task is Task.WAIT
    assert hub.lost({"worker": "a"}) == {"lost": 1}
    assert hub.next(0).task is Task.RUN
    with pytest.raises(Gone, match="join again"):
        one.ask("claim", done=[1, "g", 0])
    assert [event["kind"] for event in hub.events(0)["events"]] == [
        "joined", "opened", "pulled", "offered", "sealed", "claimed", "lost", "claimed",
    ]  # fmt: skip
    assert hub.view()["micro_steps"] == {"pending": 0, "running": 1, "held": 0, "reduced": 0}


def test_a_controlled_step_is_computed_by_whom_it_was_told() -> None:
    told = Told()
    hub, one = opened(told)
    told.run({"epoch": 2, "key": [0, "g", 0]})
    assert one.ask("claim", want=[1, "g", 1]) == {"wait": True}
    assert hub.named == ("g",)
    hub.offer({(1, "g", part): () for part in range(3)}, whole=False)
    assert one.ask("claim") == {"wait": True}
    assert one.ask("claim", want=[1, "g", 1]) == {"run": (1, "g", 1)}
    assert hub.next(0).task is Task.RUN
    hub.ran()
    assert hub.next(0).task is Task.WAIT  # the last one was told nobody
    assert told.state(-1, 0)["done"] == [[2, [0, "g", 0]]]
    assert one.ask("claim", done=[1, "g", 1], want=[1, "g", 0]) == {"spent": True}
    assert not hub.is_whole
    told.optimise({"version": 1, "generation": 4})
    assert hub.is_whole
    hub.offer({}, whole=True)
    assert hub.next(0).task is Task.RUN  # from here on the core computes what is left
    hub.ran()
    assert one.ask("claim")["hand_in"] == [(1, "g", 1)]
    hub.close("run:1")
    assert told.state(-1, 0)["applied"] == [], "engines could not load it yet, and a core that dies makes it again"
    hub.saved()
    assert (told.state(-1, 0)["version"], told.state(-1, 0)["applied"]) == (1, [(1, 4)])
    assert one.ask("claim", want=[1, "g", 1]) == {"spent": True}


def test_what_no_controller_names_is_computed_by_the_idle_after_what_was_told() -> None:
    told = Told()
    hub, one = opened(told)
    hub.offer({(1, "recorded/r", part): () for part in range(2)}, whole=False)
    told.run({"epoch": 2, "key": [0, "g", 0]})
    assert hub.named == ("g",)
    hub.offer({(1, "g", 0): ()}, whole=False)
    assert one.ask("claim") == {"run": (1, "recorded/r", 0)}
    hub.next(0)
    hub.ran()
    assert told.state(-1, 0)["done"] == [[2, [0, "g", 0]]], "what was told goes first"
    assert hub.next(0).task is Task.RUN
    hub.ran()
    told.optimise({"version": 1, "generation": 0})
    hub.offer({}, whole=True)
    assert hub.next(0).task is Task.WAIT, "the step has all of them"
    assert one.ask("claim", done=[1, "recorded/r", 0])["hand_in"] == [(1, "recorded/r", 0)]


def test_what_an_earlier_epoch_was_told_is_void() -> None:
    told = Told(3)
    told.run({"epoch": 1, "key": [3, "g", 0]})
    told.run({"epoch": 2, "key": [3, "g", 1]})
    told.run({"epoch": 1, "key": [3, "g", 2]})
    assert told.wanted() == [(4, "g", 1)]
    told.did((4, "g", 1))
    told.run({"epoch": 2, "key": [3, "g", 1]})
    assert told.wanted() == []
    told.optimise({"version": 3, "generation": 0})  # of a core that died after it had made it
    assert told.state(-1, 0) == {"seq": 2, "version": 3, "done": [[2, [3, "g", 1]]], "applied": [(3, 0)]}


def test_the_first_sigterm_asks_and_the_second_ends(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    with stopping(file):
        os.kill(os.getpid(), signal.SIGTERM)
        assert file.exists()
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_satellite_without_a_core_leaves_when_the_folder_says_that_training_is_over(tmp_path: Path) -> None:
    """The core may end before a satellite that waited for it has said hello."""
    with socket.create_server(("127.0.0.1", 0)) as core:
        url = f"http://127.0.0.1:{core.getsockname()[1]}"
        (tmp_path / ADDRESS_FILE).write_text(json.dumps({"url": url, "pid": 1}))
        waiting = threading.Thread(target=satellite, args=(str(tmp_path),), kwargs={"patience_s": 300.0}, daemon=True)
        waiting.start()
        core.accept()[0].close()  # it asked, and is not answered
        tell_over(tmp_path)
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_satellite_whose_training_ends_as_it_joins_leaves(tmp_path: Path) -> None:
    left = threading.Event()

    def helping() -> None:
        satellite(str(tmp_path), patience_s=300.0)
        left.set()

    with socket.create_server(("127.0.0.1", 0)) as core:
        url = f"http://127.0.0.1:{core.getsockname()[1]}"
        (tmp_path / ADDRESS_FILE).write_text(json.dumps({"url": url, "pid": 1}))
        threading.Thread(target=helping, daemon=True).start()
        asked = core.accept()[0]
        asked.recv(65536)
        tell_over(tmp_path)
        hello = json.dumps({"config": "", "anchor": None})
        asked.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(hello)}\r\n\r\n{hello}".encode())
        assert left.wait(60)
        asked.close()


def test_an_end_from_before_is_no_end(tmp_path: Path) -> None:
    (tmp_path / ADDRESS_FILE).write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    assert ended_before(str(tmp_path)) is None
    tell_over(tmp_path)
    stale = ended_before(str(tmp_path))
    assert Client(str(tmp_path), stale).url() == "http://127.0.0.1:9"
    with pytest.raises(Over):
        Client(str(tmp_path)).url()
    (tmp_path / ADDRESS_FILE).write_text('{"url": "http://127.0.0.1:10", "pid": 2}')
    tell_over(tmp_path)
    with pytest.raises(Over):
        Client(str(tmp_path), stale).url()
