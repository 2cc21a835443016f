"""Sampling one reply, over as many engines as it takes.

An engine that fails or leaves in mid-reply is replaced: the next one continues from prompt + partial output, and every
token keeps its own log-prob, engine and weight version. The harness notices nothing but the pause.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gyre_data.errors import CaptureError, ConfigError, EngineError
from gyre_data.types import Attempt, Floats, Ints, VersionSpan

from .chunks import Chunk, EngineRefusedError
from .experts import Routing
from .ids_text import IdsText
from .router import Engine, Rider, Router, read_version

__all__ = ["Sampler", "SamplerLimits"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerLimits:
    """How long a reply may look for engines."""

    attempts: int = 8
    recovery_s: float = 120.0
    """Longest wait for an engine when none is up."""
    abort_s: float = 3.0
    """How long an engine that was asked to stop may go on before it is left."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sampler:
    """State of one reply's sampling. What was sampled so far is whole at every moment, also after an error."""

    router: Router
    call_id: str
    affinity: str
    prompt_ids: Ints
    sampling: dict[str, Any]
    stop_ids: frozenset[int]
    vocab_size: int
    policy_id: str | None = None
    limits: SamplerLimits = field(default_factory=SamplerLimits)
    experts_from: int = 0
    """First position whose routed experts are not on record, for engines that give them."""
    ids_text: IdsText = field(default_factory=IdsText)
    """Knows the text of the prompt before this one."""

    num_tokens: int = 0
    finish: str | None = None
    matched: int | str | None = None
    cached_tokens: int | None = None
    first_token_at: datetime | None = None
    routing: Routing | None = None
    attempts: list[Attempt] = field(default_factory=list)
    _ids: list[Ints] = field(default_factory=list)
    _logprobs: list[Floats] = field(default_factory=list)
    _spans: tuple[VersionSpan, ...] = ()  # of earlier attempts
    _named: tuple[tuple[str, int, int], ...] = ()  # versions of this attempt, which began at token _start
    _start: int = 0
    _version: str = ""  # the one named last
    _engine: Engine | None = None
    _rider: Rider | None = None
    _rid: str = ""
    _aborting: bool = False

    def __post_init__(self) -> None:
        if self.prompt_ids.size == 0:
            raise CaptureError("the request renders to no tokens at all; give it at least one message")
        low, high = int(self.prompt_ids.min()), int(self.prompt_ids.max())
        if low < 0 or high >= self.vocab_size:
            raise CaptureError(
                f"the rendered prompt holds id {high if high >= self.vocab_size else low}, the engine's vocabulary has "
                f"{self.vocab_size}; pass the served checkpoint's tokenizer folder"
            )

    @property
    def output_ids(self) -> Ints:
        """Every id sampled so far."""
        return np.concatenate(self._ids) if self._ids else np.empty(0, np.int32)

    @property
    def logprobs(self) -> Floats:
        """Their log-probs."""
        return np.concatenate(self._logprobs) if self._logprobs else np.empty(0, np.float32)

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which weights sampled which tokens, in order, without gaps."""
        return _merged([*self._spans, *(self._span(*item) for item in self._named)])

    @property
    def max_tokens(self) -> int:
        """Most tokens this reply may have."""
        return int(self.sampling["max_new_tokens"])

    async def abort(self) -> None:
        """Stop sampling; the engine answers with what it has, which ends `chunks` with finish `abort`."""
        self._aborting = True
        if self._engine is not None and self._rider is not None:
            late = self._rider.send_away
            asyncio.get_running_loop().call_later(self.limits.abort_s, late, "did not stop when it was asked to")
            await self._engine.client.abort(self._rid)

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """New tokens as they come, until a finish. Raises EngineError when no engine can finish the reply."""
        lost: dict[str, int] = {}
        again: set[str] = set()
        for attempt in range(self.limits.attempts):
            engine = await self._engine_for(lost)
            if self._aborting:
                self.finish = "abort"
                return
            if engine is None:
                raise EngineError(
                    f"no engine is up to {'finish' if self.num_tokens else 'sample'} the reply; "
                    "see GET /api/engines, start one or add one"
                )
            start = self.num_tokens
            self._engine, self._rid = engine, f"{self.call_id}.{attempt}"
            engine.in_flight += 1
            try:
                async with aclosing(self._attempt(engine, start)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except (EngineRefusedError, CaptureError) as error:
                self._note_attempt(engine, start, str(error))
                raise
            except EngineError as error:
                if self.finish is not None:
                    return
                if start == self.num_tokens and engine.url not in again and not self._aborting:
                    again.add(engine.url)  # an idle connection that the engine had closed looks like this
                    continue
                self._note_attempt(engine, start, str(error))
                if self._aborting or self._ended_unsaid():
                    return
                lost[engine.url] = engine.epoch
                self.router.note_failure(engine, str(error))
            finally:
                engine.in_flight -= 1
                self._engine = None
        raise EngineError(
            f"{self.limits.attempts} attempts on {', '.join(lost)} did not finish the reply; see the engines' logs"
        )

    async def _attempt(self, engine: Engine, start: int) -> AsyncGenerator[Chunk]:
        prompt = np.concatenate([self.prompt_ids, *self._ids]) if start else self.prompt_ids
        sampling = {**self.sampling, "max_new_tokens": self.max_tokens - start}
        if start and "sampling_seed" in sampling:
            # A continuation draws anew: engines count draws from the start of a request, not of the reply.
            sampling["sampling_seed"] = (sampling["sampling_seed"] + start) % 2**63
        self._spans, self._named, self._start = self.versions, (), start
        experts_from = None if engine.info.experts is None else self.experts_from
        generate = engine.client.generate(
            self._rid, self.ids_text.of(prompt), sampling, str(engine.version), experts_from
        )
        async with self._riding(engine), aclosing(generate) as chunks:
            async for chunk in chunks:
                self._take(chunk, engine)
                yield chunk
                left = chunk.finish == "abort" and not self._aborting
                if left and await self._elsewhere(engine):
                    raise EngineError(f"engine {engine.url} left in mid-reply: {chunk.message or 'aborted'}")
                if chunk.finish:
                    self.finish, self.matched = chunk.finish, chunk.matched
                    self._take_experts(chunk, engine)
                    self._note_attempt(engine, start, (chunk.message or "aborted") if left else None)
                    engine.served += 1

    @asynccontextmanager
    async def _riding(self, engine: Engine) -> AsyncGenerator[None]:
        """Wait for the engine's tokens until it finishes or the router sends this reply away."""
        task = asyncio.current_task()
        assert task is not None
        self._rider = rider = Rider(task=task)
        engine.riders.add(rider)
        try:
            yield
        except asyncio.CancelledError:
            if rider.reason is None or task.uncancel():
                raise
            raise EngineError(f"engine {engine.url} {rider.reason}") from None
        finally:
            engine.riders.discard(rider)
            rider.reason, self._rider = rider.reason or "it arrived", None

    async def _engine_for(self, lost: dict[str, int]) -> Engine | None:
        deadline = time.monotonic() + self.limits.recovery_s
        while not self._aborting:
            engine = self.router.pick(self.affinity, lost) or await self.router.wait(self.affinity, lost, 0.5)
            if engine is not None or time.monotonic() > deadline:
                return engine
        return None

    async def _elsewhere(self, engine: Engine) -> bool:
        """Whether a reply that `engine` aborted unasked should go on: another is up, or this one is going away."""
        if engine.state != "up":  # whoever drained it may have it abort, before there is another
            return True
        others = self.router.pick(self.affinity, {engine.url: engine.epoch})
        return others is not None or not await engine.client.ready()

    def _take(self, chunk: Chunk, engine: Engine) -> None:
        if self.cached_tokens is None and chunk.cached_tokens is not None and not self._start:
            self.cached_tokens = chunk.cached_tokens
        ids, logprobs, wrong = chunk.token_ids, chunk.logprobs, ""
        # Few as a rule: cheaper to look at one by one than as arrays.
        for index, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist(), strict=True)):
            if not 0 <= token < self.vocab_size:
                wrong = f"engine {engine.url} sampled id {token}, outside the vocabulary of {self.vocab_size}"
            elif not math.isfinite(logprob):
                wrong = f"engine {engine.url} gave a log-prob that is not finite"
            elif logprob > 0:
                wrong = f"engine {engine.url} gave a log-prob of {logprob:g}, above 0"
            if wrong:
                ids, logprobs = ids[:index], logprobs[:index]
                break
        if ids.size:
            self._keep(ids, logprobs, chunk, engine)
        if wrong:
            raise CaptureError(f"{wrong}; the call ends before it")

    def _keep(self, ids: Ints, logprobs: Floats, chunk: Chunk, engine: Engine) -> None:
        have = self.num_tokens + ids.size - self._start
        named = tuple((version, start, min(end, have)) for version, start, end in chunk.versions if start < have)
        named = named or ((str(engine.version), 0, have),)
        if named[-1][0] != self._version:
            try:
                self.router.note_version(engine, named[-1][0])
            except ConfigError as error:  # before its tokens are kept: they could not be recorded
                raise CaptureError(str(error)) from error
            self._version = named[-1][0]
        self.first_token_at = self.first_token_at or datetime.now(UTC)
        self._ids.append(ids)
        self._logprobs.append(logprobs)
        self.num_tokens += ids.size
        self._named = named

    def _take_experts(self, chunk: Chunk, engine: Engine) -> None:
        if engine.info.experts is None or chunk.experts is None:
            return
        num_tokens = max(0, len(self.prompt_ids) + self.num_tokens - 1 - self.experts_from)
        try:
            self.routing = Routing.read(chunk.experts, engine.info.experts, self.experts_from, num_tokens)
        except EngineError as error:  # the reply is good without them
            log.warning("engine %s: %s; they are not recorded for call %s", engine.url, error, self.call_id)

    def _span(self, version: str, start: int, end: int) -> VersionSpan:
        policy = read_version(version, self.policy_id)
        return VersionSpan(policy_id=policy.policy_id, n=policy.n, start=start + self._start, end=end + self._start)

    def _ended_unsaid(self) -> bool:
        """The engine went after the last token but before its finish: nothing is left to sample."""
        if self._ids and int(self._ids[-1][-1]) in self.stop_ids:
            self.finish, self.matched = "stop", int(self._ids[-1][-1])
        elif self.num_tokens >= self.max_tokens:
            self.finish = "length"
        return self.finish is not None

    def _note_attempt(self, engine: Engine, start: int, error: str | None) -> None:
        self.attempts.append(Attempt(engine=engine.url, start=start, end=self.num_tokens, error=error))


def _merged(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span."""
    out: list[VersionSpan] = []
    for span in spans:
        last = out[-1] if out else None
        if last and (last.policy_id, last.n, last.end) == (span.policy_id, span.n, span.start):
            out[-1] = VersionSpan(policy_id=last.policy_id, n=last.n, start=last.start, end=span.end)
        else:
            out.append(span)
    return tuple(out)
