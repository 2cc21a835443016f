"""Unmodified clients against real SGLang, two turns each: recorded exactly and verified; the short ones trained on.

The model is tiny and samples its stop token; no small model calls tools by itself, so pi's tool call is memorised: the
model is trained on the conversation just recorded, and the new weights are published to the running SGLang.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from gyre_data import open as open_run
from gyre_data.execution import Execution, executions
from gyre_data.schema import AgentRole
from gyre_data.types import Call
from tests.support.clients import CLAUDE, CODEX, MINI, PI, QWEN, client_path, documented
from tests.support.engines import ROOT, Engine, sglang_engine
from tests.support.proxy_process import ProxyProcess
from tests.support.stop_prone import stop_prone

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
HERE = Path(__file__).parent
TASKS = {
    "pi-chat": ["sh", str(HERE / "harnesses/pi_twice.sh"), "openai-completions", "{prompt}"],
    "pi-responses": ["sh", str(HERE / "harnesses/pi_twice.sh"), "openai-responses", "{prompt}"],
    "pi-anthropic": ["sh", str(HERE / "harnesses/pi_twice.sh"), "anthropic-messages", "{prompt}"],
    "claude": ["sh", str(HERE / "harnesses/claude_twice.sh"), "{prompt}"],
    "codex": ["sh", str(HERE / "harnesses/codex_twice.sh"), "{prompt}"],
}
OTHERS = {
    "mini-swe-agent": [],  # asks again by itself, and gives up at its third answer without a tool call
    "qwen-code": ['qwen --auth-type openai -y --continue -p "Once more, please."'],
}
"""Clients that start as docs/proxy.md says, and the lines that follow: their prompts are too long to train on here."""


@dataclass(kw_only=True, slots=True)
class Recorded:
    """A run of executions by real clients, with the engine and the proxy still up."""

    run: Path
    model: Path
    engine: Engine
    proxy: ProxyProcess
    path: str
    sampled: int = 0
    """Tokens that SGLang counted while the run was made."""
    scored: dict[str, np.ndarray] = field(default_factory=dict)
    """SGLang's log-probs of some recorded replies, asked anew while it had the weights that sampled them; by call."""

    def gyre(self, *words: str, **env: str) -> str:
        command = [sys.executable, "-m", "gyre_data", *words]
        path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
        env = {**os.environ, "PATH": self.path, "PYTHONPATH": path, **env}
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"gyre {' '.join(words)}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    def play(self, tasks: Path, *, executions: int) -> None:
        before = sampled_by(self.engine)
        self.gyre("run", "-p", str(tasks), "--run", str(self.run), "-k", str(executions), "-j", "2", "--json")
        self.sampled = sampled_by(self.engine) - before

    def executions(self) -> dict[str, list[Execution]]:
        """By task; those of `gyre record` have none."""
        run = open_run(self.run)
        known: dict[str, list[Execution]] = {}
        for info in executions(run).values():
            if info.task_id in TASKS or info.task_id in OTHERS:
                known.setdefault(info.task_id, []).append(run[info.execution_id])
        return known


def sampled_by(engine: Engine) -> int:
    """How many tokens the engine says it has sampled so far."""
    found = re.findall(r"^sglang:generation_tokens_total\{.*\} (\S+)$", engine.get("/metrics").text, re.MULTILINE)
    return sum(int(float(number)) for number in found)


def write_tasks(path: Path, tasks: dict[str, list[str]], prompt: str) -> Path:
    judge = json.dumps([sys.executable, str(HERE / "judge.py")])
    tables = [
        f"[[task]]\nid = {json.dumps(name)}\nprompt = {json.dumps(prompt)}\ncommand = {json.dumps(command)}\n"
        f"evaluator = {judge}\ntimeout_s = 600\n"
        for name, command in tasks.items()
    ]
    path.write_text("\n".join(tables))
    return path


@contextlib.contextmanager
def proxied(folder: Path, model: Path, engine: Engine, path: str) -> Iterator[Recorded]:
    proxy = ProxyProcess(folder / "run", engine.url, model)
    try:
        yield Recorded(run=folder / "run", model=model, engine=engine, proxy=proxy, path=path)
    finally:
        proxy.stop()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    path = client_path(PI, CLAUDE, CODEX)
    folder = tmp_path_factory.mktemp("clients")
    model = stop_prone(folder / "model")
    with (
        sglang_engine(model, "--weight-version", "tiny:0", "--enable-metrics") as engine,
        proxied(folder, model, engine, path) as made,
    ):
        made.play(write_tasks(folder / "tasks.toml", TASKS, "Say hello."), executions=2)
        yield made


@pytest.fixture(scope="module")
def others(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """A run of its own on the same SGLang."""
    path = client_path(MINI, QWEN)
    folder = tmp_path_factory.mktemp("others")
    tasks = {}
    for client, more in OTHERS.items():
        script = folder / f"{client}.sh"
        script.write_text("\n".join(["PROMPT=$1", documented(client), *more]) + "\n")
        tasks[client] = ["sh", str(script), "{prompt}"]
    with proxied(folder, recorded.model, recorded.engine, path) as made:
        made.play(write_tasks(folder / "tasks.toml", tasks, "Say hello."), executions=1)
        for (execution,) in made.executions().values():
            last = [call for call in execution.tree.calls if call.agent_role is AgentRole.MAIN][-1]
            made.scored[last.call_id] = scored_by(made.engine, execution, last)
        yield made


def all_sampled_once(made: Recorded) -> None:
    """SGLang's own count is the record's, and no two calls share a sampled node."""
    assert made.sampled > 0
    trees = [execution.tree for known in made.executions().values() for execution in known]
    assert sum(len(tree.ids(output)) for tree in trees for output in tree.outputs) == made.sampled
    assert all(len(calls) == 1 for tree in trees for calls in tree.outputs.values())


def scored_by(engine: Engine, execution: Execution, call: Call) -> np.ndarray:
    """The engine's log-probs of a recorded reply, asked anew with the ids of its path."""
    tree = execution.tree
    ids = tree.path_ids(tree.leaf(call)).tolist()
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    start = len(ids) - call.output_tokens
    reply = engine.post("/generate", {**body, "logprob_start_len": start - 1})
    assert reply.status_code == 200, reply.text
    told = reply.json()["meta_info"]["input_token_logprobs"][-call.output_tokens :]
    assert [token for _, token, _ in told] == ids[start:]
    return np.array([logprob for logprob, _, _ in told])


def test_every_call_is_recorded_and_nothing_forks(recorded: Recorded) -> None:
    made = recorded.executions()
    assert set(made) == set(TASKS)
    for task, known in made.items():
        assert len(known) == 2, task
        for execution in known:
            calls = execution.tree.calls
            assert len(calls) >= 2, task
            assert {call.status for call in calls} == {"ok"}, task
            assert all(call.fork_check is None for call in calls), task
            assert calls[0].agent_role == "main", task
    all_sampled_once(recorded)


def test_the_second_prompt_extends_the_first_exactly(recorded: Recorded) -> None:
    for task, known in recorded.executions().items():
        for execution in known:
            tree = execution.tree
            first, second = execution.tree.calls[0], execution.tree.calls[1]
            assert first.finish_reason == "stop", f"{task}: the model is to sample its stop token"
            before = tree.path_ids(tree.output(first))
            after = tree.path_ids(tree.leaf(second))
            assert len(after) > len(before)
            assert np.array_equal(after[: len(before)], before), task
            assert second.extension in ("bridge", "repair"), task


def test_the_clients_are_told_apart(recorded: Recorded) -> None:
    known = recorded.executions()
    assert {call.wire for e in known["pi-chat"] for call in e.tree.calls} == {"openai_chat"}
    assert {call.wire for e in known["pi-anthropic"] + known["claude"] for call in e.tree.calls} == {"anthropic"}
    assert {call.wire for e in known["pi-responses"] + known["codex"] for call in e.tree.calls} == {"openai_responses"}
    assert all("claude" in (call.client or "") for e in known["claude"] for call in e.tree.calls)


def test_verify_is_clean(recorded: Recorded) -> None:
    assert json.loads(recorded.gyre("verify", str(recorded.run), "--json"))["problems"] == []


def test_one_word_records_a_client(recorded: Recorded) -> None:
    before = {info.execution_id for info in executions(open_run(recorded.run)).values()}
    sandboxed = {"IS_SANDBOX": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "96", "TERM": "dumb"}
    claude = ["claude", "--", "-p", "Say hello.", "--tools", "Bash", "--dangerously-skip-permissions"]
    recorded.gyre("record", "--run", str(recorded.run), *claude, **sandboxed)
    recorded.gyre("record", "--run", str(recorded.run), "pi", "--", "-p", "Say hello.", TERM="dumb")
    codex = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Say hello."]
    recorded.gyre("record", "--run", str(recorded.run), "codex", "--", *codex, TERM="dumb")
    run = open_run(recorded.run)
    new = [info for info in executions(run).values() if info.execution_id not in before]
    assert [str(info.end_reason) for info in new] == ["finished"] * 3
    wires = [run[info.execution_id].tree.calls[0].wire for info in new]
    assert wires == ["anthropic", "openai_chat", "openai_responses"]
    files = [path for path in (recorded.run / "clients").rglob("*") if path.is_file()]
    keys = [path for path in files if re.search(r"gyre-[\w-]{32}", path.read_text("latin-1"))]
    assert files
    assert keys == [], "no key of an execution lies in the run folder"


def test_mini_swe_agent_and_qwen_code(others: Recorded) -> None:
    (mini,), (qwen,) = (others.executions()[client] for client in OTHERS)
    for execution in (mini, qwen):
        assert {call.status for call in execution.tree.calls} == {"ok"}
        assert {call.fork_check for call in execution.tree.calls} == {None}
    all_sampled_once(others)
    assert json.loads(others.gyre("verify", str(others.run), "--json"))["problems"] == []

    asked = mini.tree.calls
    assert [str(call.agent_role) for call in asked] == ["main"] * 3
    left_out = [call.call_id for call in asked[:-1]]
    assert [call.continues_from for call in asked] == [None, *left_out], "it leaves out what it could not use"

    tree = qwen.tree
    main = [call for call in tree.calls if call.agent_role is AgentRole.MAIN]
    assert {call.agent_role for call in tree.calls if call not in main} <= {AgentRole.SIDE}
    first, second = main
    assert second.continues_from == first.call_id
    # Random weights may sample what the client writes otherwise (a tag, a blank): the same turn all the same.
    assert second.extension in ("bridge", "repair")
    before = tree.path_ids(tree.output(first))
    assert np.array_equal(tree.path_ids(tree.leaf(second))[: len(before)], before)

    # Ids that are not those that the engine had would have other log-probs.
    for execution, call in ((mini, asked[-1]), (qwen, second)):
        logprobs = execution.tree.logprobs(execution.tree.output(call))
        assert np.abs(others.scored[call.call_id] - logprobs).max() < 1e-4


@pytest.fixture(scope="module")
def steps(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The metrics of an SFT step and of an RL step on the run."""
    folder, steps = tmp_path_factory.mktemp("steps"), []
    for loss, num_executions in (("sft", 6), ("sequence", 2)):
        config = folder / f"{loss}.toml"
        config.write_text(
            f"[model]\npath = {json.dumps(str(recorded.model))}\n[data]\nruns = [{json.dumps(str(recorded.run))}]\n"
            f'[loss]\nkind = "{loss}"\n[train]\nsteps = 1\nexecutions_per_step = {num_executions}\nlr = 1e-4\n'
            f"[pack]\ntokens = 32768\n[output]\ndir = {json.dumps(str(folder / loss))}\n"
        )
        recorded.gyre("train", str(config), "--json")
        steps += [json.loads(line) for line in (folder / loss / "metrics.jsonl").read_text().splitlines()]
    return steps


def test_an_sft_step_and_an_rl_step_take_it(steps: list[dict[str, float]]) -> None:
    assert len(steps) == 2
    for step in steps:
        assert step["trained_tokens"] > 0
        assert step["grad_norm"] > 0
        # SGLang sampled these tokens; the trainer computes the same log-probs in float32.
        assert step["mismatch_max"] < 1e-4, step["mismatch_max"]


@pytest.mark.usefixtures("steps", "others")  # made with the first weights, in whatever order the tests come
def test_pi_executes_a_memorised_tool_call(recorded: Recorded, tmp_path: Path) -> None:
    """The conversation that pi sent is learnt with a tool call as its reply; SGLang then serves those weights."""
    chat = tmp_path / "memorise.jsonl"
    lessons = [_lesson(recorded.run, execution) for execution in recorded.executions()["pi-chat"]]
    chat.write_text("\n".join(json.dumps(lesson) for lesson in lessons) + "\n")
    config = tmp_path / "memorise.toml"
    config.write_text(
        f"[model]\npath = {json.dumps(str(recorded.model))}\n[data]\nchat = [{json.dumps(str(chat))}]\nepochs = 1000\n"
        f'[loss]\nkind = "sft"\n[train]\nsteps = 240\nexecutions_per_step = 2\nlr = 2e-3\nwarmup_steps = 10\n'
        f"[pack]\ntokens = 16384\n[output]\ndir = {json.dumps(str(tmp_path / 'memorise'))}\nsave_every = 240\n"
        f"[publish]\nengines = [{json.dumps(recorded.engine.url)}]\nproxy = {json.dumps(recorded.proxy.url)}\n"
        "every = 240\n"
    )
    recorded.gyre("train", str(config), "--json")
    command = {"pi-tool": ["sh", str(HERE / "harnesses/pi_twice.sh"), "openai-completions", "{prompt}"]}
    tasks = write_tasks(tmp_path / "tasks.toml", command, "Say hello.")
    recorded.gyre("run", "-p", str(tasks), "--run", str(recorded.run), "-k", "2", "-j", "1", "--json")
    run = open_run(recorded.run)
    new = [info.execution_id for info in executions(run).values() if info.task_id == "pi-tool"]
    made = [(recorded.run / "workspaces" / name / "work" / "made-by-the-policy").exists() for name in new]
    # Sampled at temperature 1, where even a lesson learnt by heart may slip once.
    assert any(made), "pi ran the tool call"
    assert json.loads(recorded.gyre("verify", str(recorded.run), "--json"))["problems"] == []


def _lesson(run_folder: Path, execution: Execution) -> dict[str, object]:
    """pi's first request with the tool call as its reply, the tool's result, and an end.

    The tools are read from the request as it was received: a template renders their keys in the order they came in.
    """
    run = open_run(run_folder)
    tree, first = execution.tree, execution.tree.calls[0]
    messages = []
    for node in tree.path(tree.output(first))[:-1]:
        messages += [json.loads(run.blob(blob)) for blob in tree.message_blobs(int(node))]
    prompt = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] in ("system", "user")]
    sent = json.loads(b"".join(run.blob(blob) for blob in first.request_blobs))["tools"]
    plain = [{name: value for name, value in tool["function"].items() if name != "strict"} for tool in sent]
    tools = [{"type": "function", "function": function} for function in plain]
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "touch made-by-the-policy"}}}
    acted = [*prompt, {"role": "assistant", "content": "", "tool_calls": [call]}]
    done = [*acted, {"role": "tool", "content": "(no output)"}, {"role": "assistant", "content": "Done."}]
    return {"messages": done, "tools": tools}
