"""The ASGI application of an observing proxy: everything below `/x/<execution>` passes, the API is as elsewhere."""

from __future__ import annotations

import orjson
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gyre_proxy.address import AddressError, parse_address
from gyre_proxy.api import Api
from gyre_proxy.app import foreign_to, upgrades
from gyre_proxy.exchange import BrokenReplyError
from gyre_proxy.observe.relay import Relay
from gyre_proxy.observe.service import Observer

__all__ = ["build_observe_app"]


def build_observe_app(observer: Observer) -> ASGIApp:
    """The application of `observer`."""
    api, relay = Starlette(routes=Api(observer).routes()), Relay(observer=observer)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif observer.settings.key is None and (foreign := foreign_to(scope)):
            text = f"wanted a request from this machine, got one for or from {foreign}; start the proxy with --key KEY"
            await _error(403, text)(scope, receive, send)
        elif scope["path"].startswith(("/api/", "/metrics")):
            await api(scope, receive, send)
        elif upgrades(scope):
            text = f"wanted {scope['path']} over HTTP, got a WebSocket upgrade, which is not passed on; turn it off"
            await _error(426, text)(scope, receive, send)
        else:
            try:
                await relay.serve(parse_address(scope["path"]), scope, receive, send)
            except AddressError as error:
                await _error(404, str(error))(scope, receive, send)
            except BrokenReplyError:
                return

    return app


def _error(status: int, message: str) -> Response:
    error = {"type": "error", "error": {"type": "not_found_error" if status == 404 else "error", "message": message}}
    return Response(orjson.dumps(error), status, media_type="application/json")
