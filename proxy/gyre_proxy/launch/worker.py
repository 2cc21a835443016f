"""Long-lived harness workers: a program that is started once and runs one execution after the other.

Where a harness takes seconds to import what it needs and an execution takes not much longer, a process for each is most
of the time. A worker reads one JSON object a line from its standard input, each an execution:

    {"execution": ..., "task": ..., "sample_index": 0, "prompt": ..., "workspace": ..., "home": ...,
     "base_url": ..., "key": ...}

and answers each with one line on its standard output when it is done: `{"execution": ..., "ok": true}`, false when the
harness failed. Its errors go to `workers/worker-N.log` of the run. One whose input ends leaves;
one that runs past a time limit, or dies, is replaced, and what it was running ends as a time-out or a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .harness import end_group, environment, told
from .leftover import end_marked
from .workspace import Workspace

__all__ = ["WorkerPool"]

_MAX_LINE = 1 << 20


class WorkerPool:
    """Workers by their command; an idle one is used again before another is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_started = 0
        self._idle: dict[tuple[str, ...], list[_Worker]] = {}

    async def run(self, command: Sequence[str], order: Mapping[str, Any], space: Workspace, timeout_s: float) -> str:
        """Have a worker run one execution; return finished, crashed or timeout. OSError when none can be started."""
        idle = self._idle.setdefault(tuple(command), [])
        while idle:
            worker = idle.pop()
            if worker.process.returncode is None:
                break
            await worker.end()
        else:
            self.num_started += 1
            worker = await _start(command, self.folder, self.num_started)
        outcome = "crashed"
        space.pid_file.write_text(str(worker.process.pid))
        try:
            outcome = await asyncio.wait_for(worker.run(order), timeout_s)
        except TimeoutError:
            outcome = "timeout"
        finally:
            if outcome in ("finished", "failed"):
                idle.append(worker)
            else:
                await worker.end()
            await asyncio.to_thread(end_marked, str(order["execution"]))
            space.pid_file.unlink(missing_ok=True)
        return "crashed" if outcome == "failed" else outcome

    async def close(self) -> None:
        """Let every idle worker go."""
        for idle in self._idle.values():
            await asyncio.gather(*(worker.leave() for worker in idle))
            idle.clear()


class _Worker:
    """One process; it runs one execution at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def run(self, order: Mapping[str, Any]) -> str:
        """Return finished or failed as the worker says, crashed when it died or said something else."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(dict(order)).encode() + b"\n")
            await self.process.stdin.drain()
            while line := await self.process.stdout.readline():
                answer = _answer(line)
                if answer.get("execution") == order["execution"]:  # what else it prints is its own business
                    return "finished" if answer.get("ok") is True else "failed"
        except (OSError, ValueError):  # it died, or wrote a line without an end
            pass
        return "crashed"

    async def leave(self, grace_s: float = 5.0) -> None:
        """Close its input and wait for it to end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self.process.wait()), grace_s)
        await self.end()

    async def end(self) -> None:
        """End it and what it started."""
        await end_group(self.process)


async def _start(command: Sequence[str], folder: Path, number: int) -> _Worker:
    env = environment("", "", None, {})
    for name in told("", ""):
        del env[name]  # each execution has its own
    folder.mkdir(exist_ok=True)
    with (folder / f"worker-{number}.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            limit=_MAX_LINE,
        )
    return _Worker(process)


def _answer(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
