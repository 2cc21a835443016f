"""Running one harness process: its own HOME, its own process group, the addresses of the proxy in its environment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .leftover import end_marked, signal_group
from .workspace import Workspace

__all__ = ["end_group", "environment", "kill_leftover", "run_harness", "told"]

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


def told(base_url: str, key: str) -> dict[str, str]:
    """The proxy under the names that clients look for."""
    return {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "GYRE_BASE_URL": base_url,
        "GYRE_KEY": key,
    }


def environment(base_url: str, key: str, home: Path | None, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of a harness: ours without foreign endpoints, plus the proxy under the names clients look for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return {**kept, **told(base_url, key), **({"HOME": str(home)} if home else {}), **extra}


async def run_harness(
    command: Sequence[str], space: Workspace, env: Mapping[str, str], timeout_s: float, *, log_name: str = "harness.log"
) -> str:
    """Run `command` until it ends; return finished, crashed or timeout. Output goes to a log of the workspace.

    On a timeout or a cancellation the whole process group is ended, first politely, and then what left the group.
    """
    with (space.root / log_name).open("ab") as log:
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
        await end_group(process)
        if (execution := env.get("GYRE_EXECUTION")) is not None:
            await asyncio.to_thread(end_marked, execution)
        space.pid_file.unlink(missing_ok=True)
    return "finished" if code == 0 else "crashed"


async def end_group(process: asyncio.subprocess.Process, grace_s: float = 5.0) -> None:
    """End a process and its group, first politely."""
    signal_group(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(process.wait()), grace_s)
    signal_group(process.pid, signal.SIGKILL)
    await process.wait()


def kill_leftover(space: Workspace) -> None:
    """End what a launcher that died left of an execution: its harness, what that started, its container."""
    with contextlib.suppress(FileNotFoundError, ValueError, PermissionError):
        group = int(space.pid_file.read_text())
        # The number may belong to somebody else by now; only a process that works in this workspace is ours, or a
        # worker, which works in a folder of their own.
        if Path(f"/proc/{group}/cwd").resolve() in (space.work.resolve(), space.workers.resolve()):
            signal_group(group, signal.SIGKILL)
        space.pid_file.unlink(missing_ok=True)
    end_marked(space.root.name)
    with contextlib.suppress(FileNotFoundError):
        words = space.up_file.read_text().splitlines()
        with contextlib.suppress(OSError):
            subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        space.up_file.unlink(missing_ok=True)
