"""The supervisor: owns the run, its executions and the port; serves the API; leaves the calls to its workers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import uvicorn

from gyre_data.errors import ConfigError, EngineError, GyreError
from gyre_proxy.executions import Execution
from gyre_proxy.faults import CallError
from gyre_proxy.service import Proxy

from .known import Known
from .placed import Mover, execution_of, path_of, receive
from .process import WorkerProcess, prepare
from .worker import StartWith

__all__ = ["Supervisor", "prepare"]

_MOST_EXPECTED = 4096
_STOP_S = 30.0
_FIGURES_S = 5.0


class Supervisor(Proxy):
    """A proxy whose calls are served by other processes. An execution stays with one worker."""

    server: uvicorn.Server
    """Serves the API; set before `start`."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._placed: dict[str, WorkerProcess] = {}
        self._expected: dict[str, WorkerProcess] = {}  # names that nobody has made known yet, oldest first
        self._figures: dict[int, tuple[dict[str, tuple[int, int]], Any]] = {}
        self._workers = [self._worker(number) for number in range(1, self.settings.workers + 1)]

    def _worker(self, number: int) -> WorkerProcess:
        worker: WorkerProcess
        worker = WorkerProcess(
            number,
            {
                "learn": lambda execution_id: self._learned(worker, execution_id),
                "begin": lambda named: self._begun(worker, *named),
                "event": lambda event: self._happened(*event),
                "engine_version": self._saw_version,
            },
            self._connected,
            start_with=lambda: StartWith(
                settings=self.settings,
                number=number,
                engines=tuple((engine.url, engine.state == "draining") for engine in self.router.engines),
            ),
            before_calls=self._recount,
            on_death=lambda: self._forget_calls(worker),
        )
        return worker

    async def start(self) -> None:
        """Return when every worker takes calls."""
        await asyncio.gather(*(worker.start() for worker in self._workers))

    async def drain(self, seconds: float) -> None:
        """Have the workers finish and seal; the folder's owner closes after them."""
        self.draining = True
        await asyncio.gather(*(worker.stop(seconds + _STOP_S) for worker in self._workers))
        await super().drain(seconds)

    # --- where connections go -----------------------------------------------------------------------------------------

    def place(self, path: str) -> Mover | None:
        """Who takes a request; None for what is served here."""
        execution_id = execution_of(path)
        return None if execution_id is None else self._worker_of(execution_id).hand_over

    def _worker_of(self, execution_id: str) -> WorkerProcess:
        placed = self._placed.get(execution_id) or self._expected.get(execution_id)
        if placed is not None:
            return placed
        expected = Counter(worker.number for worker in self._expected.values())
        chosen = min(self._workers, key=lambda worker: worker.load + expected[worker.number])
        execution = self.executions.get(execution_id)
        if execution is not None and execution.state != "ended":
            self._settle(execution_id, chosen)
        elif execution is None:
            self._expected[execution_id] = chosen
            if len(self._expected) > _MOST_EXPECTED:
                del self._expected[next(iter(self._expected))]
        return chosen

    def _settle(self, execution_id: str, worker: WorkerProcess) -> None:
        self._expected.pop(execution_id, None)
        owner = self._placed.setdefault(execution_id, worker)
        if owner is not worker:
            raise CallError("overloaded", f"execution {execution_id} moved to another process just now; try again")
        worker.load = sum(other is worker for other in self._placed.values())

    async def _connected(self, descriptor: int, data: bytes) -> None:
        mover = self.place(path_of(data))
        if mover is not None:
            mover(descriptor, data)
            return
        with suppress(OSError):  # its client left meanwhile
            await receive(self.server, descriptor, data)

    async def learn(self, execution_id: str) -> None:
        """A call that is not the first on its way here: its connection could not be given away."""
        raise CallError("overloaded", "wanted one request at a time on a connection, got a second; try again")

    # --- what workers say ---------------------------------------------------------------------------------------------

    def _learned(self, worker: WorkerProcess, execution_id: str) -> Known | None:
        execution = self.executions.get(execution_id)
        if execution is None:
            return None
        if execution.state != "ended":
            self._settle(execution_id, worker)
        return Known.of(execution)

    async def _begun(self, worker: WorkerProcess, execution_id: str, harness: str | None) -> Known:
        execution = self.executions.get(execution_id)
        if execution is None:
            execution = Execution(execution_id=execution_id, harness=harness, dispatched_at=time.time())
        elif execution.state == "ended":
            return Known.of(execution)
        self._settle(execution_id, worker)
        await self.begin(execution)
        return Known.of(execution)

    def _happened(self, kind: str, fields: Mapping[str, Any]) -> None:
        execution = self.executions.get(fields.get("execution_id", ""))
        if execution is not None and kind == "call.started":
            execution.num_elsewhere += 1
        elif execution is not None and kind == "call":
            execution.num_elsewhere = max(0, execution.num_elsewhere - 1)
            execution.num_calls += 1
        self.events.add(kind, **fields)

    def _saw_version(self, seen: tuple[str, str]) -> None:
        with suppress(ConfigError):  # removed meanwhile
            self.router.set_version(*seen)

    def _forget_calls(self, worker: WorkerProcess) -> None:
        for execution_id, owner in self._placed.items():
            execution = self.executions.get(execution_id)
            if owner is worker and execution is not None:
                execution.num_elsewhere = 0

    async def _recount(self) -> None:
        """A worker that died may have recorded calls without saying so: a fresh one must read them back."""

        def counted() -> Counter[str]:
            self._run.refresh()
            return Counter(self._run.table("calls").column("execution_id").to_pylist())

        for execution_id, number in (await asyncio.to_thread(counted)).items():
            execution = self.executions.get(execution_id)
            if execution is not None:
                execution.num_calls = max(execution.num_calls, number)

    # --- what workers are told ----------------------------------------------------------------------------------------

    async def changed(self, execution: Execution) -> None:
        """Return when the execution's worker goes by the change."""
        await self._tell("changed", execution)

    async def finish(self, execution: Execution) -> None:
        """Return when nothing of it is sampled any more."""
        await self._tell("ended", execution)
        worker = self._placed.pop(execution.execution_id, None)
        if worker is not None:
            worker.load = sum(other is worker for other in self._placed.values())
        await super().finish(execution)

    async def _tell(self, kind: str, execution: Execution) -> None:
        worker = self._placed.get(execution.execution_id)
        if worker is not None:
            with suppress(EngineError):  # it died: the next one asks
                await worker.ask(kind, Known.of(execution))

    async def engine_changed(self, action: str, url: str, version: str | None) -> None:
        """Return when every worker goes by the change; raise what kept one from it."""
        change = (action, url, version)
        for answer in await asyncio.gather(*(w.ask("engine", change) for w in self._workers), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, ConfigError):
                raise answer

    # --- figures ------------------------------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Bring in the workers' figures; a worker that does not answer keeps its last ones."""

        async def of(worker: WorkerProcess) -> None:
            with suppress(GyreError, TimeoutError):
                figures = await asyncio.wait_for(worker.ask("figures"), _FIGURES_S)
                if figures is not None:
                    self._figures[worker.number] = figures

        await asyncio.gather(*(of(worker) for worker in self._workers))
        for engine in self.router.engines:
            loads = [engines.get(engine.url, (0, 0)) for engines, _ in self._figures.values()]
            engine.in_flight, engine.served = sum(load[0] for load in loads), sum(load[1] for load in loads)

    def status(self) -> dict[str, Any]:
        """With the workers."""
        workers = [
            {"number": w.number, "pid": w.pid, "executions": w.load, "restarts": w.num_restarts} for w in self._workers
        ]
        in_flight = sum(execution.num_elsewhere for execution in self.executions)
        return {**super().status(), "in_flight": in_flight, "workers": workers}

    def expose_metrics(self) -> bytes:
        """Every process's figures, told apart by the label `worker`; 0 is this one."""
        self.note_engines()
        others = {str(number): families for number, (_, families) in self._figures.items()}
        return self.metrics.expose({"0": self.metrics.families(), **others})
