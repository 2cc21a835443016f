"""Appending verdicts to a run that may be recorded right now: the folder's owner must write them.

While a proxy owns the folder its HTTP API is used, which it names in `run.json`; else the folder is locked and written
here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from .errors import ConfigError, DataError
from .lock import is_locked
from .reader import Run
from .types import Score
from .writer import RunWriter

__all__ = ["append_scores"]

_TIMEOUT_S = 30.0
_SENT = ("value", "partial", "detail", "state_id", "config_digest")


def append_scores(run: Run, rows: Sequence[Score], *, key: str | None = None) -> tuple[list[Score], str | None]:
    """Append verdicts durably; return them as they were stored, and the endpoint of the proxy that wrote them, if one.

    Under the run's lock all are one commit; a proxy takes them one by one. `key` is the key that the proxy wants.
    """
    endpoint = (run.info.get("endpoints") or {}).get("proxy")
    stored: list[Score] = []
    if endpoint and is_locked(run.path / "lock"):
        for row in rows:
            url = f"{endpoint.rstrip('/')}/api/executions/{quote(row.execution_id, safe='')}/scores"
            body = {"evaluator": row.evaluator, "version": row.evaluator_version, "status": str(row.status)}
            answer = _post(url, body | {name: getattr(row, name) for name in _SENT}, key)
            if answer is None:
                break
            stored.append(replace(row, score_id=answer.get("score_id", row.score_id)))
        if len(stored) == len(rows):
            return stored, str(endpoint)
    rest = rows[len(stored) :]
    with RunWriter(run.path, create=False) as writer:
        writer.write(rest)
    return [*stored, *rest], None


def _post(url: str, body: dict[str, Any], key: str | None) -> dict[str, Any] | None:
    """The proxy's answer; None when nobody listens there. A refusal raises with the proxy's own words."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = Request(url, json.dumps(body).encode(), headers, method="POST")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as reply:
            return _object(reply.read())
    except HTTPError as error:
        told = _words(error.read(65536))
        if error.code in (401, 403):
            raise ConfigError(
                f"the proxy at {url} wants a key ({error.code}); set GYRE_KEY to the one it was started with"
            ) from error
        raise DataError(f"the proxy at {url} refused the score: {error.code} {told}; see its log") from error
    except (URLError, TimeoutError):
        return None


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _words(body: bytes) -> str:
    """The message of an error body, or the body itself when it is none of ours."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace").strip()
