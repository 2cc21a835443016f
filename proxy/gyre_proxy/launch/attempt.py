"""One execution of a task on this machine: workspace, container, harness or worker, states, verdict."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .client import ProxyClient
from .container import prefix
from .evaluate import Verdict, evaluate
from .harness import environment, run_harness, told
from .tasks import Task, fill, program_name
from .worker import WorkerPool
from .workspace import Workspace, capture

__all__ = ["Attempt"]


class Attempt:
    """Runs one claimed execution. `close` ends its container; it may be called again."""

    def __init__(self, client: ProxyClient, space: Workspace, claimed: Mapping[str, Any], task: Task) -> None:
        self.client, self.space, self.claimed, self.task = client, space, claimed, task
        self.id = str(claimed["id"])
        self._values = {
            "prompt": task.prompt,
            "workspace": str(space.work),
            "root": str(space.root),
            "sample_index": str(claimed["sample_index"]),
            "tasks": str(task.folder),
            "task": task.id,
            "timeout_s": f"{task.timeout_s:.0f}",
            "name": f"gyre-{self.id}",
        }
        self._told = {
            "GYRE_EXECUTION": self.id,
            "GYRE_TASK": task.id,
            "GYRE_SAMPLE_INDEX": str(claimed["sample_index"]),
        }

    async def run(self, command: Sequence[str], pool: WorkerPool, deadline: float, *, is_worker: bool) -> str:
        """Make the workspace, run the harness and return the end reason; OSError when it could not be started.

        `deadline` (monotonic seconds) bounds all of it.
        """
        await asyncio.to_thread(Workspace.create, self.space.root, self.task.workspace)
        await self._up()
        base_url, key = self.claimed["base_url"], self.claimed["key"]
        env = environment(base_url, key, self.space.home, self._told)
        if self.task.setup is not None:
            words = self._wrapped(self.task.setup, self._told)
            outcome = await run_harness(words, self.space, env, self._left(deadline), log_name="setup.log")
            if outcome != "finished":
                raise OSError(f"setup {outcome}; see {self.space.root / 'setup.log'}")
        await self.capture()
        left = self._left(deadline)
        limit = min(self.task.timeout_s, left)
        if is_worker:
            order = {
                "execution": self.id, "task": self.task.id, "sample_index": self.claimed["sample_index"],
                "prompt": self.task.prompt, "workspace": str(self.space.work), "home": str(self.space.home),
                "base_url": base_url, "key": key,
            }  # fmt: skip
            # One process for many executions: of the placeholders it can have what they share.
            shared = {"tasks": self._values["tasks"]}
            outcome = await pool.run(fill(tuple(command), shared), order, self.space, limit)
        else:
            words = self._wrapped(tuple(command), {**told(base_url, key), **self._told}, base_url=base_url)
            outcome = await run_harness(words, self.space, env, limit)
        await self.capture()
        if outcome == "timeout":
            return "harness_timeout" if self.task.timeout_s <= left else "overall_timeout"
        return outcome

    async def judge(self, reason: str) -> Verdict | None:
        """Judge the workspace and record the verdict; None for a task without an evaluator."""
        if self.task.evaluator is None:
            return None
        state_id = await self.capture()
        try:
            await self._up()
        except OSError as error:
            return await self._record(Verdict(status="failed", detail=str(error)), state_id)
        names = {**self._told, "GYRE_WORKSPACE": "", "GYRE_END_REASON": "", "GYRE_SCORE_FILE": ""}
        outside = self.task.evaluator_outside
        judge = self._outer(self.task.evaluator) if outside else self._wrapped(self.task.evaluator, names)
        verdict = await evaluate(
            list(judge),
            self.space.work,
            reason,
            self.space.root / "score.json",
            timeout_s=self.task.evaluator_timeout_s,
            env=environment("", "", None, self._told),
        )
        return await self._record(verdict, state_id)

    async def _record(self, verdict: Verdict, state_id: str) -> Verdict:
        evaluator = self.task.evaluator or ()
        config = hashlib.sha256(json.dumps(list(evaluator)).encode()).hexdigest()[:32]
        await self.client.score(
            self.id, evaluator=program_name(evaluator), config_digest=config, state_id=state_id,
            status=verdict.status, value=verdict.value, partial=verdict.partial, detail=verdict.detail,
        )  # fmt: skip
        return verdict

    async def capture(self) -> str:
        """Record the workspace as it is now; later calls of the execution carry the state's id."""
        state = await asyncio.to_thread(capture, self.space.work)
        return await self.client.environment(self.id, state.kind, state.digest, str(self.space.work))

    async def close(self) -> None:
        """Remove the container, if one is up."""
        if self.space.up_file.exists():
            await self._container(self.space.up_file.read_text().splitlines())
            self.space.up_file.unlink(missing_ok=True)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - time.monotonic())

    def _wrapped(self, command: tuple[str, ...], env: Mapping[str, str], base_url: str = "") -> tuple[str, ...]:
        words = fill(command, {**self._values, "base_url": base_url})
        container = self.task.container
        return (*(self._outer(prefix(container, env)) if container else ()), *words)

    def _outer(self, words: tuple[str, ...]) -> list[str]:
        """A container's own words, filled in."""
        return fill(words, self._values)

    async def _up(self) -> None:
        container = self.task.container
        if container is None or container.up is None or self.space.up_file.exists():
            return
        down = self._outer(container.down or ("true",))
        self.space.up_file.write_text("\n".join(down))  # before it is up: a launcher may die in between
        if code := await self._container(self._outer(container.up)):
            raise OSError(f"the container did not start (exit status {code}); see {self._log()}")

    async def _container(self, words: Sequence[str]) -> int:
        with self._log().open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *words, cwd=self.space.root, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        return await process.wait()

    def _log(self) -> Path:
        return self.space.root / "container.log"
