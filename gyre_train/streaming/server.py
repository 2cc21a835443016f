"""The hub's HTTP address. JSON both ways, but for packs, which are npz; 410 is `Gone`: the satellite joins again."""

from __future__ import annotations

import hmac
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gyre_data.errors import ConfigError, GyreError
from gyre_train.publish.mooncake import KEY_VARIABLE
from gyre_train.publish.receiver import is_loopback

from .board import Gone
from .engines import EngineWeights
from .hub import Hub
from .wire import answer_json, read_json, split_query

__all__ = ["ADDRESS_FILE", "serving", "tell_over"]

ADDRESS_FILE = "stream.json"
"""In the trainer's folder: {url, pid} of the core that runs, or ran last; with `over` when training has ended."""
_LOG = logging.getLogger(__name__)


@contextmanager
def serving(hub: Hub, host: str, port: int, folder: Path, weights: EngineWeights | None = None) -> Iterator[str]:
    """Serve the hub, and `weights` for engines, while the context is open, tell the address in `folder`, give it."""
    key = os.environ.get(KEY_VARIABLE)
    if not key and not is_loopback(host):
        raise ConfigError(f"stream.host = {host}: wanted a key for others to join, got none; set {KEY_VARIABLE}")
    try:
        server = ThreadingHTTPServer((host, port), _handler(hub, key, weights))
    except OSError as error:
        raise ConfigError(f"stream.port = {port}: wanted to listen on {host}, got {error}; set another") from error
    server.daemon_threads = True
    url = f"http://{host}:{server.server_address[1]}"
    _tell(folder, {"url": url, "pid": os.getpid()})
    thread = threading.Thread(target=server.serve_forever, name="gyre-stream", daemon=True)
    thread.start()
    try:
        yield url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tell_over(folder: Path) -> None:
    """Say there that training has ended: a satellite that the core did not know of yet waits for no other."""
    told = json.loads((folder / ADDRESS_FILE).read_text(encoding="utf-8"))
    _tell(folder, {**told, "over": True})


def _tell(folder: Path, what: Mapping[str, Any]) -> None:
    partial = folder / f".{ADDRESS_FILE}.partial"
    partial.write_text(json.dumps(what), encoding="utf-8")
    partial.rename(folder / ADDRESS_FILE)


def _handler(hub: Hub, key: str | None, weights: EngineWeights | None) -> type[BaseHTTPRequestHandler]:
    gets: dict[str, Callable[[Mapping[str, str]], Mapping[str, Any]]] = {
        "/hello": lambda _: hub.hello(),
        "/step": lambda _: hub.view(),
        "/events": lambda asked: hub.events(int(asked.get("after", 0))),
    }
    posts: dict[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | bytes]] = {
        "/join": hub.join, "/beat": hub.beat, "/pulled": hub.pulled, "/claim": hub.claim, "/packs": hub.packs,
        "/hand_in": hub.hand_in, "/leave": hub.leave, "/lost": hub.lost,
    }  # fmt: skip
    if (told := hub.told) is not None:
        gets["/state"] = lambda asked: told.state(int(asked.get("after", -1)), float(asked.get("wait", 0)))
        posts |= {"/run": told.run, "/pull": lambda _: {}, "/optimise": told.optimise}
    if weights is not None:
        posts["/weights"] = weights.bring

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, asked = split_query(self.path)
            self._do(gets.get(path), lambda: asked)

        def do_POST(self) -> None:
            self._do(posts.get(self.path), lambda: read_json(self))

        def _do(self, route: Callable[[Any], Mapping[str, Any] | bytes] | None, body: Callable[[], Any]) -> None:
            if key and not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {key}"):
                self.close_connection = True  # the body is not read
                answer_json(self, 401, {"error": f"wanted the key of this core; set {KEY_VARIABLE}"})
                return
            try:
                given = body()
                if route is None:
                    answer_json(self, 404, {"error": f"wanted one of {', '.join([*gets, *posts])}"})
                    return
                answer_json(self, 200, route(given))
            except Gone as gone:
                answer_json(self, 410, {"error": str(gone)})
            except (GyreError, ValueError, KeyError, TypeError) as error:
                _LOG.warning("%s: %r", self.path, error)
                answer_json(self, 400, {"error": f"{type(error).__name__}: {error}"})

        def log_message(self, format: str, *args: Any) -> None:
            _LOG.debug(format, *args)

    return Handler
