"""A controller says who computes what: it may ask twice, and a satellite may die with what it was told to compute."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from gyre_data.child import free_port
from gyre_data.store import open as open_run
from gyre_train.loop import train
from tests.support.live import recording
from tests.support.streaming import ask, counted, events, farthest, processes, until
from tests.support.training import config, recorded_run, tiny_model


class Cell:
    """A training cell by its routes, as `gyre_sched.cells.training` speaks to it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def tell(self, route: str, **body: Any) -> None:
        request = urllib.request.Request(f"{self.url}/{route}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def state(self, after: int = -1, wait: float = 0) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/state?after={after}&wait={wait}", timeout=30) as answer:
            return json.load(answer)

    def has_done(self, epoch: int, *keys: tuple[int, str, int]) -> bool:
        done = self.state()["done"]
        return all([epoch, list(key)] in done for key in keys)


def test_a_controller_has_steps_made_and_a_satellite_dies_with_what_it_was_told(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")
    whole = open_run(recorded_run(tmp_path / "whole", model, groups=4, shift=-0.1))
    one, out = tmp_path / "one", tmp_path / "out"
    core, other = Cell(free_port()), Cell(free_port())
    with processes() as started, recording(whole, tmp_path / "run") as live:
        settings = (
            "--model.dtype=float64", "--train.executions_per_step=4", "--pack.tokens=48", "--train.steps=2",
            f'--data.live=["{live.path}"]',
        )  # fmt: skip
        stream = (
            "--stream.satellites=true", "--stream.controlled=true", "--stream.parts=2", "--stream.lease_s=5",
            "--stream.method=mooncake", f"--stream.port={core.url.rpartition(':')[2]}",
        )  # fmt: skip
        trainer = started.core(config(model, out, *settings, *stream, runs=live.path))
        satellite = started.satellite(out, "s", other.url.removeprefix("http://"))
        until(lambda: other.state()["version"] == 0 and events(out, "pulled"))
        for group in ("g0", "g1"):
            live.add(group)
            for _ in range(2):  # a controller that was killed asks everything again
                core.tell("run", epoch=3, key=[0, group, 0])
                other.tell("run", epoch=5, key=[0, group, 1])
            until(lambda group=group: core.has_done(3, (0, group, 0)) and other.has_done(5, (0, group, 1)))
        assert ask(out, "/step")["applied"] == 0
        core.tell("optimise", version=1, generation=0)
        until(lambda: core.state()["applied"] == [[1, 0]])
        assert core.state()["version"] == 1
        assert set(counted(out, 1).values()) == {1}
        assert len(counted(out, 1)) == 4

        until(lambda: other.state()["version"] == 1)
        keys = [(1, group, part) for group in ("g2", "g3") for part in range(2)]
        for group in ("g2", "g3"):
            live.add(group)
        for key in keys:
            other.tell("run", epoch=5, key=list(key))
        other.tell("run", epoch=4, key=[1, "void", 0])  # of an epoch that has ended
        until(lambda: other.has_done(5, *keys))
        satellite.kill()
        core.tell("optimise", version=2, generation=0)  # its gradients are gone: the core computes them
        until(lambda: core.state()["applied"] == [[1, 0], [2, 0]])  # it stays to be asked, though nothing is left
        trainer.terminate()
        trainer.join(240)
        assert trainer.exitcode == 0
        train(config(model, one, *settings, runs=live.path))
    for step in (1, 2):
        assert farthest(one / f"checkpoints/step-{step:08d}", out / f"checkpoints/step-{step:08d}") < 1e-9
