"""`gyre run` over a real proxy: groups that stay whole, git workspaces, workers, containers, kills."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre_data import open as open_run
from gyre_data.errors import ConfigError
from gyre_proxy.launch import supervisor
from gyre_proxy.launch.client import ProxyClient
from gyre_proxy.launch.container import Container
from gyre_proxy.launch.tasks import Task
from gyre_proxy.launch.workspace import GitSource
from gyre_train.live import settled_at
from tests.support.engines import ROOT
from tests.support.launching import serving_scripted, supervise
from tests.support.proxy_server import Served, calls_of, check_run

SUPPORT = Path(__file__).parents[1] / "support"
MINI = (sys.executable, str(SUPPORT / "mini_harness.py"))
LINES = (sys.executable, str(SUPPORT / "line_worker.py"))
JUDGE = "import json, os; json.dump({'value': 1}, open(os.environ['GYRE_SCORE_FILE'], 'w'))"


def task(**fields: object) -> Task:
    judge = (sys.executable, "-c", JUDGE)
    return replace(Task(id="t", prompt="p", command=(*MINI, "1"), evaluator=judge, timeout_s=30.0), **fields)


def left_in(run: Path, name: str) -> list[Path]:
    """Files of this name that harnesses left in their workspaces."""
    return list((run / "workspaces").glob(f"*/*/{name}"))


def pids(run: Path) -> list[int]:
    """Processes of the harnesses that run, as their launcher noted them."""
    told = [file.read_text() for file in run.glob("workspaces/*/pid")]
    return [int(pid) for pid in told if pid]


def reasons(run: Path) -> list[str]:
    rows = open_run(run).table("executions").to_pylist()
    return sorted(row["end_reason"] for row in rows if row["end_reason"])


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def served(tmp_path: Path):
    async with serving_scripted(tmp_path / "run") as proxy:
        yield proxy


async def test_a_group_that_cannot_be_filled_shrinks_and_is_complete_then(served: Served) -> None:
    setup = (sys.executable, "-c", "import sys; sys.exit(int('{sample_index}') > 0)")
    done = await supervise(served, task(setup=setup), attempts=3, concurrency=1, replacements=2)
    assert done.ended["finished"] == 1
    assert done.ended["infra_fault"] == 4, "two of the group and two in their places"
    assert done.shrunk
    async with ProxyClient(served.url) as client:
        (group,) = await client.groups()
    assert group["size"] == 1
    assert len(settled_at(open_run(served.run), {})) == 5
    again = await supervise(served, task(), attempts=3)  # the reason is mended: the same command goes on
    assert again.ended == {"finished": 2}


async def test_a_launcher_that_serves_runs_what_others_queue_and_replaces_what_fell_out(served: Served) -> None:
    setup = (sys.executable, "-c", "import sys; sys.exit('{sample_index}' == '0')")
    async with ProxyClient(served.url) as client:
        serving = asyncio.create_task(supervise(served, task(setup=setup), serve=True))
        group = await client.create_group("t", 2, "mine")
        for index in range(2):
            await client.create_execution(task="t", group=group, sample_index=index)
        async with asyncio.timeout(120):
            while sum(one["scored"] for one in await client.executions(group)) < 2:
                await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        known = await client.executions(group)
    assert [one["end_reason"] for one in known] == ["infra_fault", "finished", "finished"]
    assert len(settled_at(open_run(served.run), {})) == 3


async def test_a_claim_whose_answer_was_lost_is_given_up_and_replaced(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_UNKNOWN_S", 0.0)
    looks, claim = asyncio.Event(), ProxyClient.claim

    async def looked(client: ProxyClient, *what: Any) -> list[dict[str, Any]]:
        looks.set()
        return await claim(client, *what)

    monkeypatch.setattr(ProxyClient, "claim", looked)
    async with ProxyClient(served.url) as client:
        serving = asyncio.create_task(supervise(served, task(), serve=True))
        await looks.wait()  # it has taken over what there was: nothing
        group = await client.create_group("t", 1, "mine")
        await client.create_execution(task="t", group=group, sample_index=0, queue=False)
        async with asyncio.timeout(120):
            while not any(one["scored"] for one in await client.executions(group)):
                await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert reasons(served.run) == ["finished", "infra_fault"]


# --- workspaces -------------------------------------------------------------------------------------------------------


def git(folder: Path, *words: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    names = ["-c", "user.name=n", "-c", "user.email=e@e"]
    done = subprocess.run(["git", *names, *words], cwd=folder, env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def test_a_workspace_is_a_commit_and_what_came_before_it(served: Served, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "-q")
    commits = []
    for number in range(3):
        (repository / "file").write_text(str(number))
        git(repository, "add", ".")
        git(repository, "commit", "-q", "-m", str(number))
        commits.append(git(repository, "rev-parse", "HEAD"))
    source = GitSource(repository=str(repository), ref=commits[1])
    await supervise(served, task(workspace=source), attempts=2)
    for space in (served.run / "workspaces").glob("*/work"):
        assert (space / "file").read_text() == "1"
        assert git(space, "log", "--all", "--format=%s").split() == ["1", "0"], "the answer is not in a later commit"
    assert {row["kind"] for row in open_run(served.run).table("environments").to_pylist()} == {"git_tree"}
    (repository / "file").write_text("3")
    git(repository, "commit", "-q", "-a", "-m", "3")  # newer than the copy that was kept
    newer = task(id="u", workspace=replace(source, ref=git(repository, "rev-parse", "HEAD")))
    assert (await supervise(served, newer)).ended == {"finished": 1}
    gone = await supervise(served, task(id="v", workspace=replace(source, ref="no-such-ref")), replacements=0)
    assert gone.ended == {"infra_fault": 1}


async def test_what_left_the_process_group_is_ended_too(served: Served) -> None:
    program = (
        "import os, subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); "
        "open('child', 'w').write(str(child.pid))"
    )
    await supervise(served, task(command=(sys.executable, "-c", program)))
    (file,) = left_in(served.run, "child")
    assert await dies(int(file.read_text()))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def dies(pid: int) -> bool:
    """Whether it is gone soon: a kill that was sent is not yet an end."""
    for _ in range(200):
        if is_gone(pid):
            return True
        await asyncio.sleep(0.05)
    return False


# --- workers ----------------------------------------------------------------------------------------------------------


async def test_a_worker_runs_one_execution_after_the_other(served: Served) -> None:
    done = await supervise(served, task(command=None, worker=LINES), attempts=6, concurrency=2)
    assert done.ended == {"finished": 6}
    assert done.verdicts == {"scored": 6}
    pids = {file.read_text() for file in left_in(served.run, "worker.txt")}
    assert len(pids) <= 2
    assert all([await dies(int(pid)) for pid in pids])
    assert len(calls_of(served.run)) == 6
    check_run(served.run)


async def test_a_worker_that_dies_or_hangs_costs_its_execution_and_no_other(served: Served) -> None:
    worker = (*LINES, "--die-on", "1", "--sleep-on", "3")
    done = await supervise(served, task(command=None, worker=worker, timeout_s=15.0), attempts=5, concurrency=1)
    assert done.ended == {"finished": 3, "crashed": 1, "harness_timeout": 1}
    assert len({file.read_text() for file in left_in(served.run, "worker.txt")}) == 3
    with pytest.raises(ConfigError, match="a container belongs to one"):
        await supervise(served, task(command=None, worker=worker, container=Container(exec=("x",))))


# --- containers -------------------------------------------------------------------------------------------------------


def box(folder: Path) -> Container:
    words = (sys.executable, str(SUPPORT / "box.py"), str(folder))
    return Container(
        up=(*words, "up", "{name}"), exec=(*words, "exec", "{name}", "{env}", "--"), down=(*words, "down", "{name}")
    )


async def test_harness_setup_and_evaluator_run_in_the_container(served: Served, tmp_path: Path) -> None:
    write = "import os, pathlib; pathlib.Path('made').write_text(os.environ['BOX'])"
    judge = (
        "import json, os; assert 'SECRET' not in os.environ; "
        "json.dump({'value': float(os.environ['BOX'] == open('made').read())}, "
        "open(os.environ['GYRE_SCORE_FILE'], 'w'))"
    )
    inside = task(
        container=box(tmp_path), setup=(sys.executable, "-c", write), evaluator=(sys.executable, "-c", judge)
    )  # fmt: skip
    os.environ["SECRET"] = "x"
    try:
        await supervise(served, inside)
    finally:
        del os.environ["SECRET"]
    (score,) = open_run(served.run).table("scores").to_pylist()
    assert (score["value"], score["detail"]) == (1.0, None)
    name = "gyre-" + score["execution_id"]
    assert (tmp_path / "log").read_text().split("\n")[:-1] == [
        f"up {name}", *[f"exec {name}"] * 3, f"down {name}",
    ]  # fmt: skip
    assert len(calls_of(served.run)) == 1


# --- kills ------------------------------------------------------------------------------------------------------------


async def gyre_run(tasks: Path, run: Path, *flags: str) -> asyncio.subprocess.Process:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proxy")])
    words = [sys.executable, "-m", "gyre_data", "run", "-p", str(tasks), "--run", str(run), "--json", *flags]
    return await asyncio.create_subprocess_exec(
        *words, env={**os.environ, "PYTHONPATH": path}, stdout=asyncio.subprocess.PIPE
    )


async def test_a_killed_launcher_leaves_nothing_behind_and_the_same_command_goes_on(
    served: Served, tmp_path: Path
) -> None:
    info = json.loads((served.run / "run.json").read_text())
    (served.run / "run.json").write_text(json.dumps({**info, "endpoints": {"proxy": served.url}}))
    tasks, evaluator = tmp_path / "tasks.toml", json.dumps([sys.executable, "-c", JUDGE])
    templates = ", ".join(f"{name} = {json.dumps(getattr(box(tmp_path), name))}" for name in ("up", "exec", "down"))

    def write_tasks(*flags: str) -> None:
        tasks.write_text(
            f"[defaults]\ncontainer = {{ {templates} }}\nevaluator = {evaluator}\n"
            f'[[task]]\nid = "t"\nprompt = "p"\ncommand = {json.dumps([*MINI, "1", *flags])}\n'
        )

    write_tasks("--sleep")
    first = await gyre_run(tasks, served.run, "-k", "2", "-j", "2")
    async with asyncio.timeout(120):
        while len(calls_of(served.run)) < 2 or len(pids(served.run)) < 2:
            await asyncio.sleep(0.05)
    left = pids(served.run)
    first.kill()
    await first.wait()
    assert len(left) == 2
    assert not any(is_gone(pid) for pid in left), "nobody was there to end them"
    write_tasks()
    again = await gyre_run(tasks, served.run, "-k", "2", "-j", "2")
    told, _ = await asyncio.wait_for(again.communicate(), 120)
    assert json.loads(told) == {"ended": {"finished": 2}, "verdicts": {"scored": 2}, "shrunk": []}
    assert all([await dies(pid) for pid in left])
    assert reasons(served.run) == ["finished", "finished", "infra_fault", "infra_fault"]
    log = (tmp_path / "log").read_text().split("\n")
    names = {line.split()[1] for line in log if line}
    assert len(names) == 4
    assert all(log.count(f"{verb} {name}") == 1 for verb in ("up", "down") for name in names)
    assert len(settled_at(open_run(served.run), {})) == 4
    check_run(served.run)


async def test_a_stopped_launcher_ends_its_harnesses(served: Served, tmp_path: Path) -> None:
    info = json.loads((served.run / "run.json").read_text())
    (served.run / "run.json").write_text(json.dumps({**info, "endpoints": {"proxy": served.url}}))
    tasks = tmp_path / "tasks.toml"
    tasks.write_text(f'[[task]]\nid = "t"\nprompt = "p"\ncommand = {json.dumps([*MINI, "1", "--sleep"])}\n')
    launcher = await gyre_run(tasks, served.run)
    async with asyncio.timeout(120):
        while not calls_of(served.run) or not pids(served.run):
            await asyncio.sleep(0.05)
    (pid,) = pids(served.run)
    launcher.terminate()
    await asyncio.wait_for(launcher.wait(), 120)
    assert launcher.returncode == 130
    assert await dies(pid)
    assert reasons(served.run) == ["cancelled"]
