"""Containers of a real service (podman, as `docker`): the templates of docs/tasks.md, and a Harbor task that is built.

No image is fetched: both are built from programs of this machine.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_data import open as open_run
from gyre_data.execution import executions
from gyre_proxy.launch.client import ProxyClient
from gyre_proxy.launch.harbor import load_harbor
from gyre_proxy.launch.supervisor import Supervisor
from gyre_proxy.launch.tasks import Task, load_tasks
from tests.support.proxy_server import Served, serve_proxy
from tests.support.scripted_engine import ScriptedEngine

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PROGRAMS = ("bash", "cat", "mkdir", "rm", "sleep", "timeout", "env", "ls")
# One call of a model in bash alone, since the image has no client.
AGENT = r"""
set -e
test "$KEPT_OUTSIDE" = ""
address=${ANTHROPIC_BASE_URL#http://}
host=${address%%/*}
body='{"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}'
exec 3<>"/dev/tcp/${host%:*}/${host#*:}"
printf '%s\r\n' "POST /${address#*/}/v1/messages HTTP/1.1" "Host: $host" "x-api-key: $ANTHROPIC_API_KEY" \
  "Content-Type: application/json" "Connection: close" "Content-Length: ${#body}" "" >&3
printf %s "$body" >&3
cat <&3 > reply.txt
"""
JUDGE = 'value=0; [ -s reply.txt ] && value=1; echo "{\\"value\\": $value}" > "$GYRE_SCORE_FILE"'


def filesystem(folder: Path) -> Path:
    """A root file system of a few of this machine's programs and the libraries that they need."""
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        needed = [Path(path) for path in re.findall(r"(/\S+) \(0x", listed)]
        for source, place in [(Path(program), Path("bin", name)), *((path, path.relative_to("/")) for path in needed)]:
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy2(source.resolve(), target)
    (folder / "bin" / "sh").symlink_to("bash")
    for name in ("tmp", "proc", "sys", "dev", "etc"):
        (folder / name).mkdir(exist_ok=True)
    return folder


@pytest.fixture
def podman() -> Iterator[list[str]]:
    """Podman's command line with a store of its own."""
    client, runtime = shutil.which("podman"), shutil.which("runc") or shutil.which("crun")
    if client is None or runtime is None:
        pytest.skip("wanted podman and runc (Debian packages), found none")
    with tempfile.TemporaryDirectory(prefix="gyre-podman-") as store:  # podman refuses long paths
        places = ["--root", f"{store}/store", "--runroot", f"{store}/run", "--cgroup-manager", "cgroupfs"]
        command = [client, *places, "--runtime", runtime]
        yield command
        subprocess.run([*command, "system", "reset", "--force"], capture_output=True, check=False)


@pytest.fixture
def docker(podman: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A `docker` on the PATH that is podman; it has the image `gyre-test`, and no container at the end."""
    client = tmp_path / "bin" / "docker"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shlex.join(podman)} "$@"\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}:{os.environ['PATH']}")
    limits = tmp_path / "containers.conf"  # podman's own are above what some machines let root set
    limits.write_text('[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n')
    monkeypatch.setenv("CONTAINERS_CONF", str(limits))
    monkeypatch.setenv("KEPT_OUTSIDE", "not seen in a container")
    made = tmp_path / "image"
    filesystem(made / "root")
    (made / "Dockerfile").write_text("FROM scratch\nCOPY root /\n")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([client, *words], capture_output=True, text=True, check=False)

    for words in (("build", "--tag", "gyre-test", str(made)), ("run", "--rm", "gyre-test", "ls", "/")):
        done = run(*words)
        if done.returncode:
            pytest.skip(f"podman {words[0]} does not work here: {done.stderr[-300:]}")
    yield
    left = run("ps", "--all", "--quiet").stdout.split()
    run("rm", "--force", "--time", "0", *left)
    assert left == [], "a container was left"


@pytest.fixture
async def served(tmp_path: Path):
    engine = ScriptedEngine([{"deltas": [{"ids": list(b"done"), "lps": [-0.5] * 4}]}])
    async with engine.serving(), serve_proxy(tmp_path / "run", engine) as proxy:
        yield proxy


async def run(served: Served, *tasks: Task, harness: tuple[str, ...] | None = None) -> None:
    async with ProxyClient(served.url, patience_s=5) as client:
        await Supervisor(client, served.run, tasks, harness=harness).run()


async def test_the_templates_of_the_page(served: Served, tmp_path: Path, docker: None) -> None:
    """Harness and evaluator run inside; the reply lies in the workspace outside; one that hangs is ended inside."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    templates = re.search(r"\[defaults\.container\]\n((?:\w+ = .*\n)+)", page)
    assert templates is not None
    (tmp_path / "agent.sh").write_text(AGENT)
    (tmp_path / "judge.sh").write_text(JUDGE)
    (tmp_path / "tasks.toml").write_text(
        '[defaults]\nevaluator = "bash {tasks}/judge.sh"\n[defaults.container]\n'
        + templates[1].replace("IMAGE", "gyre-test")
        + '[[task]]\nid = "calls"\nprompt = "p"\ncommand = "bash {tasks}/agent.sh"\n'
        + '[[task]]\nid = "hangs"\nprompt = "p"\ncommand = "sleep 3000"\ntimeout_s = 3\n'
    )
    await run(served, *load_tasks(tmp_path / "tasks.toml"))
    recorded = open_run(served.run)
    ends = {one.task_id: one.end_reason for one in executions(recorded).values()}
    assert ends == {"calls": "finished", "hangs": "harness_timeout"}
    assert sorted(row["value"] for row in recorded.table("scores").to_pylist()) == [0.0, 1.0]
    (reply,) = served.run.glob("workspaces/*/*/reply.txt")
    assert '"done"' in reply.read_text()
    assert len(recorded.table("calls")) == 1


async def test_a_harbor_task_is_built_run_and_judged(served: Served, tmp_path: Path, docker: None) -> None:
    task = tmp_path / "set" / "hello"
    (task / "tests").mkdir(parents=True)
    (task / "environment").mkdir()
    (task / "instruction.md").write_text("Write hello to hello.txt.\n")
    (task / "tests" / "test.sh").write_text(
        'value=0.25; [ "$(cat /app/hello.txt)" = hello ] && value=1; echo $value > /logs/verifier/reward.txt\n'
    )
    (task / "environment" / "Dockerfile").write_text("FROM gyre-test\nWORKDIR /app\n")
    (task / "task.toml").write_text(
        "[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 60\n[environment]\ncpus = 1\nmemory_mb = 256\n"
    )
    await run(served, *load_harbor(tmp_path / "set"), harness=("bash", "-c", "printf hello > hello.txt"))
    (row,) = open_run(served.run).table("scores").to_pylist()
    assert (row["status"], row["value"]) == ("scored", 1.0)
