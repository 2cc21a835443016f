"""JSON over HTTP to the proxy, engines and trainers, each call bounded; whatever goes wrong is an OSError."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

__all__ = ["RefusedError", "ask"]

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Cells are reached directly, whatever the environment says of proxies."""


class RefusedError(OSError):
    """The other side answered and refused; `status` is its HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def ask(url: str, body: dict[str, Any] | None = None, *, timeout_s: float, key: str | None = None) -> dict[str, Any]:
    """Return the JSON object of the answer, {} when it is none; a POST when there is a body, else a GET.

    `timeout_s` bounds connecting and each silence. RefusedError for a status above 299, OSError when nobody answers.
    """
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with _OPENER.open(request, timeout=timeout_s) as answer:
            read = answer.read()
    except urllib.error.HTTPError as error:
        with error:
            told = error.read(500).decode(errors="replace")
        raise RefusedError(f"{url}: wanted success, got {error.code} {told}", error.code) from None
    except (http.client.HTTPException, ValueError) as error:
        raise ConnectionError(f"{url}: wanted an answer, got {error!r}; is it an address of HTTP?") from error
    try:
        found = json.loads(read)
    except ValueError:  # SGLang answers some routes with nothing, or with words
        return {}
    return found if isinstance(found, dict) else {}
