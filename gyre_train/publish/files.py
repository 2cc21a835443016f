"""Publish by files: engines reload a Hugging Face folder from a disk they share with the trainer.

Per engine: pause (`retract`: requests stay open and are computed again), load, flush, confirm the version, continue.
`continue` is always sent, whatever failed before. Every wait is bounded: a hanging engine costs `timeout_s`, no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from gyre_data.errors import EngineError
from gyre_data.types import PolicyVersion

from . import Published

__all__ = ["FilePublisher"]

_LOG = logging.getLogger(__name__)
_CONTROL_TIMEOUT_S = 30.0


class FilePublisher:
    """Publishes to engines by `update_weights_from_disk` and tells the proxy, when there is one."""

    def __init__(self, engines: Sequence[str], *, proxy: str | None = None, timeout_s: float = 600.0) -> None:
        self._engines = tuple(url.rstrip("/") for url in engines)
        self._proxy = proxy.rstrip("/") if proxy else None
        self._timeout_s = timeout_s

    def publish(self, folder: Path, version: PolicyVersion) -> tuple[Published, ...]:
        """Make the engines serve the weights in `folder` as `version`, all at the same time."""
        if not self._engines:
            return ()
        with ThreadPoolExecutor(max_workers=len(self._engines)) as pool:
            return tuple(pool.map(lambda url: self._one(url, folder.resolve(), version), self._engines))

    def _one(self, url: str, folder: Path, version: PolicyVersion) -> Published:
        started = time.monotonic()
        errors: list[str] = []
        with httpx.Client(timeout=min(self._timeout_s, _CONTROL_TIMEOUT_S), trust_env=False) as client:
            for act in (
                lambda: self._swap(client, url, folder, version),
                lambda: _post(client, f"{url}/continue_generation", {}),
                lambda: self._tell_proxy(client, url, version, failed=bool(errors)),
            ):
                try:
                    act()
                except EngineError as failure:
                    errors.append(str(failure))
                    _LOG.warning("publishing %s: %s", version, failure)
        error = "; ".join(errors) or None
        return Published(engine=url, version=version, seconds=time.monotonic() - started, error=error)

    def _tell_proxy(self, client: httpx.Client, url: str, version: PolicyVersion, *, failed: bool) -> None:
        if self._proxy is not None and not failed:
            _post(client, f"{self._proxy}/api/engines", {"action": "version", "url": url, "version": str(version)})

    def _swap(self, client: httpx.Client, url: str, folder: Path, version: PolicyVersion) -> None:
        _post(client, f"{url}/pause_generation", {"mode": "retract"})
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = _post(client, f"{url}/update_weights_from_disk", body, timeout_s=self._timeout_s)
        if answer.get("success") is not True:
            raise EngineError(f"{url}: wanted weights {version} loaded, got {answer}; see the engine's log")
        served = _request(client, "GET", f"{url}/model_info").get("weight_version")
        if served != str(version):
            raise EngineError(f"{url}: wanted it to serve {version}, it says {served}; does someone else publish?")


def _post(client: httpx.Client, url: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
    return _request(client, "POST", url, body, timeout_s)


def _request(
    client: httpx.Client, method: str, url: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
) -> dict[str, Any]:
    """Return the JSON object of a 2xx answer ({} when there is none); raise EngineError for anything else."""
    timeout = client.timeout if timeout_s is None else httpx.Timeout(timeout_s)
    try:
        answer = client.request(method, url, json=body, timeout=timeout)
    except httpx.TimeoutException:
        raise EngineError(f"{url}: wanted an answer within {timeout.read:g} s, got none; the engine hangs") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineError(f"{url}: wanted an answer, got {error!r}; is the engine up?") from error
    if answer.status_code >= 300:
        raise EngineError(f"{url}: wanted success, got {answer.status_code} {answer.text[:300]}; see the engine's log")
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
