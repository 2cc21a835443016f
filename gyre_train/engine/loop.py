"""The batching loop: one thread that owns the model and all KV buffers.

Each step computes one token for every sequence that decodes and a slice of one prompt that still has to be read, all in
a single forward. Whatever other threads want done (abort, pause, new weights, flush) is queued and carried out between
two steps, so it never meets a half-finished one.

Pausing follows SGLang: `abort` ends all requests with what they have, `in_place` keeps their KV (and thereby mixes old
KV with new weights), `retract` drops it, so that after a swap every token comes from the new weights alone.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from gyre_data.errors import ConfigError, EngineError

from .kv import CachedTokens, PrefixCache
from .model import Model, Span
from .sampling import draw, sample_rows
from .sequence import Sequence

__all__ = ["EngineLoop", "LoopSettings"]

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)

ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING = {"type": "abort", "message": "Abort in waiting queue"}
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopSettings:
    """Limits of one engine."""

    context_length: int
    """Prompt and output together; at most what the model's positions allow."""
    max_running: int = 16
    """Sequences computed at the same time."""
    max_queued: int = 256
    """Sequences that may wait; one more is refused with 503."""
    max_total_tokens: int = 1 << 20
    """Tokens whose KV may be held, running and cached together."""
    prefill_tokens: int = 512
    """Prompt tokens computed in one step, so that a long prompt does not stop those who decode."""
    threads: int = 1
    """Torch threads of the loop."""

    @property
    def max_prompt_tokens(self) -> int:
        """A prompt this long or longer is refused (SGLang keeps six positions back)."""
        return self.context_length - 6


class EngineLoop:
    """Runs requests on a model. Every public method may be called from any thread."""

    def __init__(self, model: Model, settings: LoopSettings, weight_version: str) -> None:
        self.model = model
        self.settings = settings
        self.weight_version = weight_version
        self.paused = False
        self.failure: BaseException | None = None
        self.num_generated = 0
        self._cache = PrefixCache(settings.max_total_tokens)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._draining: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gyre-engine", daemon=True)

    def start(self) -> None:
        """Start the loop's thread."""
        self._thread.start()

    def close(self) -> None:
        """End all requests with what they have and stop the thread."""

        def stop() -> None:
            self._abort(lambda _: True)
            self._closing = True

        self._call(stop).result()
        self._thread.join()

    def submit(self, sequence: Sequence) -> Future[None]:
        """Queue a request; EngineError (busy) or ConfigError (it cannot run here) comes through the future."""

        def add() -> None:
            if len(self._waiting) >= self.settings.max_queued:
                raise EngineError("The request queue is full.")
            if any(other.rid == sequence.rid for other in (*self._running, *self._waiting)):
                raise ConfigError(f"Duplicate request ID detected: {sequence.rid}")
            room = self.settings.context_length - 2 - len(sequence.prompt_ids)
            wanted = sequence.params.max_new_tokens
            sequence.limit = room if wanted is None else min(wanted, room)
            self._waiting.append(sequence)

        return self._call(add)

    def abort(self, rid: str | None) -> Future[None]:
        """End the requests whose rid starts with `rid` (SGLang's rule), or all for None; unknown ones are ignored."""
        return self._call(lambda: self._abort(lambda one: rid is None or one.rid.startswith(rid)))

    def drop(self, sequence: Sequence) -> Future[None]:
        """End this one request, whatever the others are called; nothing happens when it has ended by itself."""
        return self._call(lambda: self._abort(lambda one: one is sequence))

    def pause(self, mode: str) -> Future[None]:
        """Stop computing; see the module's head for the modes."""

        def pause() -> None:
            self.paused = True
            if mode == "abort":
                self._abort(lambda _: True)
            elif mode == "retract":
                self._retract()

        return self._call(pause)

    def resume(self) -> Future[None]:
        """Compute on; retracted requests read their tokens again under the weights of now."""

        def resume() -> None:
            self.paused = False

        return self._call(resume)

    def flush(self) -> Future[bool]:
        """Forget cached prefixes; False (and nothing forgotten) while requests run or wait with KV of their own."""
        return self._call(self._flush)

    def update_weights(self, path: str | Path, version: str | None, *, flush: bool, abort_all: bool) -> Future[str]:
        """Serve the weights in `path`. The result says what was done; ConfigError: the old weights serve on.

        A paused engine swaps at once. One that runs takes no new request, lets the present ones end, then swaps.
        """
        return self._swap(lambda: self.model.replace(path), version, flush=flush, abort_all=abort_all)

    def load_tensors(
        self, tensors: list[tuple[str, Any]], version: str | None, *, flush: bool, abort_all: bool
    ) -> Future[str]:
        """Like `update_weights`, with tensors that were received; those that are not among them stay as they are."""
        return self._swap(lambda: self.model.load(tensors), version, flush=flush, abort_all=abort_all)

    def _swap(self, replace: Callable[[], None], version: str | None, *, flush: bool, abort_all: bool) -> Future[str]:
        future: Future[str] = Future()

        def swap() -> str:
            replace()
            message = "Succeeded to update model weights."
            if version is not None:
                self.weight_version = version
                message += f" Weight version updated to {version}."
            if flush and not self._flush():
                raise EngineError(_NOT_FLUSHED)
            return message

        def begin() -> None:
            if abort_all:
                self._abort(lambda _: True)
            if self.paused or not self._running:
                _settle(future, swap)
            else:
                self._draining.append((future, swap))

        self._call(begin)
        return future

    def checksums(self) -> Future[dict[str, str]]:
        """Digests of the weights that are served now."""
        return self._call(self.model.checksums)

    def ping(self) -> Future[None]:
        """Resolved as soon as the loop comes round."""
        return self._call(lambda: None)

    def loads(self) -> dict[str, int]:
        """Counts for a router; read without waiting, so they may be one step old."""
        running, waiting = list(self._running), list(self._waiting)
        return {
            "num_running_reqs": len(running),
            "num_waiting_reqs": len(waiting),
            "num_used_tokens": sum(one.num_tokens for one in running),
            "max_total_num_tokens": self.settings.max_total_tokens,
            "max_running_requests": self.settings.max_running,
        }

    def _call(self, action: Callable[[], _Result]) -> Future[_Result]:
        """Have the loop's thread run `action` between two steps."""
        future: Future[_Result] = Future()
        with self._wake:
            if self.failure is not None or self._closing:
                future.set_exception(self._stopped())
            else:
                self._commands.append((future, action))
                self._wake.notify()
        return future

    def _stopped(self) -> EngineError:
        return EngineError(f"the engine has stopped ({self.failure or 'closed'}): start it again")

    def _run(self) -> None:
        torch.set_num_threads(self.settings.threads)
        try:
            while not self._closing:
                self._wait_for_work()
                self.advance()
        except BaseException as error:
            _logger.exception("the engine loop has failed")
            self.failure = error
            raise
        finally:
            with self._wake:
                self._closing = True
                unheard, self._commands = self._commands, deque()
            stopped = self._stopped()
            self._abort(lambda _: True, {**ABORTED, "message": str(stopped), "status_code": 503})
            for future, _ in (*unheard, *self._draining):
                future.set_exception(stopped)

    def advance(self) -> None:
        """Do what was asked for, then compute one step. The thread's body; a test may call it instead of `start`."""
        while self._commands:
            _settle(*self._commands.popleft())
        while self._draining and not self._running:
            _settle(*self._draining.popleft())
        if not self.paused:
            self._admit()
            if self._running:
                self._step()

    def _wait_for_work(self) -> None:
        with self._wake:
            while not self._commands and (self.paused or not (self._running or self._waiting or self._draining)):
                self._wake.wait()

    def _admit(self) -> None:
        """Move waiting requests into the batch while there is room; none while a weight update waits for its turn."""
        reserved = sum(len(one.prompt_ids) + one.limit for one in self._running)
        while self._waiting and not self._draining and len(self._running) < self.settings.max_running:
            sequence = self._waiting[0]
            reserved += len(sequence.prompt_ids) + sequence.limit
            if self._running and reserved > self.settings.max_total_tokens:
                return
            self._waiting.popleft()
            self._cache.trim(max(0, self.settings.max_total_tokens - reserved))
            num = sequence.num_tokens
            # The last token is always computed: its logits are what the first sample comes from.
            buffer = self._cache.take(sequence.extra_key, sequence.known_ids(0, num - 1), map(_held, self._running))
            sequence.buffer = buffer or self.model.new_buffer(num + 64)
            if not sequence.num_retractions:
                sequence.cached_tokens = sequence.buffer.length
            self._running.append(sequence)

    def _step(self) -> None:
        """One forward: a token for each that decodes, and the next slice of the first prompt that is still unread."""
        spans: list[Span] = []
        ready: list[Sequence] = []
        rows: list[int] = []
        room = self.settings.prefill_tokens
        for sequence in self._running:
            assert sequence.buffer is not None
            done, num = sequence.buffer.length, sequence.num_tokens
            end = min(num, done + (1 if num - done == 1 else room))
            if end == done:
                continue
            if num - done > 1:
                room -= end - done
            if end == num:
                rows.append(len(spans))
                ready.append(sequence)
            spans.append(Span(sequence.known_ids(done, end), sequence.buffer))
        logits = self.model.forward(spans)
        if not ready:
            return
        if len(rows) != len(spans):
            logits = logits[rows]
        draws = [draw(one.params.seed, len(one.output_ids)) for one in ready]
        for sequence, (token, logprob) in zip(
            ready, sample_rows(logits, [s.params for s in ready], draws), strict=True
        ):
            self._accept(sequence, token, logprob)
        self._running = [one for one in self._running if one.finish_reason is None]

    def _accept(self, sequence: Sequence, token: int, logprob: float) -> None:
        if sequence.limit > 0:
            sequence.append(token, logprob, self.weight_version)
            self.num_generated += 1
        params = sequence.params
        stops = token in params.stop_token_ids or token in self.model.eos_ids
        if stops and sequence.limit > 0 and not params.ignore_eos:
            self._end(sequence, {"type": "stop", "matched": token})
        elif len(sequence.output_ids) >= sequence.limit:
            self._end(sequence, {"type": "length", "length": len(sequence.output_ids)})
        else:
            sequence.on_change()

    def _end(self, sequence: Sequence, reason: dict[str, Any]) -> None:
        if sequence.buffer is not None:
            self._cache.put(*_held(sequence))
        sequence.finish(reason)
        sequence.on_change()

    def _abort(self, chosen: Callable[[Sequence], bool], reason: dict[str, Any] | None = None) -> None:
        for sequence in [one for one in self._running if chosen(one)]:
            self._running.remove(sequence)
            self._end(sequence, reason or ABORTED)
        for sequence in [one for one in self._waiting if chosen(one)]:
            self._waiting.remove(sequence)
            self._end(sequence, reason or ABORTED_WAITING)

    def _retract(self) -> None:
        for sequence in reversed(self._running):
            sequence.buffer = None
            sequence.num_retractions += 1
            self._waiting.appendleft(sequence)
        self._running = []

    def _flush(self) -> bool:
        if self._running:
            return False
        self._cache.clear()
        return True


def _held(sequence: Sequence) -> CachedTokens:
    assert sequence.buffer is not None
    return sequence.extra_key, sequence.known_ids(0, sequence.buffer.length), sequence.buffer


def _settle(future: Future[_Result], action: Callable[[], _Result]) -> None:
    """Run `action` and put what it gives or raises into `future`."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except Exception as error:  # noqa: BLE001 -- it belongs to whoever waits for the future, not to the loop
        future.set_exception(error)
    else:
        future.set_result(result)
