"""What the controller asks of the proxy: engines come and go, groups become executions, and what became of those."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from .wire import RefusedError, ask

__all__ = ["ProxyApi"]


class ProxyApi:
    """The proxy's HTTP API; every call may be repeated."""

    def __init__(self, url: str, *, key: str | None, call_s: float) -> None:
        self._url, self._key, self._call_s = url.rstrip("/"), key, call_s

    def _ask(self, path: str, body: dict[str, Any] | None = None, more_s: float = 0.0) -> dict[str, Any]:
        return ask(f"{self._url}{path}", body, timeout_s=self._call_s + more_s, key=self._key)

    def admit(self, url: str) -> str:
        """Give calls to an engine; returns the version that the proxy knows it by."""
        return str(self._ask("/api/engines", {"action": "add", "url": url}).get("version"))

    def drain(self, url: str) -> None:
        """No new calls for an engine."""
        self._change("drain", url)

    def remove(self, url: str) -> None:
        """Forget an engine; its replies go on elsewhere."""
        self._change("remove", url)

    def tell_version(self, url: str, label: str) -> None:
        """An engine has other weights now."""
        self._change("version", url, version=label)

    def engines(self) -> dict[str, dict[str, Any]]:
        """Every engine, by its URL."""
        return {one["url"]: one for one in self._ask("/api/engines").get("engines", [])}

    def _change(self, action: str, url: str, **more: str) -> None:
        try:
            self._ask("/api/engines", {"action": action, "url": url, **more})
        except RefusedError as error:
            if error.status != 400:  # 400: it does not know that engine, so there is nothing to change
                raise

    def executions(self, group: str) -> list[dict[str, Any]]:
        """Those of a group."""
        found = self._ask(f"/api/executions?group={quote(group, safe='')}").get("executions", [])
        return list(found)

    def create_group(self, group: str, task: str, size: int) -> None:
        """Name a group; its executions follow."""
        self._ask("/api/groups", {"id": group, "task": task, "size": size})

    def create_execution(self, group: str, task: str, index: int, launcher: dict[str, Any]) -> None:
        """Queue one."""
        body = {"group": group, "task": task, "sample_index": index, "launcher": launcher}
        self._ask("/api/executions", body)

    def end(self, execution: str, reason: str) -> None:
        """End one; what its harness does from now on is not recorded."""
        self._ask(f"/api/executions/{quote(execution, safe='')}/end", {"reason": reason})

    def events(self, start: int, wait_s: int) -> dict[str, Any]:
        """What happened from there on, and where to go on from."""
        return self._ask(f"/api/events?from={start}&limit=10000&wait={wait_s}", more_s=wait_s)
