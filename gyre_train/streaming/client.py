"""A satellite's side of the core's address: found again when the core comes back, and what it may answer."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from gyre_data.errors import ConfigError, EngineError
from gyre_train.publish.control import EngineGone
from gyre_train.publish.mooncake import KEY_VARIABLE

from .board import Gone
from .server import ADDRESS_FILE

__all__ = ["Client", "Over", "ended_before"]

_TIMEOUT_S = 30.0


class Over(EngineGone):
    """The core's folder says that training is over."""


def ended_before(where: str) -> str | None:
    """What a core that has ended left in the folder `where`; None for another core's address, or a URL."""
    if where.startswith(("http://", "https://")):
        return None
    try:
        text = (Path(where) / ADDRESS_FILE).read_text(encoding="utf-8")
        return text if json.loads(text).get("over") else None
    except (OSError, ValueError):
        return None


class Client:
    """Requests to the core at `where`: its URL, or the folder in which it tells it. One thread may use it.

    An end that was told before (`stale`, of `ended_before`) is not heeded: that training may be about to go on.
    """

    def __init__(self, where: str, stale: str | None = None) -> None:
        self._where, self._stale = where, stale
        key = os.environ.get(KEY_VARIABLE)
        self._http = httpx.Client(
            timeout=_TIMEOUT_S, trust_env=False, headers={"Authorization": f"Bearer {key}"} if key else None
        )

    def url(self) -> str:
        """Where the core is now; EngineGone when the folder does not tell yet, Over when there will be none."""
        if self._where.startswith(("http://", "https://")):
            return self._where.rstrip("/")
        file = Path(self._where) / ADDRESS_FILE
        try:
            text = file.read_text(encoding="utf-8")
            told = json.loads(text)
            url = str(told["url"])
        except (OSError, ValueError, KeyError) as error:
            raise EngineGone(f"{file}: wanted the core's address, got {error!r}; is `gyre train` up?") from error
        if told.get("over") and text != self._stale:
            raise Over(f"{file}: training is over")
        return url

    def get(self, path: str) -> dict[str, Any]:
        """Ask."""
        found: dict[str, Any] = self._sent("GET", path, None).json()
        return found

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Tell; raises Gone when this worker is not known any more, EngineGone when nobody answers."""
        found: dict[str, Any] = self._sent("POST", path, body).json()
        return found

    def post_for_bytes(self, path: str, **body: Any) -> bytes:
        """The same where the answer is no JSON."""
        return self._sent("POST", path, body).content

    def own_host(self) -> str:
        """This machine's address as the core's machine sees it."""
        where = urlsplit(self.url())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((where.hostname or "127.0.0.1", where.port or 80))
            return str(probe.getsockname()[0])

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def _sent(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        url = self.url() + path
        try:
            answer = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise EngineGone(f"{url}: wanted an answer, got {error!r}; is `gyre train` up?") from error
        if answer.status_code == 200:
            return answer
        told = f"{url}: wanted success, got {answer.status_code} {answer.text[:300]}"
        match answer.status_code:
            case 410:
                raise Gone(told)
            case 401:
                raise ConfigError(told)
        raise EngineError(f"{told}; are both of one release?")
