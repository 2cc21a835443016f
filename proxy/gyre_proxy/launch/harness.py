"""Running one harness process: its own HOME, its own process group, the addresses of the proxy in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from .workspace import Workspace

__all__ = ["environment", "kill_leftover", "run_harness"]

# Addresses and credentials of other services must not reach a harness that is to be recorded.
_DROPPED = (
    "ANTHROPIC_",
    "OPENAI_",
    "CODEX_",
    "GYRE_",
    "CLAUDE_CODE_USE_",
    "CLAUDE_CODE_OAUTH_",
    "CLAUDE_CODE_ENTRYPOINT",
)


def environment(base_url: str, key: str, home: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of a harness: ours without foreign endpoints, plus the proxy under the names clients look for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    told = {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "GYRE_BASE_URL": base_url,
        "GYRE_KEY": key,
    }
    return {**kept, **told, **({"HOME": str(home)} if home else {}), **extra}


async def run_harness(command: list[str], space: Workspace, env: Mapping[str, str], timeout_s: float) -> str:
    """Run `command` until it ends; return finished, crashed or timeout. Output goes to `harness.log` of the workspace.

    On a timeout or a cancellation the whole process group is ended, first politely.
    """
    with (space.root / "harness.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=space.work,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    space.pid_file.write_text(str(process.pid))
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return "timeout"
    finally:
        # The leader may be gone while children of it still run: the group is ended in every case.
        await _end_group(process)
        space.pid_file.unlink(missing_ok=True)
    return "finished" if code == 0 else "crashed"


async def _end_group(process: asyncio.subprocess.Process, grace_s: float = 5.0) -> None:
    _signal(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(process.wait()), grace_s)
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def kill_leftover(space: Workspace) -> None:
    """End the harness of a launcher that died: its process group is in the pid file, if it still runs from there."""
    try:
        group = int(space.pid_file.read_text())
        # The number may belong to somebody else by now; only a process that works in this workspace is ours.
        ours = Path(f"/proc/{group}/cwd").resolve() == space.work.resolve()
    except (FileNotFoundError, ValueError, PermissionError):
        return
    if ours:
        _signal(group, signal.SIGKILL)
    space.pid_file.unlink(missing_ok=True)


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
