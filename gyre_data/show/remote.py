"""Appending a verdict to a run that may be recorded right now: the folder's owner must write it."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from gyre_data.errors import ConfigError, DataError
from gyre_data.lock import is_locked
from gyre_data.reader import Run
from gyre_data.scores import make_score, score

__all__ = ["append_score"]

_TIMEOUT_S = 30.0


def append_score(
    run: Run, execution_id: str, value: float | None, *, evaluator: str, key: str | None = None, **more: Any
) -> str | None:
    """Append a verdict; return the endpoint that wrote it, or None when it was written here under the run's lock.

    While a proxy owns the folder its HTTP API is used. `more` as in `gyre_data.scores.make_score`; a value that is not
    a number is refused before anything is sent.
    """
    row = make_score(execution_id, value, evaluator=evaluator, **more)
    endpoint = (run.info.get("endpoints") or {}).get("proxy")
    if endpoint and is_locked(run.path / "lock"):
        body = {
            "evaluator": row.evaluator,
            "version": row.evaluator_version,
            "status": str(row.status),
            "value": row.value,
            "partial": row.partial,
            "detail": row.detail,
            "state_id": row.state_id,
        }
        if _post(f"{endpoint.rstrip('/')}/api/executions/{quote(execution_id, safe='')}/scores", body, key):
            return str(endpoint)
    score(run, execution_id, value, evaluator=evaluator, **more)
    return None


def _post(url: str, body: dict[str, Any], key: str | None) -> bool:
    """True when the proxy took it; False when nobody listens there. A refusal raises with the proxy's own words."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = Request(url, json.dumps(body).encode(), headers, method="POST")
    try:
        with urlopen(request, timeout=_TIMEOUT_S):
            return True
    except HTTPError as error:
        told = _words(error.read(65536))
        if error.code in (401, 403):
            raise ConfigError(
                f"the proxy at {url} wants a key ({error.code}); set GYRE_KEY to the one it was started with"
            ) from error
        raise DataError(f"the proxy at {url} refused the score: {error.code} {told}; see its log") from error
    except (URLError, TimeoutError):
        return False


def _words(body: bytes) -> str:
    """The message of an error body, or the body itself when it is none of ours."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode(errors="replace").strip()
