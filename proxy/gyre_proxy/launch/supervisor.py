"""`gyre run`: claim queued executions, run a harness for each, judge the workspace, record what happened.

The proxy holds the queue; this process only runs harnesses. The same call resumes: executions that ended are kept,
those left over from a launcher that died are ended as `infra_fault` and replaced, those that ended without a verdict
are judged.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError

from .client import ProxyClient
from .evaluate import Verdict, evaluate
from .harness import environment, kill_leftover, run_harness
from .tasks import Task, fill, program_name
from .workspace import Workspace, capture

__all__ = ["RunResult", "Supervisor", "Watched"]

# These say nothing about the policy: they are never trained and another execution takes their place.
_REPLACED = ("infra_fault", "cancelled")
_MAX_REPLACEMENTS = 3


@dataclass(kw_only=True, slots=True)
class Watched:
    """What is shown of an execution while `gyre run` works."""

    id: str
    task: str
    state: str = "queued"
    num_calls: int = 0
    prompt_tokens: int | None = None
    doing: str = "-"
    error: str | None = None
    """Why the harness could not be started."""
    last_event: float = field(default_factory=time.monotonic)
    score: float | None = None
    unscored: str = ""
    """Why the evaluator gave no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run went: counts by end reason and by verdict status."""

    ended: Mapping[str, int]
    verdicts: Mapping[str, int]


class Supervisor:
    """Runs `attempts` executions of each task, at most `concurrency` at once.

    `states_every` captures the workspace each time an execution has made that many more calls (0 = only at the ends).
    """

    def __init__(
        self,
        client: ProxyClient,
        run: Path,
        tasks: Sequence[Task],
        *,
        harness: tuple[str, ...] | None = None,
        attempts: int = 1,
        concurrency: int = 4,
        states_every: int = 0,
        on_change: Callable[[Mapping[str, Watched]], None] = lambda _: None,
    ) -> None:
        # Absolute: harnesses and evaluators are told paths below it and work in folders of their own.
        self.client, self.run_folder, self.harness = client, run.resolve(), harness
        self.tasks = {task.id: task for task in tasks}
        self.attempts, self.concurrency, self.states_every = attempts, concurrency, states_every
        self.watched: dict[str, Watched] = {}
        self.on_change = on_change
        self._ended: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        for task in tasks:
            if harness is None and task.command is None:
                raise ConfigError(f"task {task.id} has no command; give one in the file or with -a")

    async def run(self) -> RunResult:
        """Run everything that is still to be run. A cancellation stops the harnesses and records them as cancelled."""
        with _only_one(self.run_folder):
            await self._take_over()
            watcher = asyncio.create_task(self._watch())
            try:
                await self._work()
            finally:
                watcher.cancel()
        return RunResult(ended=dict(self._ended), verdicts=dict(self._verdicts))

    async def _take_over(self) -> None:
        """Put the queue in order: end what a dead launcher left, judge what was not judged, queue what is missing."""
        for task in self.tasks.values():
            group = await self.client.create_group(task.id, self.attempts, f"g-{task.id}")
            for known in await self.client.executions(group):
                if known["state"] == "claimed":
                    kill_leftover(self._space(known["id"]))
                    await self.client.end(known["id"], "infra_fault")
                elif known["state"] == "ended" and known["end_reason"] not in _REPLACED and not known["scored"]:
                    await self._judge(known, task, known["end_reason"])
            await self._fill_group(task, group)

    async def _fill_group(self, task: Task, group: str) -> None:
        known = await self.client.executions(group)
        good = sum(e["state"] != "ended" or e["end_reason"] not in _REPLACED for e in known)
        following = max((e["sample_index"] for e in known), default=-1) + 1
        command = self.harness or task.command or ()
        for index in range(following, following + self.attempts - good):
            await self.client.create_execution(
                task=task.id,
                group=group,
                sample_index=index,
                harness=program_name(command),
                launcher={"command": list(command), "timeout_s": task.timeout_s, "evaluator": task.evaluator},
            )

    async def _work(self) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                free = self.concurrency - len(running)
                claimed = await self.client.claim(free, list(self.tasks)) if free > 0 else []
                running |= {asyncio.create_task(self._execute(one)) for one in claimed}
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _execute(self, claimed: Mapping[str, Any]) -> None:
        task = self.tasks.get(claimed["task"])
        if task is None:
            raise ConfigError(f"the proxy gave out {claimed['id']} of task {claimed['task']}, which nobody asked for")
        # By a clock that nobody sets: the claim, which began the execution, has only just come.
        deadline = time.monotonic() + task.overall_timeout_s
        watched = self.watched[claimed["id"]] = Watched(id=claimed["id"], task=task.id, state="running")
        reason = "infra_fault"
        try:
            reason = await self._harness(claimed, task, deadline)
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except (OSError, ValueError) as error:
            watched.error = f"could not start: {error}"
        finally:
            watched.state = "ending"
            await asyncio.shield(self.client.end(claimed["id"], reason))
            self._ended[reason] += 1
        if reason not in _REPLACED:
            await self._judge(claimed, task, reason)
        elif self._ended[reason] <= _MAX_REPLACEMENTS:
            await self._fill_group(task, claimed["group"])
        watched.state = "done"
        self.on_change(self.watched)

    async def _harness(self, claimed: Mapping[str, Any], task: Task, deadline: float) -> str:
        space = self._space(claimed["id"])
        await asyncio.to_thread(Workspace.create, space.root, task.workspace)
        await self._capture(claimed["id"], space)
        base_url = claimed["base_url"]
        values = {"base_url": base_url, "prompt": task.prompt, "workspace": str(space.work)}
        values |= {"sample_index": str(claimed["sample_index"]), "tasks": str(task.folder)}
        command = fill(self.harness or task.command or (), values)
        env = environment(base_url, claimed["key"], space.home, self._told(claimed))
        left = deadline - time.monotonic()
        outcome = await run_harness(command, space, env, max(0.0, min(task.timeout_s, left)))
        await self._capture(claimed["id"], space)
        if outcome == "timeout":
            return "harness_timeout" if task.timeout_s <= left else "overall_timeout"
        return outcome

    async def _judge(self, claimed: Mapping[str, Any], task: Task, reason: str) -> None:
        if task.evaluator is None:
            return
        space = self._space(claimed["id"])
        if claimed["id"] in self.watched:
            self.watched[claimed["id"]].state = "evaluating"
        state_id = await self._capture(claimed["id"], space)
        values = {"prompt": task.prompt, "workspace": str(space.work), "tasks": str(task.folder)}
        values["sample_index"] = str(claimed["sample_index"])
        env = environment("", "", None, self._told(claimed))
        verdict: Verdict = await evaluate(
            fill(task.evaluator, values),
            space.work,
            reason,
            space.root / "score.json",
            timeout_s=task.evaluator_timeout_s,
            env=env,
        )
        name = program_name(task.evaluator)
        fields = {
            "status": verdict.status,
            "value": verdict.value,
            "partial": verdict.partial,
            "detail": verdict.detail,
        }
        config = hashlib.sha256(json.dumps(list(task.evaluator)).encode()).hexdigest()[:32]
        await self.client.score(claimed["id"], evaluator=name, config_digest=config, state_id=state_id, **fields)
        self._verdicts[verdict.status] += 1
        if claimed["id"] in self.watched:
            self.watched[claimed["id"]].score = verdict.value
            self.watched[claimed["id"]].unscored = str(verdict.detail) if verdict.status == "failed" else ""

    async def _capture(self, execution: str, space: Workspace) -> str:
        state = await asyncio.to_thread(capture, space.work)
        return await self.client.environment(execution, state.kind, state.digest, str(space.work))

    async def _watch(self) -> None:
        """Follow the proxy's events: what is shown, and states captured every n calls."""
        _, position = await self.client.events(2**62)
        while True:
            events, position = await self.client.events(position)
            for event in events:
                seen = self.watched.get(event.get("execution_id", ""))
                if seen is None or event["type"] != "call":
                    continue
                seen.num_calls += 1
                seen.prompt_tokens = event.get("prompt_tokens")
                seen.doing = event.get("agent_id") or event.get("agent_role") or "-"
                seen.last_event = time.monotonic()
                if self.states_every and seen.num_calls % self.states_every == 0:
                    with suppress(ConfigError):  # it is one state less; the executions go on
                        await self._capture(seen.id, self._space(seen.id))
            self.on_change(self.watched)
            await asyncio.sleep(0.25)

    def _space(self, execution: str) -> Workspace:
        return Workspace(root=self.run_folder / "workspaces" / execution)

    def _told(self, claimed: Mapping[str, Any]) -> dict[str, str]:
        return {
            "GYRE_EXECUTION": str(claimed["id"]),
            "GYRE_TASK": str(claimed["task"]),
            "GYRE_SAMPLE_INDEX": str(claimed["sample_index"]),
        }


@contextmanager
def _only_one(run: Path) -> Iterator[None]:
    """Hold the run's launcher lock: two launchers would take each other's executions for left-overs."""
    with (run / "launch.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another `gyre run` works on {run}; wait for it or stop it") from None
        yield
