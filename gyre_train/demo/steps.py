"""`gyre demo`: the whole loop on this machine, in seven steps, with real parts only.

Engine, proxy, launcher and trainer are child processes started with the same commands that a user types; their logs lie
in the demo's folder. Nothing is hard-wired to this policy: `model` takes any Hugging Face folder that can be trained.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from gyre_data.child import free_port, gyre_child, run_gyre
from gyre_data.errors import ConfigError
from gyre_train.interrupts import asked_to_stop

from .tasks import TASKS, DemoTask
from .teacher import write_jsonl

__all__ = ["Demo", "demo", "prepare_policy", "write_tasks"]

NUM_STEPS = 7
ATTEMPTS = 4
TIMEOUT_S = 45
PACK_TOKENS = 4096
WARM_STEPS = 120
POLICY_ID = "run"
_MODULES = ("aiohttp", "anthropic", "megatron", "tokenizers", "torch", "transformers", "uvicorn")


def demo(folder: Path, *, model: Path | None = None, record_only: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Run the demo into `folder`, which must not exist or be empty, and return the summary that `--json` prints."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"wanted a new folder for the demo, {folder} is not empty; give --dir or remove it")
    for name in _MODULES:  # before anything is made: a folder left behind would be refused the next time
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    (folder / "demo").mkdir(parents=True, exist_ok=True)
    # Several processes share few cores here: threads that spin while they wait would take them from one another.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run = Demo(folder=folder, console=Console(quiet=quiet, highlight=False))
    started = time.monotonic()
    with asked_to_stop(_end), ExitStack() as services:
        run.start_engine(services, model)
        run.record(services)
        run.show_tree()
        if not record_only:
            run.admit()
            run.check()
            run.train()
            run.serve()
    run.summary["seconds"]["total"] = round(time.monotonic() - started, 1)
    (run.parts / "summary.json").write_text(json.dumps(run.summary, indent=2) + "\n")
    shown = f"{run.summary['seconds']['total'] / 60:.1f} min"
    run.console.print(f"done in {shown}, in {folder}   next: gyre tree {folder}   gyre stats {folder}", soft_wrap=True)
    run.console.print("not shown here: GPU, MoE, many engines (status table in README)", style="dim")
    return run.summary


def _end(number: signal.Signals) -> None:
    """Leave, so that every block ends what it started; what more is asked meanwhile changes nothing."""
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_IGN)
    sys.stderr.write(f"gyre: {number.name}: what the demo started is ended\n")
    raise SystemExit(128 + number)


def prepare_policy(folder: Path, model: Path | None, *, steps: int, num_variants: int = 24) -> Path:
    """Make the demo's policy: a tiny model (or `model`) warm-started by `gyre train` on the teacher's text.

    Returns a plain Hugging Face folder, whose weights count as untrained (`base`): the teacher is not part of the run.
    """
    text = folder / "warm.jsonl"
    write_jsonl(text, num_variants)
    if model is None:
        from gyre_train.tiny import make_tiny

        samples = text.read_text().splitlines()
        model = make_tiny(
            folder / "model-init", vocab=640, hidden=128, layers=2, heads=4, kv_heads=2, texts=samples[:8]
        )
    config = folder / "warm.toml"
    config.write_text(
        f"[model]\npath = {json.dumps(str(model))}\n"
        f"[data]\nchat = [{json.dumps(str(text))}]\nepochs = 100\n"
        f'[loss]\nkind = "sft"\n[train]\nsteps = {steps}\nexecutions_per_step = 8\nlr = 3e-3\nwarmup_steps = 10\n'
        f"[pack]\ntokens = {PACK_TOKENS}\n"
        f"[output]\ndir = {json.dumps(str(folder / 'warm'))}\nsave_every = {steps}\n"
    )
    run_gyre(["train", str(config), "--json"], folder / "warm.log")
    trained = sorted((folder / "warm" / "checkpoints").glob("step-*"))[-1]
    base = folder / "model-base"
    shutil.copytree(trained, base, ignore=shutil.ignore_patterns("state.json", "trainer"))
    return base


def write_tasks(path: Path, tasks: tuple[DemoTask, ...] = TASKS) -> Path:
    """Write a task file with the demo's tasks and their workspaces beside it.

    `play.py` adds the demo's faults: sample 1 sends a request twice, sample 2 of `moves` never exits; the judge of
    `stock` is down for sample 3.
    """
    tables = []
    for task in tasks:
        workspace = path.parent / "workspaces" / task.id
        workspace.mkdir(parents=True)
        for name, text in task.files.items():
            (workspace / name).write_text(text)
        judge = [sys.executable, "-m", "gyre_train.demo.judge", task.answer, *(["3"] if task.uses_helper else [])]
        play = [sys.executable, "-m", "gyre_train.demo.play", task.id, "{prompt}"]
        tables.append(
            f"[[task]]\nid = {json.dumps(task.id)}\nprompt = {json.dumps(task.prompt)}\n"
            f"workspace = {json.dumps(f'workspaces/{task.id}')}\ncommand = {json.dumps(play)}\n"
            f"evaluator = {json.dumps(judge)}\ntimeout_s = {TIMEOUT_S}\n"
        )
    path.write_text("\n".join(tables))
    return path


@dataclass(kw_only=True, slots=True)
class Demo:
    """The state that one step leaves to the next."""

    folder: Path
    console: Console
    summary: dict[str, Any] = field(default_factory=lambda: {"seconds": {}})
    base: Path = Path()
    engine_url: str = ""
    proxy_url: str = ""
    versions: list[str] = field(default_factory=list)

    @property
    def parts(self) -> Path:
        """Models, logs and settings of the demo; the folder itself is the recorded run."""
        return self.folder / "demo"

    @property
    def trainer(self) -> Path:
        """The trainer's own folder."""
        return self.parts / "trainer"

    @contextmanager
    def step(self, number: int, name: str, doing: str) -> Iterator[list[str]]:
        """Time a step; the block appends what is to be said of it."""
        said: list[str] = []
        started = time.monotonic()
        if not self.console.is_terminal:  # a log shows at least that something goes on
            self.console.print(f"({number}/{NUM_STEPS} {doing} ...)", markup=False)
        with self.console.status(f"[{number}/{NUM_STEPS}] {name:<8} {doing} ..."):
            yield said
        seconds = round(time.monotonic() - started, 1)
        self.summary["seconds"][name] = seconds
        head = rf"\[{number}/{NUM_STEPS}] [bold]{name:<8}[/bold]"
        self.console.print(f"{head} {said[0] if said else ''}  [dim]{seconds:.0f} s[/dim]", soft_wrap=True)
        for line in said[1:]:
            self.console.print(line, markup=False, soft_wrap=True)

    def start_engine(self, services: ExitStack, model: Path | None) -> None:
        """Step 1: make the policy and serve it."""
        from gyre_train.lineage import base_version

        with self.step(1, "engine", "warming a policy up on text (gyre train)") as said:
            self.base = prepare_policy(self.parts, model, steps=WARM_STEPS)
            version = base_version(self.base)
            port = free_port()
            self.engine_url = f"http://127.0.0.1:{port}"
            arguments = ["engine", str(self.base), "--port", str(port), "--weight-version", str(version)]
            services.enter_context(
                gyre_child(arguments, self.parts / "engine.log", f"{self.engine_url}/ready", wait_s=120)
            )
            self.versions.append(str(version))
            kind = "tiny Qwen3-architecture policy" if model is None else str(model)
            said.append(f"{kind} on CPU, weights {version}")

    def record(self, services: ExitStack) -> None:
        """Step 2: run both tasks through the proxy."""
        with self.step(2, "record", f"{len(TASKS)} tasks x {ATTEMPTS} executions") as said:
            port = free_port()
            self.proxy_url = f"http://127.0.0.1:{port}"
            arguments = ["proxy", "--run", str(self.folder), "--engine", self.engine_url]
            arguments += ["--tokenizer", str(self.base), "--port", str(port)]
            status = f"{self.proxy_url}/api/status"
            services.enter_context(gyre_child(arguments, self.parts / "proxy.log", status, wait_s=120))
            tasks = write_tasks(self.parts / "tasks.toml")
            self.play(tasks, ATTEMPTS)
            said.append(f"{len(TASKS)} tasks x {ATTEMPTS} executions in {self.folder}")

    def play(self, tasks: Path, attempts: int) -> None:
        """`gyre run` on the tasks; executions that are there already are kept."""
        arguments = ["run", "-p", str(tasks), "--run", str(self.folder), "-k", str(attempts), "-j", "8", "--json"]
        run_gyre(arguments, self.parts / "run.log")

    def gyre(self, *arguments: str) -> str:
        """Output of a `gyre` command on the recorded run."""
        return run_gyre([arguments[0], str(self.folder), *arguments[1:]], self.parts / "show.log")

    def show_tree(self) -> None:
        """Step 3: the trees with the most branches, and the counts."""
        with self.step(3, "tree", "reading the run back") as said:
            stats = json.loads(self.gyre("stats", "--json"))
            wanted = ("calls", "message_nodes", "occurrences", "false_forks")
            self.summary |= {name: stats[name] for name in wanted} | {"forks": stats["forks"]}
            problems = json.loads(self.gyre("verify", "--json"))["problems"]
            said.append(f"read back and verified: {len(problems)} problems")
            for execution in self.interesting():
                said += ["", *self.gyre("tree", execution).splitlines()]
            said += ["", *self.gyre("stats").splitlines(), ""]

    def interesting(self) -> list[str]:
        """One execution of each task: sample 1, which sends a request twice, so that its tree has a retry."""
        from gyre_data import open as open_run
        from gyre_data.execution import executions

        second = [info for info in executions(open_run(self.folder)).values() if info.sample_index == 1]
        return [info.execution_id for info in sorted(second, key=lambda info: info.task_id or "")]

    def admit(self) -> None:
        """Step 4: what would be trained, and why the rest would not."""
        from gyre_data import admit
        from gyre_data import open as open_run

        with self.step(4, "admit", "choosing trajectories") as said:
            admission = admit([open_run(self.folder)])
            counts = admission.counts()
            kept = counts.pop("admitted")
            said.append(
                f"{kept['trajectories']} trajectories of {kept['executions']} executions, {kept['tokens']:,} tokens"
            )
            for level, reasons in counts.items():
                said += [f"  left out: {count} {level}, {reason}" for reason, count in reasons.items()]
            for group in admission.groups:
                mean = "-" if group.mean is None else f"{group.mean:.2f}"
                spread = "-" if group.std is None else f"{group.std:.2f}"
                said.append(f"  group {group.group_id}: {group.num_valid} scores, mean {mean}, deviation {spread}")
            self.summary["admitted"] = {"kept": kept, "left_out": counts}

    def check(self) -> None:
        """Step 5: the exactness contract on the trees just recorded."""
        from gyre_train.exactness import logprob_gap, recorded_trees, sharing_gap

        with self.step(5, "check", "packed trees against independent rows") as said:
            gap = sharing_gap(self.base, recorded_trees(self.folder, self.base, kind="sequence"), tokens=PACK_TOKENS)
            before = logprob_gap(self.base, recorded_trees(self.folder, self.base), tokens=PACK_TOKENS)
            said.append(
                f"packed vs rows: max gradient difference {gap.gradient:.0e} (float64, limit 1e-9); "
                f"{gap.tree_tokens:,} tokens computed for {gap.row_tokens:,}"
            )
            said.append(f"  engine vs trainer: max |dlogp| {before:.0e} on recorded tokens (limit 1e-4)")
            self.summary["max_gradient_difference"] = gap.gradient
            self.summary["packed_tokens"], self.summary["row_tokens"] = gap.tree_tokens, gap.row_tokens
            self.summary["max_logprob_difference_before_publish"] = before

    def train(self) -> None:
        """Step 6: two optimiser steps; the last one is published to the engine by `gyre train` itself."""
        with self.step(6, "train", "two steps on the recorded groups (gyre train)") as said:
            config = self.parts / "rl.toml"
            config.write_text(
                f"[model]\npath = {json.dumps(str(self.base))}\n"
                f"[data]\nruns = [{json.dumps(str(self.folder))}]\n"
                f"[train]\nsteps = 2\nexecutions_per_step = 3\nlr = 3e-4\n"
                f"[pack]\ntokens = {PACK_TOKENS}\n"
                f"[output]\ndir = {json.dumps(str(self.trainer))}\npolicy_id = {json.dumps(POLICY_ID)}\n"
                f"[publish]\nengines = [{json.dumps(self.engine_url)}]\n"
                f"proxy = {json.dumps(self.proxy_url)}\nevery = 2\n"
            )
            run_gyre(["train", str(config), "--json"], self.parts / "train.log")
            steps = [json.loads(line) for line in (self.trainer / "metrics.jsonl").read_text().splitlines()]
            self.summary["trained_tokens"] = sum(step["trained_tokens"] for step in steps)
            said.append(f"{len(steps)} steps, {self.summary['trained_tokens']:,} tokens with a gradient")
            for step in steps:
                said.append(f"  step {step['step']}: loss {step['loss']:+.4f}  gradient norm {step['grad_norm']:.3f}")

    def serve(self) -> None:
        """Step 7: the engine serves version 2; one more execution runs under it; its log-probs are the trainer's."""
        from gyre_data import open as open_run
        from gyre_train.exactness import logprob_gap, recorded_trees

        with self.step(7, "publish", "one more execution under the new weights") as said:
            with urllib.request.urlopen(f"{self.engine_url}/model_info", timeout=10) as answer:
                served = json.load(answer)["weight_version"]
            self.versions.append(served)
            known = {e["execution_id"] for e in open_run(self.folder).table("executions").to_pylist()}
            more = self.parts / "more"
            more.mkdir()
            self.play(write_tasks(more / "tasks.toml", TASKS[:1]), ATTEMPTS + 1)
            events = open_run(self.folder).table("executions").to_pylist()
            new = sorted({e["execution_id"] for e in events} - known)
            trained = sorted((self.trainer / "checkpoints").glob("step-*"))[-1]
            after = logprob_gap(trained, recorded_trees(self.folder, trained, executions=new), tokens=PACK_TOKENS)
            said.append(f"engine serves {served}; |dlogp| vs trainer {after:.0e} on execution {', '.join(new)}")
            self.summary["max_logprob_difference_after_publish"] = after
            self.summary["versions_served"] = self.versions
