"""Harbor's task folders and the sets of docs/tasks.md, run through `gyre run`'s supervisor over a real proxy."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_data import open as open_run
from gyre_data.errors import ConfigError
from gyre_proxy.launch.client import ProxyClient
from gyre_proxy.launch.harbor import load_harbor
from gyre_proxy.launch.supervisor import Supervisor
from gyre_proxy.launch.tasks import Task, load_tasks
from tests.support.proxy_server import Served, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
FIX = ROOT / "examples" / "tasks" / "fix"


@pytest.fixture
async def served(tmp_path: Path):
    engine = ScriptedEngine([])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as proxy:
        yield proxy


async def scores(served: Served, *tasks: Task, harness: tuple[str, ...] | None = None) -> list[tuple[object, object]]:
    async with ProxyClient(served.url, patience_s=5) as client:
        await Supervisor(client, served.run, tasks, harness=harness).run()
    return [(row["value"], row["detail"]) for row in open_run(served.run).table("scores").to_pylist()]


def harbor_task(folder: Path, test: str, *, image: str | None = None) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("Write hello to /app/hello.txt.\n")
    (folder / "tests" / "test.sh").write_text(test)
    named = f'docker_image = "{image}"\n' if image else ""
    if not image:
        (folder / "environment" / "Dockerfile").write_text("FROM python:3.11\nWORKDIR /app\n")
    (folder / "task.toml").write_text(
        f"[agent]\ntimeout_sec = 20\n[verifier]\ntimeout_sec = 30\n[environment]\n{named}cpus = 2\nmemory_mb = 512\n"
    )
    return folder


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "boxes"
    (found / "bin").mkdir(parents=True)
    docker = found / "bin" / "docker"
    docker.write_text(f'#!/bin/sh\nexec {sys.executable} {SUPPORT}/docker_stand_in.py "$@"\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'proxy'}")
    monkeypatch.setenv("BOXES", str(found))
    return found


async def test_harbor_tasks_are_run_in_their_container_and_judged_by_their_tests(
    served: Served, tmp_path: Path, boxes: Path
) -> None:
    reward = "/logs/verifier/reward.txt"
    judge = f'[ "$(cat /app/hello.txt)" = hello ] && echo 1 > {reward} || echo 0.25 > {reward}\n'
    harbor_task(tmp_path / "set" / "hello", judge)
    named = '{"reward": 0.5, "style": 1}'
    harbor_task(tmp_path / "set" / "named", f"echo '{named}' > /logs/verifier/reward.json\n", image="python:3.11")
    harbor_task(tmp_path / "set" / "silent", "exit 0\n")
    tasks = load_harbor(tmp_path / "set")
    assert [(t.id, t.timeout_s, t.evaluator_timeout_s) for t in tasks] == [
        ("hello", 20.0, 30.0), ("named", 20.0, 30.0), ("silent", 20.0, 30.0),
    ]  # fmt: skip
    # A harness that would judge itself: what it leaves there is removed before the tests run.
    harness = (
        "sh",
        "-c",
        "printf hello > /app/hello.txt; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json",
    )
    found = await scores(served, *tasks, harness=harness)
    assert sorted(str(value) for value, _ in found) == ["0.5", "1.0", "None"]
    ran = [json.loads(line) for line in (boxes / "log").read_text().splitlines()]
    assert sum(words[0] == "build" for words in ran) == 2
    assert all("--cpus" in words and "512m" in words for words in ran if words[0] == "run")
    assert sorted(path.name for path in boxes.iterdir()) == ["bin", "gyre-harbor-hello", "gyre-harbor-silent", "log"]


@pytest.mark.parametrize(
    ("gone", "mend"),
    [("instruction.md", "instruction.md"), ("tests/test.sh", "judges the task"), ("environment/Dockerfile", "neither")],
)
def test_a_folder_that_is_no_whole_task_says_what_it_lacks(tmp_path: Path, gone: str, mend: str) -> None:
    folder = harbor_task(tmp_path / "t", "true")
    (folder / gone).unlink()
    with pytest.raises(ConfigError, match=mend):
        load_harbor(tmp_path)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("def count_lines(text):\n    return len(text.splitlines())\n", 1.0),
        ("", 2 / 3),
        ("def count_lines(text):\n    return (\n", 0.0),
    ],
    ids=["mended", "as it was", "broken"],
)
async def test_a_fix_is_judged_by_hidden_tests_in_a_copy(served: Served, code: str, value: float) -> None:
    (task,) = load_tasks(FIX)
    program = f"import pathlib; code = {code!r}; code and pathlib.Path('wc.py').write_text(code)"
    ((found, detail),) = await scores(served, replace(task, command=(sys.executable, "-c", program)))
    assert found == pytest.approx(value)
    assert str(detail).endswith("of 3 hidden tests pass")
    (space,) = served.run.glob("workspaces/*/work")
    assert [path.name for path in space.iterdir()] == ["wc.py"], "the kept state has no hidden test in it"


def test_the_sets_of_the_page_load(tmp_path: Path) -> None:
    lines = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "tasks.md").read_text(), re.DOTALL)
    (tmp_path / "set.jsonl").write_text("".join(lines))
    first, second = load_tasks(tmp_path / "set.jsonl")
    assert (first.id, second.id, second.workspace) == ("wc-1", "kv-store", None)
