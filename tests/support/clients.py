"""Real harness clients, where they are installed (tools/clients/install.sh), started as docs/proxy.md says."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from gyre_data.types import Call
from tests.support.flow import Flow
from tests.support.proxy_server import check_run, serve_proxy
from tests.support.qwen3 import qwen3_template

ROOT = Path(__file__).resolve().parents[2]
PI, CLAUDE, CODEX = "@mariozechner/pi-coding-agent", "@anthropic-ai/claude-code", "@openai/codex"
QWEN, OPENCODE, MINI = "@qwen-code/qwen-code", "opencode-ai", "mini-swe-agent"

__all__ = [
    "CLAUDE",
    "CODEX",
    "MINI",
    "OPENCODE",
    "PI",
    "QWEN",
    "Played",
    "client_path",
    "documented",
    "play",
    "run_client",
]


def client_path(*names: str) -> str:
    """A PATH with the clients first; skips the test when one of them is not installed."""
    folder = Path(os.environ.get("GYRE_TEST_CLIENTS") or ROOT / ".cache" / "clients")
    npm, mini = folder / "node_modules", folder / "mini"
    for name in names:
        if not (mini / ".ready" if name == MINI else npm / name).exists():
            pytest.skip(f"no {name} in {folder}; run tools/clients/install.sh")
    return os.pathsep.join([str(npm / ".bin"), str(npm / f"{CLAUDE}-linux-x64"), str(mini / "bin"), os.environ["PATH"]])


def documented(client: str, command: str | None = None) -> str:
    """The shell lines of docs/proxy.md that start `client`; `command` takes the place of the last one."""
    page = (ROOT / "docs" / "proxy.md").read_text()
    found = re.search(rf"^### {re.escape(client)}\n\n```sh\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found, f"docs/proxy.md has no block for {client}"
    *setting, start = found[1].strip().splitlines()
    return "\n".join(["set -eu", *setting, command or start])


async def run_client(script: str, folder: Path, env: dict[str, str], timeout_s: float = 240.0) -> str:
    """Run shell lines in a HOME and workspace of their own below `folder`; returns what was printed."""
    for name in ("home", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    child = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        script,
        env={"HOME": str(folder / "home"), "TERM": "dumb", "PATH": os.environ["PATH"], **env},
        cwd=folder / "work",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        out, _ = await asyncio.wait_for(child.communicate(), timeout_s)
    finally:
        if child.returncode is None:  # it may have children of its own
            os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    assert child.returncode == 0, f"exit status {child.returncode}: {out.decode(errors='replace')[-4000:]}"
    return out.decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """One execution of a real client against a scripted engine, recorded and checked."""

    run: Path
    calls: list[Call]
    answered: list[str]
    printed: str


async def play(
    path: str, folder: Path, script: str, flow: Flow, env: dict[str, str], timeout_s: float = 240.0, **options: object
) -> Played:
    """Run a client's script; every request it makes is answered by `flow`. `options` are settings of the proxy."""
    async with flow.serving(), serve_proxy(folder / "run", flow, template=qwen3_template(), **options) as served:
        address = {"GYRE_BASE_URL": f"{served.url}/x/e1", "GYRE_KEY": "no-secret"}
        try:
            printed = await run_client(script, folder, {"PATH": path, **address, **env}, timeout_s)
        finally:
            assert not flow.unanswered, f"no rule answers: ...{flow.unanswered[0][-3000:]}"
    calls = check_run(folder / "run", flow)
    assert len(calls) == len(flow.requests), "every call is recorded"
    assert {str(call.status) for call in calls} == {"ok"}
    assert sum(call.output_tokens or 0 for call in calls) == sum(flow.sampled), "every sampled token is recorded once"
    return Played(run=folder / "run", calls=calls, answered=flow.answered, printed=printed)
