"""Harnesses that sleep: whatever is queued at the proxy is claimed, makes one call as long as it is to take, and ends.

One process stands in for `gyre run` and all harnesses that it would start; each has a thread. An execution's time runs
from its dispatch, as the simulator's does: what it waited for its claim is taken off its call.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gyre_sched.actions import Dispatch
from gyre_sched.ledger import read

from .emulated import TOKEN_S
from .wire import ask

__all__ = ["work_through"]

_CLAIM = 64
_CALL_S = 60.0


def work_through(proxy: str, work: dict[str, Any], hour_s: float) -> None:
    """Claim and run, for ever. `work` has `seconds` of each group's executions, `timeout_s`, all emulated."""
    position = -1
    dispatched = _Dispatched(Path(work["ledger"]))
    while True:
        try:
            while _claim(proxy, work, dispatched, hour_s):
                pass
            found = ask(f"{proxy}/api/events?from={position if position >= 0 else 2**62}&wait=5", timeout_s=_CALL_S)
            position = int(found["next"])
        except OSError:
            time.sleep(0.2)


class _Dispatched:
    """When groups were dispatched, by the ledger's clock of emulated seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_s: dict[str, float] = {}

    def at_s(self, group: str) -> float:
        """Of a group that is dispatched."""
        if group not in self._at_s:
            for at_s, record in read(self._path):
                if isinstance(record, Dispatch):
                    self._at_s |= dict.fromkeys(record.queries, at_s)
        return self._at_s[group]


def _claim(proxy: str, work: dict[str, Any], dispatched: _Dispatched, hour_s: float) -> int:
    claimed = ask(f"{proxy}/api/executions/claim", {"limit": _CLAIM}, timeout_s=_CALL_S)["executions"]
    for one in claimed:
        at_s = dispatched.at_s(one["group"])
        threading.Thread(target=_live, args=(proxy, one, work, at_s, hour_s), daemon=True).start()
    return len(claimed)


def _live(proxy: str, claimed: dict[str, Any], work: dict[str, Any], dispatched_s: float, hour_s: float) -> None:
    members = work["seconds"][claimed["group"]]
    seconds = members[int(claimed["sample_index"]) % len(members)]
    late_s = time.time() * 3600 / hour_s - dispatched_s
    deadline = time.monotonic() + (work["timeout_s"] - late_s) * hour_s / 3600
    reason = "finished" if seconds <= work["timeout_s"] else "overall_timeout"
    tokens = max(1, round((min(seconds, work["timeout_s"]) - late_s) / TOKEN_S))
    while True:
        try:
            whole = _call(claimed, tokens, deadline)
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)  # as clients do: the same request again
            continue
        _end(proxy, claimed["id"], reason if whole else "overall_timeout")
        return


def _call(claimed: dict[str, Any], tokens: int, deadline: float) -> bool:
    """One streamed call; False when its time is over first. OSError for a reply that broke."""
    where = urlsplit(claimed["base_url"])
    body = {
        "model": "gyre-policy",
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": claimed["group"]}],
    }
    headers = {"content-type": "application/json", "authorization": f"Bearer {claimed['key']}"}
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=300)
    try:
        connection.request("POST", f"{where.path}/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ConnectionError(answer.read(200))
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return True
            if time.monotonic() > deadline:
                return False
        raise ConnectionError("the reply broke off")
    finally:
        connection.close()


def _end(proxy: str, execution: str, reason: str) -> None:
    while True:
        try:
            ask(f"{proxy}/api/executions/{execution}/end", {"reason": reason}, timeout_s=_CALL_S)
        except OSError:
            time.sleep(0.1)
        else:
            return
