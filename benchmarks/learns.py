"""Does live training learn? A tiny model served by real SGLang, a harness loop, `gyre train`; scores of held-out tasks.

Run: python benchmarks/learns.py [--quick] [--seeds 3] [--engine sglang|embedded] [--out docs]. The task, harness and
evaluator are examples/learns/. Each seed makes a model, warms it up on a teacher's text (`gyre train warm.toml`) and
trains it on rollouts (`gyre train rl.toml`), which publishes every step into one SGLang, started here. The control
repeats the first seed with the advantages of each step shuffled (_shuffled.py). The scores are those that `gyre train`
wrote to evals.jsonl. --out writes learns.json (all figures) and learns.svg there, after each training anew. Bounds (not
of --quick): every seed rises by 0.2 at least within 15 minutes, the control by 0.1 at most; 1 when one is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from _frame import Bounds, missed
from _plot import bands

import gyre_data
from gyre_data.child import answers, free_port, run_gyre
from gyre_data.execution import executions
from gyre_train.lineage import base_version
from gyre_train.metrics import read_metrics
from gyre_train.tiny import make_tiny

__all__ = ["learn", "prepare", "version"]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "learns"
CONVERSATIONS = 3200
SIZES = {"vocab": 384, "hidden": 64, "layers": 2, "context": 4096}
UP_S = 600.0
BOUNDS: Bounds = {"rise_least": (0.2, None), "rise_shuffled": (None, 0.1), "seed_seconds_most": (None, 900.0)}


def prepare(folder: Path, *, seed: int, steps: int = 200, conversations: int = CONVERSATIONS) -> Path:
    """Make a model of random weights and warm it up; returns a plain Hugging Face folder."""
    text = folder / "warm.jsonl"
    with text.open("w") as file:
        words = [sys.executable, str(EXAMPLE / "teacher.py"), str(conversations), str(seed)]
        subprocess.run(words, stdout=file, check=True)
    _make(folder / "model-init", seed=seed, texts=_rendered(text, folder / "letters"), **SIZES)
    said = [f"--model.path={folder / 'model-init'}", f"--output.dir={folder / 'warm'}", f"--train.seed={seed}"]
    said += [f'--data.chat=["{text}"]', f"--train.steps={steps}", f"--output.save_every={steps}"]
    run_gyre(["train", str(EXAMPLE / "warm.toml"), *said], folder / "warm.log")
    (trained,) = (folder / "warm" / "checkpoints").glob("step-*")
    ignored = shutil.ignore_patterns("state.json", "trainer")
    return Path(shutil.copytree(trained, folder / "model", ignore=ignored))


def _make(folder: Path, **more: Any) -> None:
    make_tiny(folder, **more)
    shutil.copy(EXAMPLE / "template.jinja", folder / "chat_template.jinja")


def _rendered(text: Path, folder: Path) -> list[str]:
    """Conversations as the model sees them, for its tokenizer to be made from."""
    from transformers import AutoTokenizer

    _make(folder, vocab=300, hidden=8, layers=1, heads=1, kv_heads=1, texts=[""])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in text.read_text().splitlines()[:400]]
    return [tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in rows]


def version(model: Path) -> str:
    """Which weights an engine that serves the folder has."""
    return str(base_version(model))


@contextmanager
def sglang(model: Path, venv: Path, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Real SGLang on a port of its own, by its address and process; it ends with the block."""
    port = free_port()
    words = [sys.executable, str(ROOT / "tools" / "sglang" / "serve.py"), str(venv), str(model), str(port)]
    words += ["--weight-version", version(model), "--max-total-tokens", "40000", "--max-running-requests", "16"]
    with log.open("ab") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "PYTHONPATH": ""}
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + UP_S
    try:
        while not answers(f"{url}/ready"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not come up; {log} ends:\n{log.read_text(errors='replace')[-800:]}")
            time.sleep(0.5)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def learn(
    folder: Path, model: Path, *, seed: int, engine: str | None, said: Sequence[str] = (), shuffled: bool = False
) -> dict[str, Any]:
    """`gyre train rl.toml` on `model`, into `folder`; without `engine` it starts an embedded one itself."""
    out = folder / "rl"
    overrides = [
        f"--model.path={model}", f"--rollout.tasks={EXAMPLE / 'tasks.toml'}", f"--output.dir={out}",
        f"--train.seed={seed}", f"--publish.engines={json.dumps([engine] if engine else [])}", *said,
    ]  # fmt: skip
    program = [str(Path(__file__).with_name("_shuffled.py"))] if shuffled else ["-m", "gyre_data", "train"]
    started, before = time.monotonic(), _cpu_of_children()
    with (folder / "train.log").open("ab") as log:
        words = [sys.executable, *program, str(EXAMPLE / "rl.toml"), *overrides]
        subprocess.run(words, stdout=log, stderr=log, check=True)
    took = {"wall_s": round(time.monotonic() - started, 1), "cpu_s": round(_cpu_of_children() - before, 1)}
    return {"seed": seed, "shuffled": shuffled} | took | _found(out)


def _found(out: Path) -> dict[str, Any]:
    """What training left: its evaluations and steps, and what became of its executions."""
    run = gyre_data.open(f"{out}-run")
    rows = run.table("scores").to_pylist()
    ends = Counter(str(info.end_reason) for info in executions(run).values())
    late = {i for i, info in executions(run).items() if info.end_reason == "harness_timeout"}
    names = ("step", "reward_mean", "executions", "trained_tokens", "staleness_mean", "staleness_max", "grad_norm")
    return {
        "evaluations": [
            {name: row[name] for name in ("step", "score", "scored", "unscored", "version")}
            for row in read_metrics(out / "evals.jsonl")
        ],
        "steps": [{name: row[name] for name in names if name in row} for row in read_metrics(out / "metrics.jsonl")],
        "ends": dict(ends),
        "scores": dict(Counter(row["status"] for row in rows)),
        "partial_scores": sum(bool(row["partial"]) for row in rows),
        "timed_out_and_scored": sum(row["execution_id"] in late and row["status"] == "scored" for row in rows),
    }  # fmt: skip


def _cpu_of_children() -> float:
    """CPU seconds of the processes that ended below this one."""
    times = os.times()
    return times.children_user + times.children_system


def _cpu_of(process: psutil.Process) -> float:
    """CPU seconds of a process and those below it."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def every_case(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train every seed, then the first one's control, an engine for each."""
    said = ["--train.steps=4", "--rollout.eval_every=2"] if options.quick else []
    order = [(seed, False) for seed in range(1 if options.quick else options.seeds)]
    for seed, shuffled in order if options.quick else [*order, (0, True)]:
        here, started = folder / f"seed-{seed}{'-shuffled' if shuffled else ''}", time.monotonic()
        here.mkdir()
        before = _cpu_of_children()
        model = folder / "seed-0" / "model" if shuffled else prepare(here, seed=seed)
        took = {"warm_s": time.monotonic() - started, "warm_cpu_s": _cpu_of_children() - before}
        row: dict[str, Any] = {name: round(value, 1) for name, value in took.items()}
        if options.engine == "embedded":
            row |= learn(here, model, seed=seed, engine=None, said=said, shuffled=shuffled)
        else:
            with sglang(model, options.sglang, here / "sglang.log") as (url, process):
                row["engine_up_s"] = round(time.monotonic() - started - row["warm_s"], 1)
                row |= learn(here, model, seed=seed, engine=url, said=said, shuffled=shuffled)
                row["engine_cpu_s"] = round(_cpu_of(process), 1)
        yield row | {"total_s": round(time.monotonic() - started, 1)}


def figures(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What is bounded: rises of the score from the first evaluation to the last, and seconds of a seed."""
    rises = {
        shuffled: [
            c["evaluations"][-1]["score"] - c["evaluations"][0]["score"] for c in cases if c["shuffled"] == shuffled
        ]
        for shuffled in (False, True)
    }
    longest = max(case["total_s"] for case in cases if not case["shuffled"])
    return {"rise_least": min(rises[False]), "rise_shuffled": max(rises[True]), "seed_seconds_most": longest}


def picture(cases: Sequence[dict[str, Any]]) -> str:
    """Scores of held-out tasks by step: the seeds in a band, the control as a line."""
    steps = [row["step"] for row in cases[0]["evaluations"]]
    lines = {
        name: [[row["score"] for row in case["evaluations"]] for case in cases if case["shuffled"] == shuffled]
        for name, shuffled in (("as it is", False), ("advantages shuffled", True))
    }
    return bands(steps, {"mean score of held-out tasks": {n: some for n, some in lines.items() if some}}, "steps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, four steps, for a look")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    parser.add_argument("--sglang", type=Path, default=ROOT / ".venv-sglang", help="what `make sglang` made")
    parser.add_argument("--keep", type=Path, help="new folder for models, runs and logs; else they are removed")
    parser.add_argument("--out", type=Path, help="folder for learns.json and learns.svg")
    options = parser.parse_args()
    # Threads of several processes that wait for one another by spinning cost these small models many times their work.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
    found: dict[str, Any] = {
        "benchmark": "learns", "quick": options.quick, "engine": options.engine, "model": SIZES,
        "settings": tomllib.loads((EXAMPLE / "rl.toml").read_text()), "cores": os.cpu_count(),
        "python": platform.python_version(), "cases": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="gyre-learns-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        for case in every_case(folder, options):
            found["cases"].append(case | {"load": round(os.getloadavg()[2], 1)})
            scores = "  ".join(f"{row['step']}: {row['score']:.3f}" for row in case["evaluations"])
            name = "shuffled" if case["shuffled"] else f"seed {case['seed']}"
            print(f"{name:9} {scores}   {case['total_s']:.0f} s", flush=True)
            if options.out:
                (options.out / "learns.json").write_text(json.dumps(found, indent=1) + "\n")
                (options.out / "learns.svg").write_text(picture(found["cases"]))
    failed = [] if options.quick else missed(figures(found["cases"]), BOUNDS)
    for text in failed:
        print(f"MISSED: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
