"""What happened, in order, for those who follow: launcher, trainer, controller, live page.

Events are hints, never the record: the record is in the run folder. Sequence numbers grow over restarts, because they
start at the clock's milliseconds, so a follower keeps its place without the log being stored; if the clock was set back
meanwhile, it is given all there is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from itertools import islice
from typing import Any

__all__ = ["EventLog"]


class EventLog:
    """The newest `capacity` events. Single-threaded: used from the event loop only."""

    def __init__(self, capacity: int = 65536, start: int | None = None) -> None:
        self._next = int(time.time() * 1000) if start is None else start
        self._events: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._grown = asyncio.Event()

    def add(self, kind: str, **fields: Any) -> None:
        """Append one event and wake whoever waits for it."""
        self._events.append({"seq": self._next, "at": time.time(), "type": kind, **fields})
        self._next += 1
        self._grown.set()
        self._grown = asyncio.Event()

    def read(self, start: int, limit: int = 1000) -> dict[str, Any]:
        """Events from `start` on, at most `limit`. `oldest` above `start` tells a follower that it missed some."""
        oldest = self._events[0]["seq"] if self._events else self._next
        if start > self._next:  # a place in another life's log: the clock was set back since
            start = oldest
        skip = max(0, start - oldest)
        events = list(islice(self._events, skip, skip + limit))
        return {"events": events, "next": events[-1]["seq"] + 1 if events else self._next, "oldest": oldest}

    async def wait(self, start: int, limit: int, seconds: float) -> dict[str, Any]:
        """Like `read`, but waits up to `seconds` for the first event."""
        deadline = time.monotonic() + seconds
        while True:
            grown, found = self._grown, self.read(start, limit)
            left = deadline - time.monotonic()
            if found["events"] or left <= 0:
                return found
            try:
                await asyncio.wait_for(grown.wait(), left)
            except TimeoutError:
                return self.read(start, limit)
