"""Queueing groups of executions at the proxy, whose launcher runs them.

Names and order of the groups depend on the seed and their number only, and creating one twice changes nothing, so a
trainer that was killed anywhere goes on with the groups that it had queued.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from gyre_data.errors import ConfigError, EngineError

from .pace import Out

__all__ = ["Dispatcher", "ProxyApi", "tasks_in_round"]

_MARK = "gyre_train"
_PATIENCE_S = 120.0
_FELL_OUT = ("infra_fault", "cancelled")


def tasks_in_round(turn: int, tasks: Sequence[str], seed: int) -> list[str]:
    """Each task once, in an order that is drawn anew for each round."""
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}/{turn}/{task}".encode()).digest())


class ProxyApi:
    """The few calls of the proxy's API that training needs; one that is down is waited for, since it comes back."""

    def __init__(self, url: str, patience_s: float = _PATIENCE_S) -> None:
        key = os.environ.get("GYRE_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._patience_s, self._url = patience_s, url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=30.0, trust_env=False)

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request that may be sent twice; EngineError when the proxy stays away, ConfigError when it refuses."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                answer = self._http.request(method, path, json=body)
                break
            except httpx.TransportError as error:
                if time.monotonic() > deadline:
                    came = f"{type(error).__name__} for {self._patience_s:.0f} s"
                    raise EngineError(f"wanted the proxy at {self._url}, got {came}; see its log") from error
                time.sleep(0.2)
        if answer.status_code >= 400:
            raise ConfigError(f"{method} {path}: the proxy refused with {answer.status_code}: {answer.text[:300]}")
        found: dict[str, Any] = answer.json()
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Groups of the run: id, task, size, attributes."""
        return list(self.send("GET", "/api/groups")["groups"])

    def queue(self, group: str, task: str, size: int, attributes: Mapping[str, Any]) -> None:
        """Create a group with its executions, or what is not there yet of it."""
        self.send("POST", "/api/groups", {"id": group, "task": task, "size": size, "attributes": dict(attributes)})
        for index in range(size):
            self.send("POST", "/api/executions", {"task": task, "group": group, "sample_index": index})

    def close(self) -> None:
        """Release the connection."""
        self._http.close()


class Dispatcher:
    """Decides which task comes next, and knows which groups are out."""

    def __init__(self, api: ProxyApi, tasks: Sequence[str], *, attempts: int, seed: int) -> None:
        self._api, self._tasks, self._attempts, self._seed = api, tuple(tasks), attempts, seed
        self._whole: set[str] = set()
        """Groups whose executions are known to be queued."""

    def out(self, complete: Collection[str], is_used: Callable[[str], bool]) -> list[Out]:
        """Groups that are dispatched and neither used up nor given up, oldest first."""
        return [
            Out(group=group["id"], task=group["task"], step=mark["step"], complete=group["id"] in complete)
            for group, mark in self._groups("train")
            if group["size"] != 0 and not (group["id"] in complete and is_used(group["id"]))
        ]

    def fill(self, out: Sequence[Out], limit: int, step: int) -> list[Out]:
        """Queue groups until `limit` are out, under the weights of `step`; returns all that are out."""
        known = self._groups("train")
        for group, _ in known[-1:]:  # the trainer may have been killed while it queued this one
            if group["size"] == self._attempts:
                self._queue(group["id"], group["task"], group["size"], group["attributes"])
        following = 1 + max((mark["number"] for _, mark in known), default=-1)
        found = list(out)
        for number in range(following, following + max(0, limit - len(out))):
            name = f"live-{number:06d}"
            mark = {_MARK: {"for": "train", "number": number, "step": step}}
            turn, place = divmod(number, len(self._tasks))
            task = tasks_in_round(turn, self._tasks, self._seed)[place]
            self._queue(name, task, self._attempts, mark)
            found.append(Out(group=name, task=task, step=step, complete=False))
        return found

    def evaluate(self, tasks: Sequence[str], version: int, attempts: int) -> dict[str, str]:
        """Queue the pass of a version over held-out tasks; returns the tasks of its groups, but for those given up."""
        names = {f"eval-{version:06d}-{task}": task for task in tasks}
        known = {group["id"]: group for group, _ in self._groups("eval")}
        for name, task in names.items():
            if name not in known or known[name]["size"] == attempts:
                self._queue(name, task, attempts, {_MARK: {"for": "eval", "version": version}})
        return {name: task for name, task in names.items() if name not in known or known[name]["size"] != 0}

    def passes(self) -> list[int]:
        """Versions whose passes were queued, by whichever session."""
        return sorted({int(mark["version"]) for _, mark in self._groups("eval")})

    def not_judged(self, groups: Collection[str]) -> list[str]:
        """Groups of which a member has not ended or was not judged; those that fell out are no members."""
        sizes = {one["id"]: one["size"] or 0 for one in self._api.groups()}
        found = []
        for group in groups:
            known = self._api.send("GET", f"/api/executions?group={quote(group, safe='')}")["executions"]
            members = [one for one in known if one["end_reason"] not in _FELL_OUT]
            over = all(one["state"] == "ended" and one["scored"] for one in members)
            if not over or len(members) < sizes.get(group, 1):
                found.append(group)
        return found

    def _queue(self, group: str, task: str, size: int, attributes: Mapping[str, Any]) -> None:
        if group not in self._whole:
            self._api.queue(group, task, size, attributes)
            self._whole.add(group)

    def _groups(self, purpose: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        marked = [(group, (group["attributes"] or {}).get(_MARK)) for group in self._api.groups()]
        return [(group, mark) for group, mark in marked if mark and mark["for"] == purpose]
