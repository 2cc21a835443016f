"""An engine's control routes, each answered within a deadline for the whole exchange, whatever the engine does."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from gyre_data.errors import EngineError

__all__ = ["Deadline", "EngineControl", "EngineGone", "NoSuchRoute", "ask"]

_CONTROL_S = 30.0


class NoSuchRoute(EngineError):
    """The other side answered 404: it is of a version without this route."""


class EngineGone(EngineError):
    """Nobody listens at the address."""


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self._at

    def left(self, at_most: float = float("inf")) -> float:
        """Seconds that remain, at most `at_most`, and a tenth of one at least, so that an answer can still be had."""
        return max(0.1, min(at_most, self._at - time.monotonic()))


def ask(
    method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float, key: str | None = None
) -> dict[str, Any]:
    """Return the JSON object of a 2xx answer ({} when there is none); raise EngineError for anything else.

    `timeout_s` bounds connect, request and the last byte of the answer together: an answer that drips is cut off.
    """

    async def exchange() -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else None
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            return await client.request(method, url, json=body, headers=headers)

    async def bounded() -> httpx.Response:
        return await asyncio.wait_for(exchange(), timeout_s)

    try:
        answer = asyncio.run(bounded())
    except TimeoutError:
        raise EngineError(f"{url}: wanted an answer within {timeout_s:g} s, got none; the engine hangs") from None
    except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise EngineGone(f"{url}: wanted an answer, got {error!r}; is the engine up?") from error
    except httpx.HTTPError as error:
        raise EngineError(f"{url}: wanted an answer, got {error!r}; is the engine up?") from error
    if answer.status_code >= 300:
        kind = NoSuchRoute if answer.status_code == 404 else EngineError
        raise kind(f"{url}: wanted success, got {answer.status_code} {answer.text[:300]}; see the engine's log")
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class EngineControl:
    """What a publisher asks of one SGLang server."""

    def __init__(self, url: str, control_s: float = _CONTROL_S) -> None:
        self.url = url.rstrip("/")
        self._control_s = min(control_s, _CONTROL_S)

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Send a command; EngineError unless it succeeded."""
        answer = ask("POST", self.url + path, body or {}, timeout_s=timeout_s or self._control_s)
        if answer.get("success") is False:
            raise EngineError(f"{self.url}{path}: wanted success, got {answer}; see the engine's log")
        return answer

    def pause(self) -> None:
        """Stop computing; requests stay open and are computed again under the weights of then."""
        self.post("/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        """Compute on."""
        self.post("/continue_generation")

    def version(self) -> str | None:
        """The weight version it says that it serves."""
        found = ask("GET", f"{self.url}/model_info", timeout_s=self._control_s).get("weight_version")
        return found if isinstance(found, str) else None

    def info(self) -> dict[str, Any]:
        """Its settings."""
        return ask("GET", f"{self.url}/server_info", timeout_s=self._control_s)

    def digests(self, deadline: Deadline) -> dict[str, str]:
        """Digest of every tensor it serves, by `rank/name` when there are several ranks."""
        answer = self.post("/weights_checker", {"action": "checksum"}, timeout_s=deadline.left())
        ranks = answer.get("ranks") or []
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"{i}/{name}": digest for i, rank in enumerate(ranks) for name, digest in rank["checksums"].items()}

    def load(self, folder: str, version: str, deadline: Deadline) -> None:
        """Have it load a folder from a disk it sees; its caches are flushed, no request is aborted."""
        body = {"model_path": folder, "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        answer = self.post("/update_weights_from_disk", body, timeout_s=deadline.left())
        if answer.get("success") is not True:
            raise EngineError(f"{self.url}: wanted weights {version} loaded, got {answer}; see the engine's log")
