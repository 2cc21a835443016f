"""What a scheduler's controller tells one training process, and what it hears of it: the routes of a training cell.

    GET  /state?after=SEQ&wait=S   {seq, version, done: [[epoch, key]], applied: [[version, generation]]}
    POST /run {epoch, key}                          compute this micro-step, once
    POST /pull {epoch, version}                     nothing: a satellite takes new weights by itself before it computes
    POST /optimise {version, generation}            the core: the step is whole, make this version
    POST /weights {version, label, receiver}        the core: bring this version to an engine (`engines`)

A key is [index, group, part], `index` the number of steps that are applied before this one: one less than the number of
the step that it belongs to here. What is told in a later epoch of the cell voids what was told before. All answer at
once; equal requests are one. The controller may die and ask everything again: nothing here depends on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .board import Key
from .wire import answer_json, key_from_json, read_json, split_query

__all__ = ["Told", "listening"]

_LOG = logging.getLogger(__name__)
_KEPT = 4096
_LONGEST_WAIT_S = 30.0


class Told:
    """Thread-safe. Keys in and out of `wanted` and `did` are those of the board: their step is the one being made."""

    def __init__(self, version: int = 0) -> None:
        self._changed = threading.Condition()
        self._epoch, self._version, self._seq = -1, version, 0
        self._wanted: list[Key] = []
        self._done: list[tuple[int, Key]] = []
        self._asked: dict[int, int] = {}
        self._applied: list[tuple[int, int]] = []
        self.on_news: Callable[[], None] = lambda: None
        """Called whenever something was told."""

    # The controller.

    def state(self, after: int, wait_s: float) -> dict[str, Any]:
        """What was done, as soon as there is more than `after`."""
        with self._changed:
            self._changed.wait_for(lambda: self._seq > after, min(wait_s, _LONGEST_WAIT_S))
            done = [[epoch, [key[0] - 1, *key[1:]]] for epoch, key in self._done]
            return {"seq": self._seq, "version": self._version, "done": done, "applied": self._applied}

    def run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A micro-step that this process is to compute."""
        epoch, told = int(body["epoch"]), key_from_json(body["key"])
        key = (told[0] + 1, *told[1:])
        with self._changed:
            if epoch > self._epoch:
                self._epoch, self._wanted, self._done = epoch, [], []
            if epoch == self._epoch and key not in self._wanted and (epoch, key) not in self._done:
                self._wanted.append(key)
            self._changed.notify_all()
        self.on_news()
        return {}

    def optimise(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The version that the core is to make of what was computed."""
        version, generation = int(body["version"]), int(body["generation"])
        with self._changed:
            self._asked[version] = generation
            self._settle()
        self.on_news()
        return {}

    # The process.

    def wanted(self) -> list[Key]:
        """What is to be computed, in the order in which it was told."""
        with self._changed:
            return list(self._wanted)

    def wait(self, seconds: float) -> None:
        """Until something is wanted, or so long."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._wanted), seconds)

    def did(self, key: Key) -> None:
        """It is computed, and in a sum that the core has or will have."""
        with self._changed:
            if key in self._wanted:
                self._wanted.remove(key)
                self._done = [*self._done, (self._epoch, key)][-_KEPT:]
                self._news()

    def is_asked(self, version: int) -> bool:
        """Whether the step that makes this version has all that it gets."""
        with self._changed:
            return version in self._asked

    def holds(self, version: int) -> None:
        """The weights are these; for the core: it has made them."""
        with self._changed:
            if version != self._version:
                self._version = version
                self._news()
            self._settle()

    def _settle(self) -> None:
        for version in [version for version in self._asked if version <= self._version]:
            self._applied = [*self._applied, (version, self._asked.pop(version))][-_KEPT:]
            self._news()

    def _news(self) -> None:
        self._seq += 1
        self._changed.notify_all()


@contextmanager
def listening(told: Told, host: str, port: int) -> Iterator[None]:
    """Serve the routes while the context is open. Whoever reaches the address is trusted: keep it on loopback."""
    server = ThreadingHTTPServer((host, port), _handler(told))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="gyre-told", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(told: Told) -> type[BaseHTTPRequestHandler]:
    posts = {"/run": told.run, "/pull": lambda _: {}, "/optimise": told.optimise}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, asked = split_query(self.path)
            if path != "/state":
                answer_json(self, 404, {"error": "wanted /state"})
                return
            answer_json(self, 200, told.state(int(asked.get("after", -1)), float(asked.get("wait", 0))))

        def do_POST(self) -> None:
            try:
                body = read_json(self)
                answer_json(self, 200, posts[self.path](body))
            except (KeyError, TypeError, ValueError) as error:
                answer_json(self, 400, {"error": f"wanted one of {', '.join(posts)} as documented, got {error!r}"})

        def log_message(self, format: str, *args: Any) -> None:
            _LOG.debug(format, *args)

    return Handler
