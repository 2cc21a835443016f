"""The ASGI application: model calls below `/x/`, the API, and nothing in between them and the socket.

Model calls bypass Starlette's middleware: streams must not be buffered, and a broken reply must break its connection.
"""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .address import Address, AddressError, parse_address
from .api import Api
from .exchange import BrokenReplyError, serve_call
from .faults import CallError
from .service import Proxy
from .settings import is_loopback

__all__ = ["build_app", "foreign_to", "upgrades"]


def build_app(proxy: Proxy) -> ASGIApp:
    """The application of `proxy`."""
    api = Starlette(routes=Api(proxy).routes())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and proxy.settings.key is None and (foreign := foreign_to(scope)):
            text = f"wanted a request from this machine, got one for or from {foreign}; start the proxy with --key KEY"
            await Response(orjson.dumps({"error": {"message": text}}), 403)(scope, receive, send)
        elif scope["type"] == "http" and not scope["path"].startswith(("/api/", "/metrics")):
            try:
                await _serve(proxy, scope, receive, send)
            except BrokenReplyError:
                return
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await api(scope, receive, send)

    return app


async def _serve(proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
    method, path = scope["method"], scope["path"]
    if method == "HEAD":
        await Response(b"")(scope, receive, send)
        return
    address: Address | AddressError
    try:
        address = parse_address(path)
    except AddressError as error:
        address = error
    if isinstance(address, Address) and method == "GET" and address.rest == "v1/models":
        await (await _models(proxy, address, scope))(scope, receive, send)
        return
    if isinstance(address, Address) and method == "GET" and address.wire == "openai_responses" and upgrades(scope):
        # The answer at which Codex goes on over HTTP; frames are never read, so a warm-up is never sampled.
        text = f"wanted POST {path}, got a WebSocket upgrade; this proxy speaks HTTP only: turn supports_websockets off"
        await Response(orjson.dumps({"error": {"message": text}}), 426, media_type="application/json")(
            scope, receive, send
        )
        return
    wire = address.wire if isinstance(address, Address) else None
    if isinstance(address, Address) and (wire is None or method != "POST"):
        address = AddressError(
            f"{method} {path}: this proxy serves POST {address.base}/v1/messages, "
            f"POST {address.base}/v1/chat/completions, POST {address.base}/v1/responses "
            f"and GET {address.base}/v1/models; use one of them"
        )
    if wire is None:
        wire = "anthropic" if "/messages" in path or path in ("", "/") else "openai_chat"
    await serve_call(proxy, address, scope, receive, send, wire)


def upgrades(scope: Scope) -> bool:
    """Whether the client asks for a WebSocket."""
    return any(name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"])


def foreign_to(scope: Scope) -> str | None:
    """The name that shows a web page of elsewhere behind a request: without a key, a browser must not get in."""
    headers = dict(scope["headers"])
    for name in (b"host", b"origin"):
        value = headers.get(name, b"").decode("latin-1")
        host = urlsplit(value if "://" in value else f"//{value}").hostname
        if host and not is_loopback(host) and not host.endswith((".localhost", ".internal")):
            return host
    return None


async def _models(proxy: Proxy, address: Address, scope: Scope) -> Response:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    try:
        await proxy.learn(address.execution)
        proxy.authorize(proxy.executions.get(address.execution), headers)
    except CallError as error:
        return Response(orjson.dumps({"error": {"message": str(error)}}), 401, media_type="application/json")
    model = {
        "id": "gyre-policy",
        "object": "model",
        "type": "model",
        "display_name": "Gyre policy",
        "created": int(proxy.started_at),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(proxy.started_at)),
        "owned_by": "gyre",
        "max_model_len": proxy.context_window,
    }
    page = {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}
    return Response(orjson.dumps(page), media_type="application/json")
