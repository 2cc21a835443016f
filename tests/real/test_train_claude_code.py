"""Two optimiser steps on what unmodified Claude Code does as a live harness: all four roles are trained, and explained.

Its replies are scripted in the ids of the real Qwen3 tokenizer, for no tiny policy calls tools by itself; the policy is
a tiny one of that vocabulary, and each step's weights are published to the engine that scripts.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from gyre_data import ledger
from gyre_data import open as open_run
from gyre_data.explain import Trajectory, explain_execution
from gyre_data.verify import verify
from gyre_train.lineage import base_version
from gyre_train.metrics import read_metrics
from tests.support.clients import CLAUDE, client_path, documented
from tests.support.command import out as gyre_says
from tests.support.engines import ROOT
from tests.support.flow import Flow, calling
from tests.support.proxy_server import nodes_of
from tests.support.qwen3 import qwen3_folder, qwen3_template

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

STEPS, SIZE, WINDOW, J_MAX = 2, 2, 9000, 8
ROLES = {"main", "main_summary", "sub_agent", "sub_agent_summary"}
START = 'claude -p "$PROMPT" --tools Bash,Agent --system-prompt "You count." --dangerously-skip-permissions'


def count(name: str) -> str:
    """A call whose result is about 1,900 tokens long: five of them are more than the window holds."""
    return calling("Bash", command=f"seq 1 500; echo {name}-$((1 + 1))", description="count")


RULES = {
    "MAIN-TASK": calling(
        "Agent", "<think>\nA plan.\n</think>\n\nI start.", description="help", prompt="CHILD-TASK: work",
        subagent_type="general-purpose", run_in_background=False,
    ),
    "CHILD-TASK": count("CHILD-A"),
    "CHILD-A-2": count("CHILD-B"),
    "CHILD-B-2": count("CHILD-C"),
    "CHILD-C-2": count("CHILD-D"),
    "CHILD-D-2": "CHILD-DONE",
    "CRITICAL: Respond with TEXT ONLY": "<analysis>Read.</analysis><summary>SUMMED-UP</summary>",
    "SUMMED-UP": "never the newest mark: the kept tail follows it",
    "CHILD-DONE": count("MAIN-A"),
    "MAIN-A-2": count("MAIN-B"),
    "MAIN-B-2": count("MAIN-C"),
    "MAIN-C-2": count("MAIN-D"),
    "MAIN-D-2": "MAIN-DONE",
}  # fmt: skip


class Trained(Flow):
    """A scripted engine that takes weights: it names their version, and each token is as likely as any other."""

    def __init__(self) -> None:
        super().__init__(qwen3_template(), RULES)
        self.loaded: list[Path] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/update_weights_from_disk":
            told = json.loads(body)
            self.loaded.append(Path(told["model_path"]))
            self.version, self.answered = told["weight_version"], []

        async def again() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        await super().__call__(scope, again, send)

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply(body)
        for delta in reply.get("deltas", ()):
            delta["lps"] = [-math.log(self.vocab)] * len(delta["ids"])
        return reply


def tiny_qwen3(folder: Path) -> Path:
    """One layer and one head over the real vocabulary."""
    sizes = {
        "vocab_size": qwen3_template().vocab_size, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes)).save_pretrained(folder)
    for file in qwen3_folder().iterdir():
        if file.is_file() and file.name != "config.json":
            shutil.copy(file, folder)
    return folder


def settings(folder: Path, model: Path, engine: str) -> Path:
    """A config of live training with Claude Code as docs/proxy.md starts it, two executions a step."""
    script = folder / "claude.sh"
    script.write_text("\n".join(["PROMPT=$1; TERM=dumb; export TERM", documented("Claude Code", START)]) + "\n")
    judge = json.dumps([sys.executable, str(Path(__file__).with_name("judge.py"))])
    tasks = folder / "tasks.toml"
    tasks.write_text(
        f'[[task]]\nid = "count"\nprompt = "MAIN-TASK: begin."\ncommand = ["sh", {json.dumps(str(script))}, '
        f'"{{prompt}}"]\nevaluator = {judge}\ntimeout_s = 600\n'
    )
    config = folder / "live.toml"
    config.write_text(
        f"[model]\npath = {json.dumps(str(model))}\n"
        f"[data]\nj_max = {J_MAX}\n"
        f"[rollout]\ntasks = {json.dumps(str(tasks))}\nattempts = {SIZE}\njobs = {SIZE}\nmax_staleness = 0\n"
        f'proxy_flags = ["--context-window", "{WINDOW}"]\n'
        f'[publish]\nengines = ["{engine}"]\nconfirm = "version"\n'
        f"[train]\nsteps = {STEPS}\nexecutions_per_step = {SIZE}\nlr = 1e-3\n[pack]\ntokens = {2 * WINDOW}\n"
        f'[output]\ndir = {json.dumps(str(folder / "out"))}\npolicy_id = "rl"\n'
    )
    return config


async def train(config: Path, path: str) -> str:
    """`gyre train` to its end; asked to end, with what it started, when it takes too long."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gyre_data", "train", str(config),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proxy")]), "PATH": path},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(child.communicate(), 2000)
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            await child.wait()
    assert child.returncode == 0, out.decode()[-3000:]
    return out.decode()


async def test_two_steps_train_all_four_roles_of_claude_code(tmp_path: Path) -> None:
    path, model, engine = client_path(CLAUDE), tiny_qwen3(tmp_path / "model"), Trained()
    engine.version = str(base_version(model))
    async with engine.serving():
        told = await train(settings(tmp_path, model, engine.url), path)
    assert not engine.unanswered, f"no rule answers: ...{engine.unanswered[0][-2000:]}"
    out, folder = tmp_path / "out", tmp_path / "out-run"
    assert not verify(folder).problems, told
    assert engine.version == f"rl:{STEPS}"
    run, rows = open_run(folder), ledger.ledger(out)
    consumed = {row.execution_id: row.step for row in rows}
    assert sorted(consumed.values()) == [1] * SIZE + [2] * SIZE, "each execution in one step"
    assert all(row["grad_norm"] > 0 for row in read_metrics(out / "metrics.jsonl"))
    nodes = nodes_of(folder)
    for name, step in consumed.items():
        found, calls = explain_execution(run[name], j_max=J_MAX, trainer=out), run[name].tree.calls
        kept = {one.leaf_node: one for one in found.trajectories if one.index is not None}
        assert {row.leaf_node: row.owned_tokens for row in rows if row.execution_id == name} == {
            leaf: one.num_owned for leaf, one in kept.items()
        }
        trained = {number: one for one in kept.values() for number in one.owned_calls}
        assert {str(calls[number - 1].agent_role) for number in trained} == ROLES, "of the tokens, by the ledger"
        sampled_by = {span.n for call in calls for span in nodes[str(call.output_node)].policy_versions or ()}
        assert sampled_by == {step - 1}, "by the weights that the step before made"
        explained(folder, out, name, {str(calls[number - 1].agent_role): number for number in trained}, trained)


def explained(folder: Path, out: Path, name: str, calls: dict[str, int], trained: dict[int, Trajectory]) -> None:
    """`gyre explain` names the roles of an execution, and of a token of each its owner and its weight."""
    more = ("--trainer", str(out), "--j-max", J_MAX)
    text = gyre_says("explain", folder, name, *more)
    assert {line.split()[2].rstrip(",") for line in text.splitlines() if line.startswith("path ")} <= ROLES
    total = sum({one.leaf_node: one.num_owned for one in trained.values()}.values())
    for role, number in calls.items():
        token = gyre_says("explain", folder, f"{name}:c{number}:0", *more)
        assert f" {role}, call " in token.splitlines()[0], token
        assert f"owner      trajectory {trained[number].index} " in token, token
        assert f"weight     1/{SIZE} * 1/{total} * " in token, token
