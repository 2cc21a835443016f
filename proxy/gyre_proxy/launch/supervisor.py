"""`gyre run`: claim queued executions, run a harness for each, judge the workspace, record what happened.

The proxy holds the queue; this process only runs harnesses. The same call resumes: executions that ended are kept,
those left over from a launcher that died are ended as `infra_fault` and replaced, those that ended without a verdict
are judged.
"""

from __future__ import annotations

import asyncio
import fcntl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError

from .attempt import Attempt
from .client import ProxyClient
from .groups import LOST, Groups
from .harness import kill_leftover
from .tasks import Task, program_name
from .worker import WorkerPool
from .workspace import Workspace

__all__ = ["RunResult", "Supervisor", "Watched"]

_CLAIM_S = 0.5
"""How often the queue is looked at while nothing happens here."""
_UNKNOWN_S = 30.0
"""How often a launcher that serves looks for executions that are claimed and run by nobody."""
_REMEMBERED = 200
"""Executions that are done and still shown by a launcher that serves."""


@dataclass(kw_only=True, slots=True)
class Watched:
    """What is shown of an execution while `gyre run` works."""

    id: str
    task: str
    state: str = "queued"
    num_calls: int = 0
    in_flight: int = 0
    """Calls that wait for an engine."""
    prompt_tokens: int | None = None
    doing: str = "-"
    error: str | None = None
    """Why the harness could not be started."""
    last_event: float = field(default_factory=time.monotonic)
    end_reason: str | None = None
    score: float | None = None
    unscored: str = ""
    """Why the evaluator gave no score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How a run went: counts by end reason and by verdict status, and groups that were made smaller."""

    ended: Mapping[str, int]
    verdicts: Mapping[str, int]
    shrunk: tuple[str, ...] = ()


class Supervisor:
    """Runs `attempts` executions of each task, at most `concurrency` harnesses and `judges` evaluators at once.

    With `serve` it creates none itself: it runs what others queue for its tasks until it is cancelled. `states_every`
    captures the workspace each time an execution has made that many more calls (0 = only at the ends). A member that
    fell out of its group is replaced, `replacements` times a group; then the group is made smaller. `worker` says that
    `harness` is a long-lived one (worker.py).
    """

    def __init__(
        self,
        client: ProxyClient,
        run: Path,
        tasks: Sequence[Task],
        *,
        harness: tuple[str, ...] | None = None,
        worker: bool = False,
        attempts: int = 1,
        concurrency: int = 4,
        judges: int | None = None,
        states_every: int = 0,
        replacements: int = 3,
        serve: bool = False,
        on_change: Callable[[Mapping[str, Watched]], None] = lambda _: None,
    ) -> None:
        # Absolute: harnesses and evaluators are told paths below it and work in folders of their own.
        self.client, self.run_folder, self.harness, self.worker = client, run.resolve(), harness, worker
        self.tasks = {task.id: task for task in tasks}
        self.attempts, self.concurrency, self.states_every, self.serve = attempts, concurrency, states_every, serve
        self.watched: dict[str, Watched] = {}
        self.on_change = on_change
        self.groups = Groups(client, self._described, replacements)
        self._sizes: dict[str, int] = {}
        self._judges = asyncio.Semaphore(judges or concurrency)
        self._pool = WorkerPool(self.run_folder / "workers")
        self._attempts: dict[str, Attempt] = {}
        self._active = 0
        self._looked_at = time.monotonic()
        self._freed = asyncio.Event()
        self._ended: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        self._shrunk: list[str] = []
        for task in tasks:
            if harness is None and task.command is None and task.worker is None:
                raise ConfigError(f"task {task.id} has no command; give one in the file or with -a")
            if task.container is not None and self._command(task)[1]:
                raise ConfigError(
                    f"task {task.id}: a worker runs many executions and a container belongs to one; use a command"
                )

    async def run(self) -> RunResult:
        """Run everything that is still to be run. A cancellation stops the harnesses and records them as cancelled."""
        with _only_one(self.run_folder):
            late = await self._take_over()
            watcher = asyncio.create_task(self._watch())
            try:
                await self._work(late)
            finally:
                watcher.cancel()
                await self._pool.close()
        return self.result()

    def result(self) -> RunResult:
        """What was done so far."""
        return RunResult(ended=dict(self._ended), verdicts=dict(self._verdicts), shrunk=tuple(self._shrunk))

    def _command(self, task: Task) -> tuple[tuple[str, ...], bool]:
        """What runs the harness, and whether it is a worker."""
        if self.harness is not None:
            return self.harness, self.worker
        return task.command or task.worker or (), task.command is None

    def _described(self, name: str) -> dict[str, Any]:
        task = self.tasks[name]
        command, _ = self._command(task)
        launcher = {"command": list(command), "timeout_s": task.timeout_s, "evaluator": task.evaluator}
        return {"harness": program_name(command), "launcher": launcher}

    # --- what is there when it starts ---------------------------------------------------------------------------------

    async def _take_over(self) -> list[Coroutine[Any, Any, None]]:
        """Put the queue in order: end what a dead launcher left, queue what is missing; return what is to be judged."""
        late: list[Coroutine[Any, Any, None]] = []
        for group, task in (await self._own_groups()).items():
            for known in await self.client.executions(group):
                if known["state"] == "claimed":
                    kill_leftover(self._space(known["id"]))
                    await self.client.end(known["id"], "infra_fault")
                elif known["state"] == "ended" and known["end_reason"] not in LOST and not known["scored"]:
                    late += [self._judge_late(known, task)] if task.evaluator is not None else []
            await self.groups.fill(group, task.id, self._sizes[group])
        return late

    async def _own_groups(self) -> dict[str, Task]:
        """Groups that this launcher keeps whole; their sizes are known from then on."""
        if not self.serve:
            found = {f"g-{task.id}": task for task in self.tasks.values()}
            for group, task in found.items():
                self._sizes[group] = self.attempts
                await self.client.create_group(task.id, self.attempts, group)
            return found
        found = {}
        for known in await self.client.groups():
            if known["task"] in self.tasks and known["size"] is not None:
                self._sizes[known["id"]] = known["size"]
                found[known["id"]] = self.tasks[known["task"]]
        return found

    # --- running ------------------------------------------------------------------------------------------------------

    async def _work(self, late: Sequence[Coroutine[Any, Any, None]]) -> None:
        running = {asyncio.create_task(one) for one in late}
        try:
            while True:
                self._freed.clear()
                free = self.concurrency - self._active
                claimed = await self.client.claim(free, list(self.tasks)) if free > 0 else []
                self._active += len(claimed)
                running |= {asyncio.create_task(self._execute(one)) for one in claimed}
                if self.serve and time.monotonic() > self._looked_at + _UNKNOWN_S:
                    await self._own_groups()
                    await self._lose_unknown()
                if not running and not self.serve and not await self._lose_unknown():
                    return
                woken = asyncio.create_task(self._freed.wait())
                limit = _CLAIM_S if self.serve or not running else None
                done, _ = await asyncio.wait({*running, woken}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                woken.cancel()
                for task in done & running:
                    task.result()
                running -= done
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _lose_unknown(self) -> bool:
        """End executions whose claim was never answered, because the proxy died; return whether there were any."""
        found, self._looked_at = False, time.monotonic()
        for group, size in list(self._sizes.items()):
            for known in await self.client.executions(group):
                if known["state"] == "claimed" and known["id"] not in (self.watched.keys() | self._attempts.keys()):
                    await self.client.end(known["id"], "infra_fault")
                    await self.groups.replace(group, known["task"], size)
                    found = True
        return found

    async def _execute(self, claimed: Mapping[str, Any]) -> None:
        task = self.tasks.get(claimed["task"])
        if task is None:
            raise ConfigError(f"the proxy gave out {claimed['id']} of task {claimed['task']}, which nobody asked for")
        # By a clock that nobody sets: the claim, which began the execution, has only just come.
        deadline = time.monotonic() + task.overall_timeout_s
        watched = self.watched[claimed["id"]] = Watched(id=claimed["id"], task=task.id, state="running")
        attempt = self._attempts[claimed["id"]] = Attempt(self.client, self._space(claimed["id"]), claimed, task)
        reason = "infra_fault"
        try:
            command, is_worker = self._command(task)
            reason = await attempt.run(command, self._pool, deadline, is_worker=is_worker)
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        except (OSError, ValueError) as error:
            watched.error = f"could not start: {error}"
        finally:
            watched.state, watched.end_reason = "ending", reason
            told = await asyncio.shield(self.client.end(claimed["id"], reason))
            watched.num_calls = told["calls"]  # the events of its last ones may come later
            self._ended[reason] += 1
            self._active -= 1
            self._freed.set()
            if reason in LOST:
                await asyncio.shield(attempt.close())
        if reason in LOST:
            await self._replace(claimed)
        else:
            await self._judge(attempt, reason)
        self._attempts.pop(claimed["id"], None)
        self._done(watched)

    def _done(self, watched: Watched) -> None:
        watched.state = "done"
        self.on_change(self.watched)
        if self.serve:  # for days, maybe: what is done is forgotten in time
            for old in [one.id for one in self.watched.values() if one.state == "done"][:-_REMEMBERED]:
                del self.watched[old]

    async def _replace(self, claimed: Mapping[str, Any]) -> None:
        group = claimed["group"]
        if group is None:
            return
        if group not in self._sizes:
            await self._own_groups()
        size = self._sizes.get(group)
        if size is not None and not await self.groups.replace(group, claimed["task"], size):
            self._shrunk.append(group)

    async def _judge_late(self, known: Mapping[str, Any], task: Task) -> None:
        watched = self.watched[known["id"]] = Watched(id=known["id"], task=task.id, num_calls=known["calls"])
        watched.end_reason = known["end_reason"]
        await self._judge(Attempt(self.client, self._space(known["id"]), known, task), known["end_reason"])
        self._done(watched)

    async def _judge(self, attempt: Attempt, reason: str) -> None:
        watched = self.watched[attempt.id]
        watched.state, watched.last_event = "to judge", time.monotonic()
        try:
            async with self._judges:
                watched.state, watched.last_event = "evaluating", time.monotonic()
                verdict = await attempt.judge(reason)
        finally:
            await asyncio.shield(attempt.close())
        if verdict is not None:
            self._verdicts[verdict.status] += 1
            watched.score = verdict.value
            watched.unscored = str(verdict.detail) if verdict.status == "failed" else ""

    async def _watch(self) -> None:
        """Follow the proxy's events: what is shown, and states captured every n calls."""
        _, position = await self.client.events(2**62)
        while True:
            events, position = await self.client.events(position)
            for event in events:
                seen = self.watched.get(event.get("execution_id", ""))
                if seen is None or event["type"] not in ("call", "call.started"):
                    continue
                seen.last_event = time.monotonic()
                if event["type"] == "call.started":
                    seen.in_flight += 1
                    continue
                seen.in_flight = max(0, seen.in_flight - 1)
                seen.prompt_tokens = event.get("prompt_tokens")
                seen.doing = event.get("agent_id") or event.get("agent_role") or "-"
                if seen.state != "running":  # counted with its end
                    continue
                seen.num_calls += 1
                if self.states_every and seen.num_calls % self.states_every == 0 and seen.id in self._attempts:
                    with suppress(ConfigError):  # it is one state less; the executions go on
                        await self._attempts[seen.id].capture()
            self.on_change(self.watched)
            await asyncio.sleep(0.25)

    def _space(self, execution: str) -> Workspace:
        return Workspace(root=self.run_folder / "workspaces" / execution)


@contextmanager
def _only_one(run: Path) -> Iterator[None]:
    """Hold the run's launcher lock: two launchers would take each other's executions for left-overs."""
    with (run / "launch.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another `gyre run` works on {run}; wait for it or stop it") from None
        yield
