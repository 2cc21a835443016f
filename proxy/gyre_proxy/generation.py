"""One sampled reply: begun once, recorded once, followed by any number of connections.

The generation outlives its connection: a client that comes back within the grace period attaches to it and gets the
reply from its start. It is `done` only after its rows are durable, so nobody can see an end that is not recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gyre_data.errors import CaptureError, GyreError
from gyre_data.schema import CallStatus, DeliveryState
from gyre_data.types import RoutedExperts

from .capture import CallFacts, call_row, delivery_row, told_reason
from .events import EventLog
from .executions import Execution
from .history import History
from .message import Reply, ReplyEvent, Usage
from .parse import fold
from .recorder import Recorder, Scope
from .reply_text import ReplyText
from .retries import Earlier
from .sampler import Sampler

__all__ = ["Follower", "Generation"]

log = logging.getLogger(__name__)


class Follower:
    """A connection's wait for more: woken by the generation, and by its own client going away."""

    def __init__(self) -> None:
        self.gone = False
        self._future: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Something changed."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def leave(self) -> None:
        """The client went away."""
        self.gone = True
        self.wake()

    async def wait(self, seconds: float) -> None:
        """Sleep until woken, at most `seconds`."""
        loop = asyncio.get_running_loop()
        self._future = loop.create_future()
        timer = loop.call_later(seconds, self.wake)
        try:
            await self._future
        finally:
            timer.cancel()
            self._future = None


@dataclass(kw_only=True, slots=True, eq=False)
class Generation:
    """The reply to one call. Single-threaded: used from the event loop only."""

    facts: CallFacts
    execution: Execution
    history: History
    scope: Scope
    sampler: Sampler
    text: ReplyText
    recorder: Recorder
    log: EventLog
    grace_s: float
    limit_s: float
    on_end: Callable[[Generation], None] = lambda generation: None
    on_delivered: Callable[[Generation], None] = lambda generation: None

    events: list[ReplyEvent] = field(default_factory=list)
    done: bool = False
    failure: GyreError | None = None
    status: CallStatus | None = None
    delivered: bool = False
    _followers: list[Follower] = field(default_factory=list)
    _grace: asyncio.TimerHandle | None = None
    _limit: asyncio.TimerHandle | None = None
    _expired: bool = False
    _task: asyncio.Task[None] | None = None
    _abort: asyncio.Task[None] | None = None
    _aborted: bool = False

    @property
    def call_id(self) -> str:
        """Id of the call."""
        return self.facts.call_id

    @property
    def ok(self) -> bool:
        """Whether the reply is whole, recorded, and may be given out as finished."""
        return self.done and self.failure is None

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.facts.plan.prompt_ids),
            output_tokens=self.sampler.num_tokens,
            cached_tokens=self.sampler.cached_tokens or 0,
        )

    @property
    def reply(self) -> Reply:
        """The reply so far, its pieces joined."""
        return Reply(events=fold(self.events), finish=self.finish)

    @property
    def finish(self) -> str:
        """Why it ended: stop, length or abort."""
        return "stop" if self.text.stopped else self.sampler.finish or "abort"

    def as_earlier(self) -> Earlier:
        """What an identical request needs to know of this one."""
        return Earlier(
            sampling=not self.done and not self._aborted,
            connected=bool(self._followers),
            delivered=self.delivered,
            ok=self.failure is None and not self._aborted,
        )

    def start(self) -> asyncio.Task[None]:
        """Begin sampling."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._run())
        self._limit = loop.call_later(self.limit_s, self._expire)
        return self._task

    def attach(self) -> Follower:
        """A connection follows from the start of the reply."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        follower = Follower()
        self._followers.append(follower)
        return follower

    def detach(self, follower: Follower, delivered: bool) -> None:
        """The connection ended; `delivered` says that it was handed the whole reply."""
        self._followers.remove(follower)
        if delivered:
            self._deliver(DeliveryState.DELIVERED)
            self.on_delivered(self)
        elif self.delivered or self._followers or self.failure is not None:
            return
        elif self.done:
            self._deliver(DeliveryState.ABANDONED)
        else:
            self._grace = asyncio.get_running_loop().call_later(self.grace_s, self._grace_over)

    def mark_lost(self) -> None:
        """An identical request came although this reply was complete: its client never got it."""
        self._deliver(DeliveryState.UNDELIVERED)

    async def abort(self) -> None:
        """Stop sampling and record what there is. From here on a retry is another sample, not a follower."""
        self._aborted = not self.done
        await self.sampler.abort()

    async def wait_done(self) -> None:
        """Return when the reply is recorded or has failed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        error: GyreError | None = None
        try:
            async with aclosing(self.sampler.chunks()) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids.size:
                        self._grow(self.text.feed(chunk.token_ids))
            self._grow(self.text.finish())
        except GyreError as failure:
            error = failure
        except Exception as failure:
            log.exception("call %s failed inside the proxy", self.call_id)
            error = CaptureError(f"the proxy failed on this call: {type(failure).__name__}; see its log")
        await self._end(error)

    async def _end(self, error: GyreError | None) -> None:
        aborted = error is None and self.sampler.finish in (None, "abort")
        self.status = CallStatus.FAILED if error else CallStatus.ABORTED if aborted else CallStatus.OK
        if aborted:
            last = self.sampler.attempts[-1].error if self.sampler.attempts else None
            if self._expired:
                last = f"it was sampled for {self.limit_s:g} s, the longest that a call may take"
            error = CaptureError(f"the reply was aborted: {last or 'its client went away'}")
        try:
            await self._record(error)
        except GyreError as failure:
            log.exception("call %s could not be recorded", self.call_id)
            self.status, error = CallStatus.FAILED, failure
        self.failure, self.done = error, True
        for timer in (self._grace, self._limit):
            if timer is not None:
                timer.cancel()
        self._grace = self._limit = None
        if not self._followers and self.status is not CallStatus.FAILED:
            self._deliver(DeliveryState.ABANDONED)
        elif self.status is CallStatus.ABORTED:
            self._deliver(DeliveryState.UNDELIVERED)
        self.on_end(self)
        self._wake()

    async def _record(self, error: GyreError | None) -> None:
        try:
            async with self.execution.lock:
                rows, blobs = self._rows(error)
                saved = asyncio.ensure_future(self.recorder.commit(rows, blobs, self.scope))
                await asyncio.sleep(0)  # queued before the lock is let go: rows are written in the order of commits
            await saved
            for part in self.facts.request.body:
                part.stored = True
        except Exception as failure:
            # What is in memory is ahead of the disk now: the next call reads the execution back from the run.
            self.scope.broken = True
            if self.execution.history is self.history:
                self.execution.history = None
            if isinstance(failure, GyreError):
                raise
            raise CaptureError(f"the reply has no form that can be recorded: {failure!r:.200}") from failure

    def _rows(self, error: GyreError | None) -> tuple[Sequence[Any], Sequence[bytes]]:
        """Rows and texts of this call. It changes the history, so they must be written, or the scope broken."""
        facts, sampler = self.facts, self.sampler
        written = self.history.commit(
            facts.plan,
            call_id=facts.call_id,
            output_node_id=facts.output_node_id,
            output_ids=sampler.output_ids,
            logprobs=sampler.logprobs,
            versions=sampler.versions,
            reply=self.reply,
        )
        assert self.status is not None
        row = call_row(
            facts,
            sampler,
            status=self.status,
            finish=self.finish if error is None else sampler.finish,
            stop_reason=told_reason(facts.request.wire, self.reply, self.text.stopped) if error is None else None,
            error=str(error) if error else None,
        )
        return [*written.nodes, *self._experts(), row], [*written.blobs.values(), *facts.blobs]

    def _experts(self) -> Sequence[RoutedExperts]:
        routing, plan = self.sampler.routing, self.facts.plan
        if routing is None:
            return ()
        end = len(plan.prompt_ids) + self.sampler.num_tokens
        path = [*self.history.spans(plan), (self.facts.output_node_id, len(plan.prompt_ids), end)]
        return self.execution.experts.rows(self.call_id, path, routing)

    def _grow(self, events: Sequence[ReplyEvent]) -> None:
        if events:
            self.events.extend(events)
            self._wake()

    def _wake(self) -> None:
        for follower in self._followers:
            follower.wake()

    def _deliver(self, state: DeliveryState) -> None:
        self.delivered = self.delivered or state is DeliveryState.DELIVERED
        self.recorder.later([delivery_row(self.facts, state)])
        self.log.add("delivery", execution_id=self.facts.execution_id, call_id=self.call_id, state=str(state))

    def _expire(self) -> None:
        self._limit, self._expired = None, True
        self._abort = asyncio.get_running_loop().create_task(self.abort())

    def _grace_over(self) -> None:
        self._grace = None
        if not self.done:
            self._abort = asyncio.get_running_loop().create_task(self.abort())
