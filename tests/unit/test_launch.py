"""Task files, workspaces, evaluators and harness processes of `gyre run`, without a proxy."""

import asyncio
import json
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

import pytest

from gyre_data.errors import ConfigError
from gyre_proxy.launch import commands
from gyre_proxy.launch.clients import plan_launch
from gyre_proxy.launch.evaluate import evaluate
from gyre_proxy.launch.harness import environment, kill_leftover, run_harness
from gyre_proxy.launch.tasks import fill, load_tasks, program_name
from gyre_proxy.launch.workspace import Workspace, capture


def _tasks(folder: Path, text: str) -> Path:
    (folder / "tasks.toml").write_text(text)
    return folder


def test_a_task_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    task = '[[task]]\nid = "t"\nprompt = "do it"\nworkspace = "ws"\ncommand = "agent -p {prompt}"\ntimeout_s = 5\n'
    (loaded,) = load_tasks(_tasks(tmp_path, task))
    assert loaded.command == ("agent", "-p", "{prompt}")
    assert loaded.workspace == (tmp_path / "ws").resolve()
    assert loaded.timeout_s == 5
    assert fill(("python", "{tasks}/judge.py"), {"tasks": str(loaded.folder)})[1] == str(
        tmp_path.resolve() / "judge.py"
    )


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ('[[task]]\nid = "t"\nprompt = "p"\ntimout_s = 1\n', "nearest is 'timeout_s'"),
        ('[[task]]\nid = "t"\n', "string prompt"),
        ('[[task]]\nid = "t"\nprompt = "p"\n[[task]]\nid = "t"\nprompt = "q"\n', "stands twice"),
        ('[[task]]\nid = "t"\nprompt = "p"\ntimeout_s = 0\n', "above 0"),
        ('[[task]]\nid = "t"\nprompt = "p"\nworkspace = "gone"\n', "no folder"),
        ("x = ", "not valid TOML"),
        ("x = 1\n", r"\[\[task\]\] tables"),
    ],
)
def test_a_wrong_task_file_says_what_to_do(tmp_path: Path, text: str, mend: str) -> None:
    with pytest.raises(ConfigError, match=mend):
        load_tasks(_tasks(tmp_path, text))


def test_a_missing_task_file_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tasks(tmp_path)


def test_filling_a_command_is_no_shell() -> None:
    filled = fill(("agent", "-p", "{prompt}", "{other}"), {"prompt": "a; rm -rf {workspace} $HOME", "workspace": "/w"})
    assert filled == ["agent", "-p", "a; rm -rf /w $HOME", "{other}"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/claude", "-p", "x"], "claude"),
        (["/opt/bin/python3.11", "judge.py", "4"], "judge"),
        (["python", "-m", "pkg.judge", "4"], "judge"),
        (["sh", "runs/pi_twice.sh"], "pi_twice"),
        (["sh"], "sh"),
    ],
)
def test_a_command_is_called_by_what_it_runs(command: list[str], name: str) -> None:
    assert program_name(command) == name


def test_a_digest_sees_contents_names_and_modes(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = capture(tmp_path)
    assert capture(tmp_path) == first
    assert first.kind == "digest"
    (tmp_path / "a").write_text("2")
    second = capture(tmp_path)
    (tmp_path / "a").chmod(0o755)
    third = capture(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({first, second, third, capture(tmp_path)}) == 4


def test_a_git_work_tree_is_named_by_its_tree(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "a").write_text("1")
    state = capture(tmp_path)
    assert state.kind == "git_tree"
    assert not (tmp_path / ".git" / "index").exists(), "the user's index is left alone"
    (tmp_path / "a").write_text("2")
    assert capture(tmp_path).digest != state.digest


async def _judge(folder: Path, program: str, timeout_s: float = 20.0):
    command = [sys.executable, "-c", program]
    return await evaluate(command, folder, "finished", folder / "score.json", timeout_s=timeout_s, env={})


WRITE = "import os, json; json.dump({!r}, open(os.environ['GYRE_SCORE_FILE'], 'w'))"


async def test_an_evaluator_scores(tmp_path: Path) -> None:
    verdict = await _judge(tmp_path, WRITE.format({"value": 0.5, "partial": True, "detail": "half"}))
    assert (verdict.status, verdict.value, verdict.partial, verdict.detail) == ("scored", 0.5, True, "half")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit(3)", "exited 3"),
        ("pass", "no score file"),
        ("import os; open(os.environ['GYRE_SCORE_FILE'], 'w').write('{')", "cannot be read"),
        ("import os; open(os.environ['GYRE_SCORE_FILE'], 'w').write('{\"value\": NaN}')", "not a number"),
        (WRITE.format({"value": "1"}), "not a number"),
        (WRITE.format({"value": True}), "not a number"),
        (WRITE.format([1]), "not a number"),
    ],
)
async def test_a_failing_evaluator_is_never_a_zero(tmp_path: Path, program: str, why: str) -> None:
    (tmp_path / "score.json").write_text(json.dumps({"value": 1.0}))  # of an earlier try: must not count
    verdict = await _judge(tmp_path, program)
    assert verdict.status == "failed"
    assert verdict.value is None
    assert why in verdict.detail


@pytest.mark.parametrize("detail", ["NaN", '"\\\\ud800"'])
async def test_a_detail_that_json_cannot_hold_is_kept_as_text(tmp_path: Path, detail: str) -> None:
    program = f"""import os; open(os.environ["GYRE_SCORE_FILE"], "w").write('{{"value": 1, "detail": {detail}}}')"""
    verdict = await _judge(tmp_path, program)
    assert (verdict.status, verdict.value) == ("scored", 1.0)
    json.dumps(verdict.detail, allow_nan=False, ensure_ascii=False).encode()


async def test_an_evaluator_that_leaves_a_pipe_for_a_score_fails(tmp_path: Path) -> None:
    verdict = await _judge(tmp_path, 'import os; os.mkfifo(os.environ["GYRE_SCORE_FILE"])')
    assert (verdict.status, "no regular file" in verdict.detail) == ("failed", True)


async def test_an_evaluator_is_done_when_it_exits_whatever_it_leaves_running(tmp_path: Path) -> None:
    program = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
json.dump({"value": 1, "detail": child.pid}, open(os.environ["GYRE_SCORE_FILE"], "w"))
"""
    verdict = await _judge(tmp_path, program)
    assert verdict.status == "scored"
    async with asyncio.timeout(60):
        while Path(f"/proc/{verdict.detail}/cmdline").exists() and Path(f"/proc/{verdict.detail}/cmdline").read_bytes():
            await asyncio.sleep(0.02)


async def test_an_evaluator_that_hangs_fails(tmp_path: Path) -> None:
    verdict = await _judge(tmp_path, "import time; time.sleep(60)", timeout_s=0.5)
    assert verdict.status == "failed"
    assert "ran past" in verdict.detail


async def test_a_harness_that_runs_too_long_is_stopped_with_its_children(tmp_path: Path) -> None:
    space = Workspace.create(tmp_path / "x", None)
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    env = environment("http://127.0.0.1:1/x/e", "k", space.home, {})
    assert await run_harness([sys.executable, "-c", program], space, env, 1.0) == "timeout"
    async with asyncio.timeout(60):
        while _asleep_in(space.work):  # a kill that was sent is not yet an end
            await asyncio.sleep(0.05)
    assert not space.pid_file.exists()


def _asleep_in(folder: Path) -> list[str]:
    asleep = subprocess.run(["pgrep", "-x", "sleep", "-a"], capture_output=True, text=True, check=False).stdout
    return [line for line in asleep.splitlines() if _works_in(int(line.split()[0]), folder)]


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve() == folder.resolve()
    except OSError:
        return False


async def test_a_harness_sees_the_proxy_and_no_other_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "secret")
    monkeypatch.setenv("CLAUDE_CODE_USE_BEDROCK", "1")
    monkeypatch.setenv("CLAUDE_CODE_MAX_OUTPUT_TOKENS", "64")
    space = Workspace.create(tmp_path / "x", None)
    env = environment("http://127.0.0.1:1/x/e", "k", space.home, {"GYRE_TASK": "t"})
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    assert await run_harness([sys.executable, "-c", program], space, env, 20.0) == "finished"
    seen = json.loads((space.root / "harness.log").read_text())
    assert not {"ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_USE_BEDROCK"} & set(seen)
    assert seen["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "64", "a setting of the client is the user's own"
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/x/e"
    assert seen["OPENAI_BASE_URL"] == "http://127.0.0.1:1/x/e/v1"
    assert seen["HOME"] == str(space.home)


async def test_a_crash_is_told_from_an_end(tmp_path: Path) -> None:
    space = Workspace.create(tmp_path / "x", None)
    assert await run_harness([sys.executable, "-c", "raise SystemExit(1)"], space, {}, 20.0) == "crashed"


async def test_a_leftover_harness_is_ended_and_a_stranger_is_not(tmp_path: Path) -> None:
    mine = Workspace.create(tmp_path / "mine", None)
    process = await asyncio.create_subprocess_exec("sleep", "60", cwd=mine.work, start_new_session=True)
    stranger = await asyncio.create_subprocess_exec("sleep", "60", cwd=tmp_path, start_new_session=True)
    mine.pid_file.write_text(str(process.pid))
    other = Workspace.create(tmp_path / "other", None)
    other.pid_file.write_text(str(stranger.pid))
    kill_leftover(mine)
    kill_leftover(other)
    assert await asyncio.wait_for(process.wait(), 60) < 0
    assert stranger.returncode is None
    stranger.kill()
    await stranger.wait()


def test_known_clients_get_their_own_settings(tmp_path: Path) -> None:
    claude = plan_launch(["claude", "-p", "hi"], "http://127.0.0.1:1/x/e", tmp_path)
    assert claude.command == ("claude", "-p", "hi")
    assert Path(claude.env["CLAUDE_CONFIG_DIR"]).is_relative_to(tmp_path)
    pi = plan_launch(["pi", "-p", "hi"], "http://127.0.0.1:1/x/e", tmp_path)
    ((path, text),) = pi.files.items()
    assert path.is_relative_to(tmp_path)
    assert json.loads(text)["providers"]["gyre"]["baseUrl"] == "http://127.0.0.1:1/x/e/v1"
    assert plan_launch(["/opt/mini", "-t", "x"], "u", tmp_path).command == ("/opt/mini", "-t", "x")
    codex = plan_launch(["codex", "exec", "hi"], "http://127.0.0.1:1/x/e", tmp_path, 9000)
    assert codex.command == ("codex", "exec", "hi")
    ((path, text),) = codex.files.items()
    assert path.parent == Path(codex.env["CODEX_HOME"])
    assert path.is_relative_to(tmp_path)
    config = tomllib.loads(text)
    assert config["model_context_window"] == 9000
    assert config["model_providers"][config["model_provider"]]["base_url"] == "http://127.0.0.1:1/x/e/v1"


def test_a_proxy_is_told_its_key_where_nobody_sees_it(tmp_path, monkeypatch):
    started = []

    @contextmanager
    def child(arguments, log, url, *, is_ready, env):
        started.append((arguments, env))
        yield

    monkeypatch.setattr(commands, "gyre_child", child)
    with commands.proxy_for(tmp_path / "run", ["http://engine"], tmp_path, key="hush"):
        ((arguments, env),) = started
    assert ("hush" in str(arguments), env) == (False, {"GYRE_KEY": "hush"})
