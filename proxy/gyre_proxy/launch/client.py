"""Client of the proxy's HTTP API, for launchers and for own harnesses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from gyre_data.errors import ConfigError, EngineError

__all__ = ["ProxyClient", "RunningExecution", "endpoint_of", "serves"]


def endpoint_of(run: Path) -> str | None:
    """The proxy's address in the run's `run.json`, or None when the folder has none yet. It may be down."""
    try:
        info = json.loads((run / "run.json").read_text())
    except FileNotFoundError:
        return None
    proxy = info.get("endpoints", {}).get("proxy")
    return str(proxy) if proxy else None


def serves(endpoint: str, run: Path, key: str | None) -> bool:
    """Whether the proxy at `endpoint` is up and records to `run`; another run's proxy may have taken its port."""
    try:
        answer = httpx.get(f"{endpoint}/api/status", headers=_credentials(key), timeout=5.0, trust_env=False)
        return bool(answer.status_code == 200 and answer.json()["run"] == str(run.resolve()))
    except (httpx.TransportError, ValueError, KeyError):
        return False


def _credentials(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


class ProxyClient:
    """Calls of the API, one method each. A proxy that is down for up to `patience_s` seconds is waited for.

    Only requests that are safe to send twice are repeated: every POST here is idempotent on the proxy's side.
    """

    def __init__(self, endpoint: str, key: str | None = None, *, patience_s: float = 60.0) -> None:
        self.endpoint, self.patience_s = endpoint.rstrip("/"), patience_s
        self._http = httpx.AsyncClient(base_url=self.endpoint, headers=_credentials(key), timeout=30.0)

    async def __aenter__(self) -> ProxyClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        deadline = asyncio.get_running_loop().time() + self.patience_s
        while True:
            try:
                answer = await self._http.request(method, path, json=body)
                break
            except httpx.TransportError as error:
                if asyncio.get_running_loop().time() > deadline:
                    came = type(error).__name__
                    raise EngineError(
                        f"wanted the proxy at {self.endpoint}, got {came}; start `gyre proxy` on this run"
                    ) from error
                await asyncio.sleep(0.2)
        if answer.status_code >= 400:
            raise ConfigError(f"{method} {path}: the proxy refused with {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    async def status(self) -> dict[str, Any]:
        """What the proxy is and does now."""
        return dict(await self._send("GET", "/api/status"))

    async def create_group(self, task: str, size: int, group: str) -> str:
        """Create a group, or find it again by its id."""
        return str((await self._send("POST", "/api/groups", {"id": group, "task": task, "size": size}))["id"])

    async def resize_group(self, group: str, size: int) -> None:
        """Say how many executions a group is meant to have from now on; 0 gives it up."""
        await self._send("POST", "/api/groups", {"id": group, "size": size})

    async def groups(self) -> list[dict[str, Any]]:
        """Groups that were created as such: id, task, size, attributes."""
        return list((await self._send("GET", "/api/groups"))["groups"])

    async def create_execution(self, **fields: Any) -> dict[str, Any]:
        """Queue an execution; fields are task, group, sample_index, harness, attributes."""
        return dict(await self._send("POST", "/api/executions", fields))

    async def executions(self, group: str | None = None) -> list[dict[str, Any]]:
        """Executions known to the proxy: id, task, group, sample_index, state, end_reason, scored."""
        query = f"?group={quote(group, safe='')}" if group else ""
        return list((await self._send("GET", f"/api/executions{query}"))["executions"])

    async def show(self, execution: str) -> dict[str, Any]:
        """One execution as it stands."""
        return dict(await self._send("GET", f"/api/executions/{execution}"))

    async def claim(self, limit: int, tasks: Sequence[str]) -> list[dict[str, Any]]:
        """Take up to `limit` queued executions of `tasks`; each comes with base_url and key."""
        body = {"limit": limit, "tasks": list(tasks)}
        return list((await self._send("POST", "/api/executions/claim", body))["executions"])

    async def end(self, execution: str, reason: str) -> dict[str, Any]:
        """Say that an execution ended, and why; returns it as it stands then."""
        return dict(await self._send("POST", f"/api/executions/{execution}/end", {"reason": reason}))

    @asynccontextmanager
    async def execution(self, **fields: Any) -> AsyncIterator[RunningExecution]:
        """Run an execution of one's own inside the block: created before it, ended after it.

        `fields` are those of `create_execution`. It ends as finished, or as crashed when the block raises an error of
        the harness; a block that is cancelled ends it as cancelled. Score it inside or after the block.
        """
        made = await self.create_execution(**{**fields, "queue": False})
        running = RunningExecution(client=self, id=made["id"], base_url=made["base_url"], key=made["key"])
        reason = "crashed"
        try:
            yield running
            reason = "finished"
        except asyncio.CancelledError:
            reason = "cancelled"
            raise
        finally:
            await asyncio.shield(self.end(running.id, reason))

    async def environment(self, execution: str, kind: str, digest: str, location: str) -> str:
        """Record a state of the workspace; returns its id, which later calls of the execution carry."""
        body = {"kind": kind, "digest": digest, "location": location}
        return str((await self._send("POST", f"/api/executions/{execution}/environments", body))["state_id"])

    async def score(self, execution: str, **fields: Any) -> str:
        """Append a verdict; returns its id."""
        return str((await self._send("POST", f"/api/executions/{execution}/scores", fields))["score_id"])

    async def events(self, start: int) -> tuple[list[dict[str, Any]], int]:
        """Events from sequence number `start` on, and the number to ask for next."""
        answer = await self._send("GET", f"/api/events?from={start}")
        return list(answer["events"]), int(answer["next"])


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningExecution:
    """What an own harness needs of its execution, and where its states and scores go."""

    client: ProxyClient
    id: str
    base_url: str
    """Of Anthropic clients; those of OpenAI add /v1."""
    key: str

    async def environment(self, kind: str, digest: str, location: str) -> str:
        """Record a state of its environment; later calls carry its id, which is returned."""
        return await self.client.environment(self.id, kind, digest, location)

    async def score(self, value: float | None, *, evaluator: str, **fields: Any) -> str:
        """Append a verdict; None says that the evaluator failed. Returns its id."""
        status = "scored" if value is not None else "failed"
        return await self.client.score(self.id, evaluator=evaluator, **{"status": status, "value": value, **fields})
