"""Serves a run as a page on this machine and follows it while it is written.

Standard library only. One `Run` is shared behind a lock and moved on a few times a second while somebody watches; the
page is told that there is something new and asks for what changed. Requests are refused unless they name this server
in `Host` (a foreign site that resolves its own name to 127.0.0.1 does not), and, for others than loopback, carry the
token that the printed address sets as a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from gyre_data.errors import ConfigError, DataError, GyreError
from gyre_data.execution import Execution, executions, find
from gyre_data.reader import Run

from .changes import History
from .data import Kept, execution_model, node_tokens, run_figures, run_model
from .page import page, policy
from .texts import Texts
from .vocabulary import Vocabulary

__all__ = ["Following", "ViewServer", "is_loopback"]

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_BEAT_S = 10.0
_MAX_BODY = 8 << 20
_COOKIE = "gyre_view"
_MOST_KEPT = 8


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Following:
    """A run that moves on: every answer is of one snapshot, `wait` returns when there is another."""

    def __init__(self, run: Run, *, j_max: int | None = 5, evaluators: Mapping[str, float] | None = None) -> None:
        self._run, self._j_max, self._evaluators = run, j_max, evaluators
        self._lock, self._counting = threading.RLock(), threading.Lock()
        self._second: Run | None = None
        self._counted: tuple[int, Any] = (0, None)
        self._changed = threading.Condition()
        self._texts = Texts(run)
        self._rows: dict[str, Kept] = {}
        self._vocabulary: Vocabulary | None = None
        self._kept: dict[tuple[str, str | None], tuple[int, Any]] = {}
        self._told: dict[tuple[str, str | None], History] = {}
        self._watchers = 0
        # No version of an earlier server is one of ours: a page that outlived it must not take our changes for its own.
        self.version = time.time_ns() // 1_000_000

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return str(self._run.path).rsplit("/", 1)[-1]

    def refresh(self) -> bool:
        """Take a new snapshot; True and a new version if anything was added."""
        with self._lock:
            moved = self._run.refresh()
            if moved:
                self.version += 1
        if moved:
            with self._changed:
                self._changed.notify_all()
        return moved

    def wait(self, version: int, timeout_s: float) -> int:
        """The version once it is another than `version`, or after the timeout the same."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != version, timeout_s)
        return self.version

    def watch(self, stop: threading.Event) -> None:
        """Refresh until `stop`, while somebody waits; what cannot be read now is tried again."""
        told = ""
        while not stop.wait(_POLL_S):
            try:
                if self._watchers:
                    self.refresh()
            except (GyreError, OSError) as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("%s cannot be followed: %s", self._run.path, told)

    def watching(self, change: int) -> None:
        """Note that somebody began (1) or ceased (-1) to wait for news."""
        with self._changed:
            self._watchers += change

    def run_model(self, since: int = 0) -> dict[str, Any]:
        """`data.run_model`: the whole, or what changed `since` a version of it; see `changes.History`."""
        if not self._watchers:  # nobody moves it on meanwhile
            self.refresh()
        return self._since("run", None, since, lambda: run_model(self._run))

    def figures(self) -> Any:
        """See `data.run_figures`. Counted on a snapshot of its own: who asks for calls does not wait for it."""
        with self._counting:
            version, found = self._counted
            if version != self.version:
                version = self.version
                self._second = self._second or Run(self._run.path)
                self._second.refresh()
                found = run_figures(self._second, j_max=self._j_max, evaluators=self._evaluators)
                self._counted = version, found
            return found

    def execution(self, execution_id: str, since: int = 0) -> dict[str, Any]:
        """`data.execution_model`: the whole, or what changed `since` a version of it; see `changes.History`."""

        def make() -> Any:
            loaded = self._load(execution_id)
            kept = self._rows.setdefault(loaded.execution_id, Kept(self._texts))
            _drop(self._rows, _MOST_KEPT)
            return execution_model(loaded, kept, j_max=self._j_max)

        return self._since("execution", execution_id, since, make)

    def tokens(self, execution_id: str, node_ids: list[str]) -> bytes:
        """Ids, then log-probs, of these nodes end to end."""
        with self._lock:
            tree = self._of_version("tree", execution_id, lambda: self._load(execution_id)).tree
            if unknown := [name for name in node_ids if name not in tree.index]:
                raise DataError(f"wanted nodes of {execution_id}, got {unknown[0]!r}; load the page anew")
            return b"".join(node_tokens(tree, (tree.index[name] for name in node_ids)))

    def texts(self, blob_ids: list[str]) -> dict[str, str | None]:
        """Blobs as text; None for one that cannot be read."""
        with self._lock:
            return {name: self._texts.plain(name) for name in blob_ids}

    def vocabulary(self, ids: list[int]) -> dict[str, Any]:
        """Texts of token ids, or why there are none."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._run)
            return {"problem": self._vocabulary.problem, "texts": self._vocabulary.texts(ids)}

    def _load(self, execution_id: str) -> Execution:
        known = executions(self._run)
        loaded = self._of_version("tree", execution_id, lambda: Execution(self._run, known[find(known, execution_id)]))
        assert isinstance(loaded, Execution)
        return loaded

    def _since(self, kind: str, name: str | None, since: int, make: Callable[[], Any]) -> dict[str, Any]:
        with self._lock:
            told = self._told.setdefault((kind, name), History())
            _drop(self._told, _MOST_KEPT)
            if told.version != self.version:
                told.move(self.version, make())
            return told.since(since)

    def _of_version(self, kind: str, name: str | None, make: Callable[[], Any]) -> Any:
        """What `make` gives for the present snapshot, made once."""
        with self._lock:
            version, found = self._kept.get((kind, name), (0, None))
            if version != self.version:
                found = make()
                stale = [key for key, (of, _) in self._kept.items() if of != self.version]
                for key in stale:
                    del self._kept[key]
                self._kept[kind, name] = (self.version, found)
                _drop(self._kept, _MOST_KEPT)
            return found


class ViewServer(ThreadingHTTPServer):
    """Serves one run; `url` opens it. Raises ConfigError for an address that others can reach unless `remote`."""

    daemon_threads = True

    def __init__(
        self,
        run: Run,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        remote: bool = False,
        token: str | None = None,
        j_max: int | None = 5,
        evaluators: Mapping[str, float] | None = None,
    ) -> None:
        if not is_loopback(host) and not remote:
            raise ConfigError(
                f"wanted an address of this machine alone, got --host {host}: whoever reaches it could read every "
                "prompt; leave --host out, or add --remote, which asks each browser for a token"
            )
        self.token = (token or secrets.token_urlsafe(24)) if remote else None
        self.following = Following(run, j_max=j_max, evaluators=evaluators)
        self._stop = threading.Event()
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise ConfigError(f"wanted to serve on {host} port {port}, got: {error}; name another --port") from error
        self.host = host
        threading.Thread(target=self.following.watch, args=(self._stop,), daemon=True).start()

    @property
    def url(self) -> str:
        """Address of the page, with the token where one is asked for."""
        shown = f"[{self.host}]" if ":" in self.host.strip("[]") else self.host
        return f"http://{shown}:{self.server_address[1]}/" + (f"?token={self.token}" if self.token else "")

    def url_of(self, execution_id: str, call_id: str | None = None) -> str:
        """Address of an execution, or of a call of it."""
        return f"{self.url}#e={quote(execution_id)}" + (f"&c={quote(call_id)}" if call_id else "")

    def server_close(self) -> None:
        """Stop following and close the socket."""
        self._stop.set()
        super().server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "gyre", ""

    def do_GET(self) -> None:
        """The page, its data, and the stream of changes."""
        at = urlsplit(self.path)
        asked = {name: values[-1] for name, values in parse_qs(at.query).items()}
        if at.path == "/" and self.server.token and _same(asked.get("token", ""), self.server.token):
            self._enter()
        elif self._allowed():
            self._answer(at.path, lambda: self._get(at.path, asked))

    def do_POST(self) -> None:
        """Texts, tokens and vocabulary by id: too many for an address."""
        if not self._allowed():
            return
        size = self.headers.get("Content-Length", "")
        if not size.isdigit() or int(size) > _MAX_BODY or self.headers.get_content_type() != "application/json":
            self._send(HTTPStatus.BAD_REQUEST, b"wanted a JSON body", "text/plain")
            return
        body = self.rfile.read(int(size))
        self._answer(self.path, lambda: self._post(self.path, json.loads(body)))

    def _get(self, path: str, asked: dict[str, str]) -> Any:
        following = self.server.following
        match path:
            case "/":
                return "".join(page(title=f"{following.name} - gyre view"))
            case "/api/run":
                return following.run_model(int(asked.get("since", 0)))
            case "/api/figures":
                return following.figures()
            case "/api/execution":
                return following.execution(asked["id"], int(asked.get("since", 0)))
            case "/api/events":
                return self._events
        raise KeyError(path)

    def _post(self, path: str, body: Any) -> Any:
        following = self.server.following
        match path:
            case "/api/texts":
                return following.texts([str(name) for name in body["ids"]])
            case "/api/tokens":
                return following.tokens(str(body["execution"]), [str(name) for name in body["nodes"]])
            case "/api/vocabulary":
                return following.vocabulary([int(one) for one in body["ids"]])
        raise KeyError(path)

    def _answer(self, path: str, make: Callable[[], Any]) -> None:
        try:
            found = make()
        except GyreError as error:
            self._send(HTTPStatus.CONFLICT, str(error).encode(), "text/plain; charset=utf-8")
        except (KeyError, ValueError, TypeError) as error:
            self._send(HTTPStatus.NOT_FOUND, f"nothing at {path}: {error}".encode(), "text/plain; charset=utf-8")
        else:
            if callable(found):
                found()
            elif isinstance(found, bytes):
                self._send(HTTPStatus.OK, found, "application/octet-stream")
            elif isinstance(found, str):
                csp = {"Content-Security-Policy": policy(served=True)}
                self._send(HTTPStatus.OK, found.encode(), "text/html; charset=utf-8", csp)
            else:
                data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
                self._send(HTTPStatus.OK, data, "application/json")

    def _events(self) -> None:
        """Server-sent events: the version, whenever there is another, and a comment now and then."""
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": "text/event-stream", **_HEADERS, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        following, version = self.server.following, 0
        following.watching(1)
        try:
            while True:
                now = following.wait(version, _BEAT_S)
                self.wfile.write(b": still here\n\n" if now == version else f"data: {now}\n\n".encode())
                version = now
        except OSError:
            pass
        finally:
            following.watching(-1)

    def _allowed(self) -> bool:
        if self.server.token is None:
            good = is_loopback(_host(self.headers.get("Host", "")))
        else:
            good = _same(self._cookie(), self.server.token)
        if not good:
            told = "open the address that `gyre view` printed"
            self._send(HTTPStatus.FORBIDDEN, told.encode(), "text/plain; charset=utf-8")
        return good

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            return ""
        return found.value if found else ""

    def _enter(self) -> None:
        """Keep the token as a cookie and take it out of the address."""
        cookie = f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain", {"Location": "/", "Set-Cookie": cookie})

    def _send(self, status: HTTPStatus, data: bytes, kind: str, more: dict[str, str] | None = None) -> None:
        self.close_connection |= status >= HTTPStatus.BAD_REQUEST  # a body may be left unread
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), **_HEADERS, **(more or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address and waits."""


def _drop(kept: dict[Any, Any], most: int) -> None:
    """Forget the oldest entries, so that looking at a thousand executions does not keep a thousand."""
    while len(kept) > most:
        del kept[next(iter(kept))]


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _host(header: str) -> str:
    """The host that a `Host` header names, without its port; empty for nonsense."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
