"""Serves a run as a page on this machine and follows it while it is written.

Standard library only. The page is told that there is something new and asks for what changed (`following`). Requests
are refused unless they name this server in `Host` (a foreign site that resolves its own name to 127.0.0.1 does not),
and, for others than loopback, carry the token that the printed address sets as a cookie.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from gyre_data.errors import ConfigError, GyreError
from gyre_data.reader import Run

from .following import Following
from .loopback import is_loopback
from .page import page, policy
from .training import Training

__all__ = ["ViewServer"]

_BEAT_S = 10.0
_MAX_BODY = 8 << 20
_COOKIE = "gyre_view"


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
        training: Training | None = None,
        look: Callable[[], Training | None] | None = None,
    ) -> None:
        if not is_loopback(host) and not remote:
            raise ConfigError(
                f"wanted an address of this machine alone, got --host {host}: whoever reaches it could read every "
                "prompt; leave --host out, or add --remote, which asks each browser for a token"
            )
        self.token = (token or secrets.token_urlsafe(24)) if remote else None
        self.following = Following(run, j_max=j_max, evaluators=evaluators, training=training, look=look)
        self._stop = threading.Event()
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise ConfigError(f"wanted to serve on {host} port {port}, got: {error}; name another --port") from error
        self.host = host
        for watch in (self.following.watch, self.following.watch_training):
            threading.Thread(target=watch, args=(self._stop,), daemon=True).start()

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
            case "/api/training":
                return following.training_model(int(asked.get("since", 0)))
            case "/api/step":
                return following.step(int(asked["n"]))
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
        """Server-sent events: the versions of run and training, whenever one is another, and a comment now and then."""
        self.send_response(HTTPStatus.OK)
        for name, value in {"Content-Type": "text/event-stream", **_HEADERS, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        following, told = self.server.following, (0, 0)
        following.watching(1)
        try:
            while True:
                now = following.wait(told, _BEAT_S)
                news = [f"data: {now[0]}\n\n"] if now[0] != told[0] else []
                news += [f"event: training\ndata: {now[1]}\n\n"] if now[1] != told[1] else []
                self.wfile.write("".join(news or [": still here\n\n"]).encode())
                told = now
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
