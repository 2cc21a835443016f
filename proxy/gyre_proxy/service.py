"""The proxy itself, without HTTP: accepts calls, starts generations, keeps executions and their histories.

Everything here runs on the event loop; rendering and tokenising are handed to threads under the execution's lock.
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
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from gyre_data.errors import CaptureError, ConfigError
from gyre_data.store import Run
from gyre_data.types import PolicyVersion

from .address import Address
from .capture import CallFacts
from .dialects import WIRES, load
from .dialects.base import Dialect
from .events import EventLog
from .executions import Execution, Executions
from .experts import KnownExperts
from .faults import CallError
from .generation import Generation
from .history import History
from .late_system import system_form
from .locality import Locality
from .message import Request
from .metrics import Metrics
from .parse import Detokenizer, ReplyParser, hidden_ids
from .plan import PromptPlan
from .recorder import Recorder, Scope
from .reply_format import choose_family
from .reply_text import ReplyText
from .restore import load_executions, restore_history
from .retries import Verdict, judge
from .roles import label
from .router import Engine, Router
from .sampler import Sampler
from .settings import ProxySettings
from .single import SingleProcess
from .template import Template
from .tokenizer_check import check_tokenizer

__all__ = ["Proxy"]

log = logging.getLogger(__name__)

_MAX_HISTORIES = 512
"""Histories in memory; each takes some 25 bytes a token."""


class Proxy(SingleProcess):
    """State of a running proxy. Create it on the event loop; `run` is a reader of the folder that `recorder` writes."""

    def __init__(
        self,
        *,
        settings: ProxySettings,
        template: Template,
        router: Router,
        recorder: Recorder,
        run: Run,
        events: EventLog,
        metrics: Metrics,
    ) -> None:
        self.settings, self.template, self.router, self.recorder = settings, template, router, recorder
        self.events, self.metrics, self.dialects = events, metrics, {wire: load(wire) for wire in WIRES}
        self.executions = Executions()
        self._arriving: WeakValueDictionary[str, Execution] = WeakValueDictionary()
        self.started_at = time.time()
        self.draining = False
        self._run = run
        self.locality = Locality(template)
        self.parser = choose_family(settings.parser, template)
        self.late_system = system_form(template)
        self._hidden = hidden_ids(template.control_tokens, self.parser)
        self._going: set[Generation] = set()
        self._reading = asyncio.Lock()
        self.load()

    def load(self) -> None:
        """Read back what the run knows of executions."""
        load_executions(self.executions, self._run)

    # --- who may ------------------------------------------------------------------------------------------------------

    def is_master(self, headers: Mapping[str, str]) -> bool:
        """Whether the request may use the API: always on an unkeyed (loopback) proxy."""
        key = self.settings.key
        return key is None or hmac.compare_digest(_presented(headers).encode(), key.encode())

    def authorize(self, execution: Execution | None, headers: Mapping[str, str]) -> None:
        """Raise CallError unless the request carries the proxy's key or the execution's own."""
        if self.is_master(headers) or (execution is not None and execution.accepts(_presented(headers))):
            return
        raise CallError(
            "authentication",
            "wanted this proxy's key or the execution's own, as x-api-key or Authorization: Bearer, got "
            f"{'another' if _presented(headers) else 'none'}; set the client's API key to it",
        )

    # --- executions ---------------------------------------------------------------------------------------------------

    def _addressed(self, execution_id: str, headers: Mapping[str, str]) -> Execution:
        """The execution that a call is addressed to. One that is not known yet becomes one with its first good call."""
        execution = self.executions.get(execution_id)
        self.authorize(execution, headers)
        if execution is None:
            fresh = Execution(execution_id=execution_id, harness=_client_name(headers), dispatched_at=time.time())
            return self._arriving.setdefault(execution_id, fresh)
        _refuse_ended(execution)
        return execution

    @asynccontextmanager
    async def _turn(self, execution_id: str, headers: Mapping[str, str]) -> AsyncIterator[Execution]:
        """The execution under its lock, also when the API creates it while a first call waits."""
        while True:
            execution = self._addressed(execution_id, headers)
            async with execution.lock:
                if self._addressed(execution_id, headers) is execution:
                    yield execution
                    return

    async def begin(self, execution: Execution) -> None:
        """A call of it was found good: make it known, durably, as an unlabelled recording if nobody created it."""
        if self.executions.get(execution.execution_id) is None:
            self.executions.add(execution)
            await self.record_start(execution)
        elif execution.state == "queued":
            execution.state, execution.dispatched_at = "running", time.time()
        _refuse_ended(execution)  # it may have ended meanwhile; from here on `finish` sees the call

    async def record_start(self, execution: Execution, dispatched: bool = True) -> None:
        """Make an execution's start durable; forget it again when that fails."""
        try:
            await self.recorder.commit([execution.started(self.version if dispatched else None)])
        except CaptureError:
            self.executions.discard(execution)
            raise
        kind = "execution.started" if dispatched else "execution.queued"
        self.events.add(
            kind, execution_id=execution.execution_id, group_id=execution.group_id, task_id=execution.task_id
        )

    @property
    def version(self) -> PolicyVersion | None:
        """The newest weights that any engine serves."""
        versions = [engine.version for engine in self.router.engines]
        return max(versions, key=lambda version: version.n, default=None)

    async def history(self, execution: Execution) -> History:
        """The execution's history, read back from the run when it is not in memory. Call it under its lock."""
        if execution.history is None:
            history = History(
                self.template,
                execution_id=execution.execution_id,
                thinking=self.settings.thinking,
                late_system=self.late_system,
                locality=self.locality,
            )
            experts = KnownExperts()
            if execution.num_calls:
                async with self._reading:
                    experts = await asyncio.to_thread(restore_history, history, self._run, execution.execution_id)
            self._let_go()
            execution.history, execution.scope, execution.experts = history, Scope(), experts
        execution.used_at = time.monotonic()
        return execution.history

    def _let_go(self) -> None:
        """Keep only so many histories in memory: what a run holds can be read back when its next call comes."""
        going = {generation.execution.execution_id for generation in self._going}
        for execution in self.executions.idle(_MAX_HISTORIES - 1):
            if execution.execution_id not in going:
                execution.history = None
                execution.readers.clear()

    # --- calls --------------------------------------------------------------------------------------------------------

    async def accept(
        self, address: Address, dialect: Dialect, body: bytes, headers: Mapping[str, str], path: str
    ) -> tuple[Generation, Request]:
        """Take a call: a generation that is under way when this returns. A refusal changes nothing in the tree."""
        if self.draining:
            raise CallError("overloaded", "the proxy is shutting down; try again in a moment")
        await self.learn(address.execution)
        self._addressed(address.execution, headers)
        known = self.executions.get(address.execution)
        request = dialect.parse(body, headers, known.readers[dialect.name] if known else None)
        started_at = datetime.now(UTC)
        async with self._turn(address.execution, headers) as execution:
            history = await self.history(execution)
            begun = time.perf_counter()
            plan = await asyncio.to_thread(history.plan, request, label(request.wire, headers, request, address.agent))
            self.metrics.plan_s.observe(time.perf_counter() - begun)
            earlier = execution.generations.get(plan.identity)
            verdict = judge(earlier.as_earlier() if earlier else None, replay_lost=self.settings.replay_lost)
            if earlier is not None and verdict in (Verdict.ATTACH, Verdict.REPLAY):
                return earlier, request
            self._check_room(execution)
            generation = self._generation(execution, history, plan, request, dialect, headers, path, started_at)
            await self.begin(execution)
            if earlier is not None and verdict is Verdict.LOST:
                earlier.mark_lost()
            history.reserve(plan)
            execution.generations[plan.identity] = generation
            self._going.add(generation)
            generation.start()
        self.metrics.in_flight.inc()
        self.events.add(
            "call.started",
            execution_id=execution.execution_id,
            call_id=generation.call_id,
            agent_role=str(plan.agent_role),
        )
        return generation, request

    def _check_room(self, execution: Execution) -> None:
        bounds, going = self.settings.bounds, sum(not kept.done for kept in execution.generations.values())
        if len(self._going) >= bounds.calls:
            raise CallError("overloaded", f"{bounds.calls} calls are in flight, the most this proxy takes; try again")
        if going >= bounds.calls_per_execution:
            raise CallError(
                "rate_limit",
                f"{going} calls of execution {execution.execution_id} are in flight, the most that one may have; "
                "wait for a reply",
            )

    async def count(self, address: Address, dialect: Dialect, body: bytes, headers: Mapping[str, str]) -> int:
        """Tokens that the prompt of a request would have. Nothing is recorded or reserved."""
        await self.learn(address.execution)
        execution = self.executions.get(address.execution)
        self.authorize(execution, headers)
        request = dialect.parse(body, headers, execution.readers[dialect.name] if execution else None)
        execution = execution or Execution(execution_id=address.execution)
        async with execution.lock:
            history = await self.history(execution)
            named = label(request.wire, headers, request, address.agent)
            return len((await asyncio.to_thread(history.plan, request, named)).prompt_ids)

    @property
    def context_window(self) -> int | None:
        """Most tokens of prompt and output together: what was set, and what every engine can take."""
        known = [engine.info.context_length for engine in self.router.engines]
        return min((limit for limit in (self.settings.context_window, *known) if limit), default=None)

    @property
    def max_prompt(self) -> int | None:
        """A prompt must be shorter than this."""
        known = [engine.info.max_prompt for engine in self.router.engines]
        return min((limit for limit in (self.context_window, *known) if limit), default=None)

    @property
    def vocab_size(self) -> int:
        """Ids below this may be sent: what every engine's model has."""
        known = [engine.info.vocab_size for engine in self.router.engines if engine.info.vocab_size]
        return min(known, default=self.template.vocab_size)

    def reply_text(self, plan: PromptPlan, request: Request) -> ReplyText:
        """A fresh reader of the reply to a request."""
        # A schema holds the reply from its first token, so what the template opens before it stays empty.
        opening = "" if request.sampling.json_schema is not None else self.template.decode(plan.opening_ids)
        return ReplyText(
            Detokenizer(_Decoder(self.template), self._hidden),
            ReplyParser(self.parser, opening, request.tools),
            request.sampling.stop,
        )

    def _experts_from(self, execution: Execution, history: History, plan: PromptPlan) -> int:
        """First position whose routed experts are to be asked for; of use only to engines that give them."""
        if not any(engine.info.experts for engine in self.router.engines):
            return 0
        return execution.experts.unknown_from(history.spans(plan))

    def _generation(
        self,
        execution: Execution,
        history: History,
        plan: PromptPlan,
        request: Request,
        dialect: Dialect,
        headers: Mapping[str, str],
        path: str,
        started_at: datetime,
    ) -> Generation:
        num_prompt, window, max_prompt = len(plan.prompt_ids), self.context_window, self.max_prompt
        if max_prompt is not None and num_prompt >= max_prompt:
            raise CallError("prompt_too_long", dialect.too_long(num_prompt, max_prompt - 1))
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(31)
        room = window - num_prompt if window is not None else 1 << 20
        used = self.settings.sampling.to_engine(request.sampling, room, seed, self.template.stop_ids)
        facts = CallFacts(
            call_id=f"c_{secrets.token_hex(10)}",
            output_node_id=f"n_{secrets.token_hex(10)}",
            execution_id=execution.execution_id,
            request=request,
            plan=plan,
            path=path,
            headers=headers,
            started_at=started_at,
            sampling_used=used,
            seed=seed,
            thinking=self.settings.thinking,
            environment_state_id=execution.environment.state_id if execution.environment else None,
        )
        sampler = Sampler(
            router=self.router,
            call_id=facts.call_id,
            affinity=execution.execution_id,
            prompt_ids=plan.prompt_ids,
            ids_text=history.ids_text,
            sampling=used,
            stop_ids=self.template.stop_ids,
            vocab_size=self.vocab_size,
            policy_id=self.settings.policy,
            limits=self.settings.limits,
            experts_from=self._experts_from(execution, history, plan),
        )
        return Generation(
            facts=facts,
            execution=execution,
            history=history,
            scope=execution.scope,
            sampler=sampler,
            text=self.reply_text(plan, request),
            recorder=self.recorder,
            log=self.events,
            grace_s=self.settings.grace_s,
            limit_s=self.settings.bounds.call_s,
            on_end=self._ended,
            on_delivered=self._forget,
        )

    def _ended(self, generation: Generation) -> None:
        execution, facts, plan = generation.execution, generation.facts, generation.facts.plan
        self._going.discard(generation)
        execution.num_calls += 1
        if generation.failure is not None:
            self._forget(generation)
        status = str(generation.status)
        self.metrics.in_flight.dec()
        self.metrics.calls.labels(facts.request.wire, str(plan.agent_role), str(plan.extension), status).inc()
        if plan.branch_reason is not None:
            self.metrics.forks.labels(str(plan.branch_reason)).inc()
        if plan.fork_check is not None:
            self.metrics.false_forks.labels(plan.fork_check.partition(":")[0]).inc()
        self.metrics.prompt_tokens.inc(len(plan.prompt_ids))
        self.metrics.output_tokens.inc(generation.sampler.num_tokens)
        if generation.sampler.first_token_at is not None:
            self.metrics.first_token_s.observe((generation.sampler.first_token_at - facts.started_at).total_seconds())
        self.events.add(
            "call",
            execution_id=facts.execution_id,
            call_id=facts.call_id,
            agent_role=str(plan.agent_role),
            agent_id=plan.agent_id,
            status=status,
            prompt_tokens=len(plan.prompt_ids),
            output_tokens=generation.sampler.num_tokens,
            error=str(generation.failure) if generation.failure else None,
        )

    def _forget(self, generation: Generation) -> None:
        identity, kept = generation.facts.plan.identity, generation.execution.generations
        if kept.get(identity) is generation:
            del kept[identity]

    # --- engines and status -----------------------------------------------------------------------------------------

    async def add_engine(self, url: str, drains: bool = False) -> Engine:
        """Take in an engine whose vocabulary fits the tokenizer."""
        engine = await self.router.add(url, drains)
        try:
            await check_tokenizer(self.template, engine, self.settings.tokenizer)
        except ConfigError:
            self.router.remove(engine.url)
            raise
        return engine

    def status(self) -> dict[str, Any]:
        """As `GET /api/status` shows it."""
        return {
            "run": str(self.settings.run.resolve()),
            "pid": os.getpid(),
            "started_at": self.started_at,
            "mode": "policy",
            "policy": str(self.version) if self.version else None,
            "context_window": self.context_window,
            "thinking": self.settings.thinking,
            "late_system": str(self.late_system),
            "fingerprint": self.template.fingerprint,
            "template_local": self.locality.proved,
            "draining": self.draining,
            "in_flight": len(self._going),
            "engines": [engine.describe() for engine in self.router.engines],
            "executions": dict(Counter(execution.state for execution in self.executions)),
        }

    def expose_metrics(self) -> bytes:
        """Prometheus text, with the engines' figures of this moment."""
        self.note_engines()
        return self.metrics.expose()

    def note_engines(self) -> None:
        """Take the engines' figures of this moment into the metrics."""
        for engine in self.router.engines:
            self.metrics.engine_in_flight.labels(engine.url).set(engine.in_flight)
            self.metrics.engine_up.labels(engine.url).set(engine.state == "up")

    async def finish(self, execution: Execution) -> None:
        """An execution ended: stop what it still samples and forget what only its next call would need."""
        going = [one for one in self._going if one.execution is execution]
        await asyncio.gather(*(generation.abort() for generation in going))
        await asyncio.gather(*(generation.wait_done() for generation in going))
        execution.generations.clear()
        execution.history = None
        execution.readers.clear()
        self.router.forget(execution.execution_id)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def drain(self, seconds: float) -> None:
        """Take no more calls, let those in flight finish, and after `seconds` abort and record the rest."""
        self.draining = True
        await _finished(self._going, seconds)
        if self._going:
            log.warning("aborting %d calls that are still being sampled", len(self._going))
            await asyncio.gather(*(generation.abort() for generation in self._going))
            await _finished(self._going, 5)
        await self.router.stop()


class _Decoder:
    """The template's decoder, for lists of ids."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def decode(self, ids: Sequence[int]) -> str:
        return self._template.decode(np.array(ids, np.int32))


async def _finished(generations: set[Generation], seconds: float) -> None:
    waits = [asyncio.ensure_future(generation.wait_done()) for generation in generations]
    if waits:
        _, late = await asyncio.wait(waits, timeout=seconds)
        for wait in late:
            wait.cancel()


def _refuse_ended(execution: Execution) -> None:
    if execution.state == "ended":
        raise CallError(
            "invalid_request",
            f"execution {execution.execution_id} has ended ({execution.end_reason}); "
            "use another base URL for another run",
        )


def _presented(headers: Mapping[str, str]) -> str:
    bearer = headers.get("authorization", "")
    return headers.get("x-api-key") or (bearer[7:].strip() if bearer[:7].lower() == "bearer " else "")


def _client_name(headers: Mapping[str, str]) -> str | None:
    agent = headers.get("user-agent", "").split("/")[0].split(" ")[0]
    return agent or None
