"""The commit thread: whatever is acknowledged was durable first.

Calls that finish while a commit is running, or within its rest, share the next one (group commit), so the disk is
waited for once, not once per call. A commit of one call costs nearly as much as one of ten: the rest keeps a busy
process from paying that for each, and one with time to spare hardly meets it. All use of the writer is on this one
thread; a failed commit fails every call that was in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from gyre_data.errors import CaptureError

__all__ = ["Recorder", "Scope", "Writer", "blob_id"]

log = logging.getLogger(__name__)

_LATER_S = 0.2
"""Longest that rows wait for a commit to go with: one of their own would cost as much as a call's."""

_REST, _LONGEST_REST_S = 1.0, 0.05
"""How long the thread rests after a commit, in durations of that commit, and at most."""


def blob_id(data: bytes) -> str:
    """Id under which `data` is stored: its content decides."""
    return hashlib.sha256(data).hexdigest()


class Writer(Protocol):
    """What the recorder needs of a run's writer."""

    def write(self, rows: Iterable[Any]) -> None:
        """Make rows durable, with all that was queued; raise CaptureError when they are not."""

    def put_blob(self, data: bytes) -> str:
        """Queue bytes under their content's id, once."""

    def close(self) -> None:
        """Seal and let go of the folder."""


class Scope:
    """Rows that build on one another. Once some of them could not be written, later ones must not be either."""

    def __init__(self) -> None:
        self.broken = False


@dataclass(kw_only=True, slots=True)
class _Job:
    rows: Sequence[Any]
    blobs: Sequence[bytes]
    scope: Scope
    awaited: bool
    done: Future[None] = field(default_factory=Future)
    asked_at: float = field(default_factory=time.perf_counter)


class Recorder:
    """Owner of a run's writer. `observe_wait` is told the seconds each call waited for its commit."""

    def __init__(self, writer: Writer, observe_wait: Callable[[float], None] | None = None) -> None:
        self._writer = writer
        self.observe_wait = observe_wait or (lambda seconds: None)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gyre-commit", daemon=True)
        self._closed = False
        self._rested_at = 0.0  # on time.monotonic's clock
        self._thread.start()

    async def commit(self, rows: Sequence[Any], blobs: Sequence[bytes] = (), scope: Scope | None = None) -> None:
        """Return once `rows` and `blobs` are durable; raise CaptureError when they are not or may not be."""
        await asyncio.wrap_future(self._submit(_Job(rows=rows, blobs=blobs, scope=scope or Scope(), awaited=True)))

    def later(self, rows: Sequence[Any]) -> None:
        """Make event rows durable with the next commit, within a fifth of a second; a failure is logged, since nobody
        waits for the answer."""
        self._submit(_Job(rows=rows, blobs=(), scope=Scope(), awaited=False)).add_done_callback(_log_failure)

    def close(self) -> None:
        """Commit what is queued, seal, and close the writer. Blocks; call it off the event loop."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join()
            self._writer.close()

    def _submit(self, job: _Job) -> Future[None]:
        if self._closed:
            raise CaptureError("the run is closed, nothing can be recorded any more; start the proxy again")
        self._jobs.put(job)
        return job.done

    def _run(self) -> None:
        going = True
        while going:
            batch: list[_Job] = []
            going = self._gather(batch)
            begun = time.monotonic()
            self._commit(batch)
            ended = time.monotonic()
            self._rested_at = ended + min(_REST * (ended - begun), _LONGEST_REST_S)

    def _gather(self, batch: list[_Job]) -> bool:
        """Fill `batch` with what is to be committed now. False when nothing will follow it."""
        due: float | None = None
        while True:
            try:
                job = self._jobs.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
            except queue.Empty:
                return True
            if job is None:
                return False
            batch.append(job)
            latest = self._rested_at if job.awaited else time.monotonic() + _LATER_S
            due = latest if due is None else min(due, latest)

    def _commit(self, batch: list[_Job]) -> None:
        late = [job for job in batch if job.scope.broken]
        for job in late:
            job.done.set_exception(CaptureError("an earlier call of this execution could not be recorded; try again"))
        batch = [job for job in batch if not job.scope.broken]
        if not batch:
            return
        try:
            for data in (data for job in batch for data in job.blobs):
                self._writer.put_blob(data)
            self._writer.write([row for job in batch for row in job.rows])
        except Exception as error:  # noqa: BLE001 - the commit thread must outlive whatever a row does to it
            if len(batch) > 1 and not isinstance(error, CaptureError | OSError):
                for job in batch:  # one of them holds a row that cannot be written; the others are good
                    self._commit([job])
                return
            for job in batch:
                job.scope.broken = True
                job.done.set_exception(_capture_error(error))
            return
        now = time.perf_counter()
        for job in batch:
            if job.awaited:
                self.observe_wait(now - job.asked_at)
            job.done.set_result(None)


def _capture_error(error: Exception) -> CaptureError:
    failure = CaptureError(
        f"the reply could not be recorded and is therefore not given out: {error}; free the disk and try again"
    )
    failure.__cause__ = error
    return failure


def _log_failure(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        log.error("an event row could not be recorded: %s", error)
