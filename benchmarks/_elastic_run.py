"""One run of real cells: proxy, `gyre run`, controller, engines, `gyre train` and satellites, a process each.

What is left in the folder is all that the report reads: `sched/ledger.jsonl` and the cells' logs, the proxy's run `run`
with the workspaces of its executions, the trainer's folder `out`, and `fleet.toml`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_data.child import answers, free_port, gyre_child, start_gyre, stop
from gyre_sched.cells.local import LocalProcesses
from gyre_sched.cells.wire import ask
from gyre_train.tiny import SPECIAL_TOKENS, make_tiny

__all__ = ["SIZES", "Size", "endless_model", "live"]

_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large a run is."""

    cells: int
    steps: int
    burst: int
    batch_groups: int
    capacity: int
    """Executions of a cell."""
    tasks: tuple[tuple[int, tuple[int, ...]], ...]
    """Of a burst, a group each: tokens of a reply, and the replies of each member. Groups end one after the other."""

    @property
    def group_size(self) -> int:
        """Members of a group."""
        return len(self.tasks[0][1])

    @property
    def groups(self) -> int:
        """Dispatched in all, and trained on."""
        return self.steps * self.batch_groups


SIZES = {
    "full": Size(
        cells=2, steps=6, burst=2, batch_groups=2, capacity=6,
        tasks=((96, (1, 1, 2)), (96, (2, 2, 3)), (96, (3, 3, 4)), (96, (4, 5, 6))),
    ),
    "quick": Size(
        cells=2, steps=2, burst=1, batch_groups=3, capacity=6,
        tasks=((48, (1, 1, 1)), (400, (1, 1, 1)), (400, (1, 1, 1))),
    ),
}  # fmt: skip
"""In the quick one six of nine executions are long and a cell has five at most, so the core leaves some of them."""


def endless_model(folder: Path) -> Path:
    """A tiny Qwen3 that never ends a reply by itself: one as long as was asked takes as long each time.

    All embeddings have a part in common, and the tokens that end a reply answer to it with a low logit. Eight layers
    make it slow, some 50 tokens a second beside others on a CPU.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from tokenizers import Tokenizer

    make_tiny(folder, vocab=512, layers=8, context=4096)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ends = torch.tensor([tokenizer.token_to_id(text) for text in SPECIAL_TOKENS])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 10.0
    tensors["lm_head.weight"][ends, 0] = -20.0
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def live(
    folder: Path, model: Path, size: Size, policy: str, engine: list[str], *, carrier: str, limit_s: float
) -> None:
    """Run to the last step; TimeoutExpired after `limit_s`, CalledProcessError when the controller fails."""
    folder.mkdir(parents=True)
    (folder / "tasks.toml").write_text(_tasks(size))
    with ExitStack() as stack:
        proxy = stack.enter_context(_proxy(folder, model))
        (folder / "fleet.toml").write_text(_fleet(folder, model, size, policy, engine, proxy, carrier))
        jobs = str(len(size.tasks) * size.group_size)
        words = ["run", "-p", str(folder / "tasks.toml"), "--run", str(folder / "run"), "--serve", "-j", jobs]
        stack.callback(stop, start_gyre([*words, "--judges", "1"], folder / "harnesses.log", env=_added()))
        stack.callback(_end_cells, folder / "sched" / "cells", size)
        command = [sys.executable, "-m", "gyre_sched.cells", str(folder / "fleet.toml")]
        with (folder / "controller.log").open("ab") as log:
            env = {**os.environ, **_added()}
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=limit_s, check=True, env=env
            )


def _added() -> dict[str, str]:
    """What every child gets: this checkout, whatever is installed, and one thread, for they share the cores."""
    paths = (str(_HERE.parent), str(_HERE.parent / "proxy"), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def _end_cells(folder: Path, size: Size) -> None:
    place = LocalProcesses(folder)
    for number in range(size.cells):
        place.release(f"c{number}")


@contextmanager
def _proxy(folder: Path, model: Path) -> Iterator[str]:
    """A proxy wants an engine to start with; this one sleeps, and is taken away before any call comes."""
    port, engine_port = free_port(), free_port()
    command = [sys.executable, "-S", "-m", "gyre_sched.cells.emulated", "rollout"]
    first = f"http://127.0.0.1:{engine_port}"
    command += ["--port", str(engine_port), "--label", "base:0"]
    with subprocess.Popen(command, env={**os.environ, **_added()}) as engine:
        try:
            deadline = time.monotonic() + 60
            while not answers(f"{first}/ready") and time.monotonic() < deadline:
                time.sleep(0.05)
            words = ["proxy", "--run", str(folder / "run"), "--engine", first, "--tokenizer", str(model)]
            words += ["--port", str(port), "--context-window", "4096"]
            proxy = f"http://127.0.0.1:{port}"
            with gyre_child(words, folder / "proxy.log", f"{proxy}/api/status", wait_s=180, env=_added()):
                ask(f"{proxy}/api/engines", {"action": "remove", "url": first}, timeout_s=30)
                engine.kill()
                yield proxy
        finally:
            engine.kill()


def _tasks(size: Size) -> str:
    """A task for each group of a burst, so that groups of a burst are of different tasks."""
    python, tables = [sys.executable, "-S"], list[str]()
    for number, (tokens, turns) in enumerate(size.tasks):
        harness = [*python, str(_HERE / "_elastic_harness.py"), "{sample_index}", json.dumps(turns)]
        table = {
            "id": f"t{number}", "prompt": f"Tell story number {number}.",
            "command": shlex.join([*harness, str(tokens), "{prompt}"]),
            "evaluator": shlex.join([*python, str(_HERE / "_elastic_judge.py")]),
        }  # fmt: skip
        tables.append("[[task]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
    return "\n".join(["[defaults]\ntimeout_s = 3600.0\noverall_timeout_s = 3600.0\n", *tables])


def _fleet(folder: Path, model: Path, size: Size, policy: str, engine: list[str], proxy: str, carrier: str) -> str:
    gyre, out = [sys.executable, "-m", "gyre_data"], folder / "out"
    tasks = len(size.tasks)
    queries = [f"t{n % tasks}" + (f"#{n // tasks}" if n >= tasks else "") for n in range(size.groups)]
    (folder / "rl.toml").touch()
    core = [
        *gyre, "train", str(folder / "rl.toml"), f"--model.path={model}", f'--data.runs=["{folder / "run"}"]',
        f'--data.live=["{folder / "run"}"]', f"--train.steps={size.steps + 1}", "--train.lr=1e-4",
        f"--train.executions_per_step={size.batch_groups * size.group_size}", f"--output.dir={out}",
        "--output.policy_id=rl", f"--output.keep={size.steps + 1}", "--stream.satellites=true",
        "--stream.controlled=true", "--stream.parts=2", f"--stream.method={carrier}", "--stream.host={host}",
        "--stream.port={port}",
    ]  # fmt: skip
    satellite = [sys.executable, "-m", "gyre_train.streaming.satellite", str(out)]
    told: dict[str, Any] = {
        "folder": str(folder / "sched"), "proxy": proxy, "queries": queries, "batch_groups": size.batch_groups,
        "group_size": size.group_size, "microsteps_per_group": 2, "steps": size.steps, "policy": policy,
        "base_weights": str(model), "base_label": "base:0", "weights": f"{out}/checkpoints/step-{{version:08}}",
        "label": "rl:{version}", "lost_s": 120.0, "call_s": 60.0,
    }  # fmt: skip
    tables: dict[str, Mapping[str, Any]] = {
        "policy_settings": {"burst": size.burst, "depth": float(size.burst)},
        "rollout": {"command": engine, "ready_s": 600.0},
        "train": {
            "core_command": core, "command": [*satellite, "--name", "{cell}", "--listen", "{host}:{port}"],
        },
    }  # fmt: skip
    lines = [*_lines(told)]
    for name, table in tables.items():
        lines += [f"\n[{name}]", *_lines(table)]
    for number in range(size.cells):
        lines += ["\n[[cells]]", *_lines({"id": f"c{number}", "capacity": size.capacity})]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in table.items()]
