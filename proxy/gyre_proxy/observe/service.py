"""The observing proxy without HTTP: which executions there are, and what becomes of the calls that go by.

A call is recorded once its reply is whole, before the last of it is passed on. Recording never stands in the way of a
reply: what cannot be read is recorded as it came, and what cannot be written is kept and tried again. While anything
is owed to the disk, new calls are refused, so that nothing goes by unrecorded for long.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from gyre_data.errors import CaptureError, ConfigError
from gyre_data.schema import DeliveryState
from gyre_data.store import Run, RunWriter
from gyre_data.store import open as open_run
from gyre_data.types import Call, Delivery
from gyre_proxy.address import Address
from gyre_proxy.events import EventLog
from gyre_proxy.executions import Execution, Executions
from gyre_proxy.faults import CallError
from gyre_proxy.message import canonical
from gyre_proxy.metrics import Metrics
from gyre_proxy.observe.counting import TokenCounter, count_message, load_counter
from gyre_proxy.observe.exchange import Exchange
from gyre_proxy.observe.history import ObservedHistory
from gyre_proxy.observe.rows import Reading, call_of, read
from gyre_proxy.observe.settings import ObserveSettings
from gyre_proxy.observe.upstream import Connections
from gyre_proxy.recorder import Recorder, Scope
from gyre_proxy.restore import load_executions, restore_history, same_recording
from gyre_proxy.roles import label
from gyre_proxy.router import Router
from gyre_proxy.single import SingleProcess

__all__ = ["Observer", "observing"]

log = logging.getLogger(__name__)


@asynccontextmanager
async def observing(settings: ObserveSettings, writer: RunWriter | None = None) -> AsyncIterator[Observer]:
    """An observing proxy with its run open, sealed at the end. It does not listen yet."""
    writer = writer or RunWriter(settings.run)
    metrics = Metrics()
    recorder = Recorder(writer, metrics.commit_s.observe)
    started = False
    try:
        counter, run = load_counter(settings.tokenizer), open_run(settings.run)
        same_recording(run, settings.mode, counter.name)
        observer = Observer(settings=settings, counter=counter, recorder=recorder, run=run, metrics=metrics)
        started = True
        try:
            yield observer
        finally:
            await observer.drain(settings.drain_s)
            await observer.connections.aclose()
    finally:
        await asyncio.to_thread(recorder.close)
        if not started:
            writer.discard()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Owed:
    """A call that could not be written yet."""

    rows: Sequence[Any]
    blobs: Sequence[bytes]


class Observer(SingleProcess):
    """State of an observing proxy. Create it on the event loop; `run` is a reader of the folder `recorder` writes."""

    version = None
    """There are no weights of ours."""

    def __init__(
        self, *, settings: ObserveSettings, counter: TokenCounter, recorder: Recorder, run: Run, metrics: Metrics
    ) -> None:
        self.settings, self.counter, self.recorder, self.metrics = settings, counter, recorder, metrics
        self.events, self.executions = EventLog(), Executions()
        self.router, self.connections = Router(_no_engine), Connections()
        self.started_at = time.time()
        self.in_flight: set[Exchange] = set()
        self._run = run
        self._owed: list[_Owed] = []
        self._paying, self._reading = asyncio.Lock(), asyncio.Lock()
        load_executions(self.executions, run)

    # --- who may ------------------------------------------------------------------------------------------------------

    def authorize(self, execution: Execution | None, headers: Mapping[str, str]) -> None:
        """Raise CallError unless the request may use the API: always on an unkeyed (loopback) proxy."""
        key, bearer = self.settings.key, headers.get("authorization", "")
        given = headers.get("x-api-key") or bearer.partition(" ")[2].strip()
        if key is not None and not hmac.compare_digest(given.encode(), key.encode()):
            raise CallError("authentication", "wanted this proxy's key as Authorization: Bearer; give --key KEY")

    # --- executions ---------------------------------------------------------------------------------------------------

    async def execution(self, address: Address, headers: Mapping[str, str]) -> Execution:
        """The execution that a request is addressed to; on an unkeyed proxy an unknown one is created, durably."""
        execution = self.executions.get(address.execution)
        if execution is None:
            if self.settings.key is not None:
                raise CallError(
                    "authentication",
                    f"wanted an execution of this run, got {address.execution!r}: a proxy with a key passes only what "
                    "POST /api/executions created, because clients send the provider's key and not this one's",
                )
            harness = headers.get("user-agent", "").split("/")[0].split(" ")[0]
            execution = Execution(
                execution_id=address.execution, harness=harness or None, dispatched_at=time.time(), state="running"
            )
            self.executions.add(execution)
            await self.record_start(execution)
        if execution.state == "queued":
            execution.state, execution.dispatched_at = "running", time.time()
        return execution

    async def record_start(self, execution: Execution, dispatched: bool = True) -> None:
        """Make an execution's start durable; forget it again when that fails."""
        try:
            await self.recorder.commit([execution.started(None)])
        except CaptureError:
            self.executions.discard(execution)
            raise
        self.events.add("execution.started" if dispatched else "execution.queued", execution_id=execution.execution_id)

    async def finish(self, execution: Execution) -> None:
        """An execution ended: forget what only its next call would need."""
        execution.history = None

    # --- calls --------------------------------------------------------------------------------------------------------

    def begin(self, exchange: Exchange) -> None:
        """A call is under way."""
        self.in_flight.add(exchange)
        self.metrics.in_flight.inc()
        self.events.add("call.started", execution_id=exchange.execution_id, call_id=exchange.call_id)

    async def ready(self) -> None:
        """Raise CallError while something that went by could not be written, after trying once more."""
        if self._owed and not await self._pay():
            raise CallError(
                "overloaded",
                f"{self.settings.run} cannot be written, so this call was not sent: it would go by unrecorded; "
                f"free the disk and try again ({len(self._owed)} calls wait to be written)",
            )

    async def record(self, exchange: Exchange) -> None:
        """Make an exchange durable. Never raises: a reply must not fail because of its record."""
        exchange.ended_at = datetime.now(UTC)
        execution = self.executions.get(exchange.execution_id)
        if execution is None:
            return
        call: Call | None = None
        async with execution.lock:
            try:
                call = await self._recorded(execution, exchange)
                execution.num_calls += 1
            except Exception:
                log.exception("call %s of %s was passed on but not recorded", exchange.call_id, exchange.execution_id)
        self._told(exchange, call)

    async def _recorded(self, execution: Execution, exchange: Exchange) -> Call:
        reading = await asyncio.to_thread(read, exchange, self.settings.bounds.body_bytes)
        try:
            history = await self._history(execution)
            call, owed = await asyncio.to_thread(self._rows, history, exchange, reading)
            await self._write(owed)
        except Exception as error:
            log.exception("call %s of %s has no place in its tree", exchange.call_id, exchange.execution_id)
            execution.history = None  # it may be ahead of the disk
            reading.notes.append(f"it has no place in the tree: {error!s:.300}")
            call, owed = self._bare(exchange, reading)
            await self._write(owed)
        return call

    def ended(self, exchange: Exchange, delivered: bool) -> None:
        """The connection of a request is done with."""
        if exchange.wire is None:
            self.events.add("passed", execution_id=exchange.execution_id, http_status=exchange.status)
            return
        self.in_flight.discard(exchange)
        state = DeliveryState.DELIVERED if delivered else DeliveryState.ABANDONED
        row = Delivery(call_id=exchange.call_id, execution_id=exchange.execution_id, state=state, at=datetime.now(UTC))
        if not self._owed:
            self.recorder.later([row])

    async def _history(self, execution: Execution) -> ObservedHistory:
        if isinstance(execution.history, ObservedHistory):
            return execution.history
        history = ObservedHistory(self.counter, execution_id=execution.execution_id)
        if execution.num_calls:
            async with self._reading:
                await asyncio.to_thread(restore_history, history, self._run, execution.execution_id)
        execution.history = history
        return history

    def _rows(self, history: ObservedHistory, exchange: Exchange, reading: Reading) -> tuple[Call, _Owed]:
        request = reading.request
        if request is None or not request.messages:
            return self._bare(exchange, reading)
        blobs = _blobs(reading)
        plan = history.plan(request, label(request.wire, exchange.headers, request, exchange.agent))
        history.reserve(plan)
        output_id, output = f"n_{secrets.token_hex(10)}", reading.output
        written = history.record(plan, call_id=exchange.call_id, output_node_id=output_id, said=output)
        num_tokens = count_message(self.counter, output) if output is not None else 0
        call = call_of(exchange, reading, plan, output_id if output is not None else None, num_tokens)
        return call, _Owed(rows=[*written.nodes, call], blobs=[*blobs, *written.blobs.values()])

    def _bare(self, exchange: Exchange, reading: Reading) -> tuple[Call, _Owed]:
        """A call outside the tree, with all that came."""
        if reading.raw_reply is None and exchange.reply.kept:
            reading.raw_reply = exchange.secrets.removed(bytes(exchange.reply.kept))
        call = call_of(exchange, reading, None, None, 0)
        return call, _Owed(rows=[call], blobs=_blobs(reading))

    # --- what the disk is owed ----------------------------------------------------------------------------------------

    async def _write(self, owed: _Owed) -> None:
        if self._owed:
            self._owed.append(owed)
            await self._pay()
            return
        try:
            await self.recorder.commit(owed.rows, owed.blobs, Scope())
        except CaptureError as error:
            if not isinstance(error.__cause__, CaptureError | OSError):
                raise  # a row that can never be written must not be owed for ever
            self._owe(owed, error)

    def _owe(self, owed: _Owed, error: CaptureError) -> None:
        self._owed.append(owed)
        log.error("a reply went by that could not be recorded; new calls are refused until it is: %s", error.__cause__)

    async def _pay(self) -> bool:
        """Write what is owed, oldest first; whether all of it is durable now."""
        async with self._paying:
            while self._owed:
                try:
                    await self.recorder.commit(self._owed[0].rows, self._owed[0].blobs, Scope())
                except CaptureError:
                    return False
                del self._owed[0]
            return True

    # --- what is told -------------------------------------------------------------------------------------------------

    def _told(self, exchange: Exchange, call: Call | None) -> None:
        status = str(call.status) if call else "unrecorded"
        role = str(call.agent_role) if call else "unknown"
        extension = str(call.extension) if call else "root"
        self.metrics.in_flight.dec()
        self.metrics.calls.labels(exchange.wire or "", role, extension, status).inc()
        self.events.add(
            "call",
            execution_id=exchange.execution_id,
            call_id=exchange.call_id,
            agent_role=role,
            agent_id=call.agent_id if call else None,
            status=status,
            prompt_tokens=(call.prompt_tokens if call else None) or 0,
            output_tokens=(call.output_tokens if call else None) or 0,
            error=call.error if call else None,
            http_status=exchange.status,
        )

    def status(self) -> dict[str, Any]:
        """As `GET /api/status` shows it."""
        return {
            "run": str(self.settings.run.resolve()),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "in_flight": len(self.in_flight),
            "unwritten": len(self._owed),
            "executions": dict(Counter(execution.state for execution in self.executions)),
            **self.info(),
        }

    def info(self) -> dict[str, Any]:
        """What `run.json` says about it."""
        chosen = self.settings.upstreams
        return {
            "mode": self.settings.mode,
            "fingerprint": self.counter.name,
            "upstreams": {name: getattr(chosen, name) for name in chosen.__slots__},
        }

    def expose_metrics(self) -> bytes:
        """Prometheus text."""
        return self.metrics.expose()

    async def add_engine(self, url: str) -> NoReturn:
        """There are none here."""
        raise ConfigError("this proxy observes hosted APIs and has no engines; start one without --observe")

    async def drain(self, seconds: float) -> None:
        """Give calls in flight `seconds` to end, and the disk a last try."""
        deadline = time.monotonic() + seconds
        while self.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._owed and not await self._pay():
            log.error("%d calls went by and could not be written: they are lost", len(self._owed))


def _blobs(reading: Reading) -> list[bytes]:
    """What a call's row names."""
    tools = reading.request.tools if reading.request is not None else ()
    extra = [*([reading.raw_reply] if reading.raw_reply else []), *([canonical(list(tools))] if tools else [])]
    return [*reading.request_pieces, *extra]


def _no_engine(url: str) -> NoReturn:
    raise ConfigError(f"this proxy observes hosted APIs and takes no engine, got {url}; start one without --observe")
