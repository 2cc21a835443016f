"""Dispatched groups as executions of the proxy: queued once, followed to their ends, replaced when nobody is to blame.

What was said and heard is not remembered: the proxy knows which executions of a group there are and what became of
them, and its events only tell where to look. So a controller that comes back asks, and goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gyre_sched.actions import Event, ExecutionEnded, GroupDropped, GroupReady

from .proxy import ProxyApi
from .settings import FleetSettings

__all__ = ["Executions", "settled"]

_LOG = logging.getLogger(__name__)
_REPLACED = ("infra_fault", "cancelled")
"""Ends that say nothing about the policy: another execution takes the place."""
_STATUS = {"finished": "finished", "harness_timeout": "timed_out", "overall_timeout": "timed_out"}
_WAIT_S = 5
_AGAIN_S = 1.0
_CREATORS = 4
"""Requests that queue executions at a time; the proxy writes those that come together with one sync."""


def settled(
    group: str, known: Sequence[Mapping[str, Any]], *, size: int, unfinished: frozenset[int], judged: bool
) -> list[Event]:
    """What a group's executions say that the state does not have: which members ended, and that the group is ready.

    A member is the execution with its number. One that was replaced leaves its number to any that took its place: all
    are samples of one task, and only how many have ended counts.
    """
    good = [one for one in known if one["state"] != "ended" or one["end_reason"] not in _REPLACED]
    ended = {int(one["sample_index"]): one for one in good if one["state"] == "ended"}
    events: list[Event] = []
    left = set(unfinished)
    extra = len(ended) - (size - len(unfinished))  # ended and not yet told
    own = sorted(index for index in ended if index in unfinished)
    others = sorted(index for index in ended if index >= size)
    running = {int(one["sample_index"]) for one in good if one["state"] != "ended"}
    free = sorted(unfinished - set(ended) - running)
    for index, member in [*((index, index) for index in own), *zip(others, free, strict=False)]:
        if len(events) < extra:
            status = _STATUS.get(str(ended[index]["end_reason"]), "failed")
            events.append(ExecutionEnded(query=group, member=member, status=status))
            left.discard(member)
    if not left and all(one["scored"] for one in ended.values() if judged):
        events.append(GroupReady(query=group))
    return events


class Executions:
    """Threads that queue, and one that follows. `tell` gets events and `fail` what should not be, from any of them."""

    def __init__(
        self,
        settings: FleetSettings,
        proxy: ProxyApi,
        tell: Callable[[Sequence[Event]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._settings, self._proxy, self._tell, self._fail = settings, proxy, tell, fail
        self._lock = threading.Lock()
        self._wanted: dict[str, frozenset[int]] = {}
        """Groups that are not ready, with the members that the state has as unfinished."""
        self._unsure: set[str] = set()
        """Groups to be looked at."""
        self._lacking: dict[str, float] = {}
        """Since when a group has had too few executions, by the monotonic clock."""
        self._stopping: set[tuple[str, int]] = set()
        self._closed = threading.Event()
        self._pool = ThreadPoolExecutor(_CREATORS, "gyre-queue")
        self._follower = threading.Thread(target=self._follow, name="gyre-executions", daemon=True)
        self._follower.start()

    def expect(self, wanted: Mapping[str, frozenset[int]]) -> None:
        """These groups are to run, and none else."""
        with self._lock:
            new = [group for group in wanted if group not in self._wanted]
            self._wanted = dict(wanted)
        for group in new:
            self._pool.submit(self._guarded, self._begin, group)

    def stop(self, group: str, member: int) -> None:
        """End one now; it is judged as it is."""
        self._pool.submit(self._guarded, self._stop, group, member)

    def close(self) -> None:
        """Follow no more."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._follower.join(_WAIT_S + 2)

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        """Try until the proxy answers; what the controller no longer wants is left."""
        while not self._closed.is_set():
            try:
                call(*arguments)
            except OSError as error:
                _LOG.warning("%s; tried again", error)
                self._closed.wait(_AGAIN_S)
            except Exception as error:  # noqa: BLE001 - told to the controller's own thread
                self._fail(error)
                return
            else:
                return

    def _begin(self, group: str) -> None:
        """Queue what is missing of a group."""
        settings = self._settings
        with self._lock:
            if group not in self._wanted:
                return
        task = group.partition("#")[0]
        known = {one["sample_index"] for one in self._proxy.executions(group)}
        if len(known) < settings.group_size:
            self._proxy.create_group(group, task, settings.group_size)
        for index in range(settings.group_size):
            if index not in known:
                self._proxy.create_execution(group, task, index, dict(settings.executions.launcher))
        with self._lock:
            self._unsure.add(group)

    def _stop(self, group: str, member: int) -> None:
        for one in self._proxy.executions(group):
            if one["sample_index"] == member and one["state"] != "ended":
                with self._lock:
                    self._stopping.add((group, member))
                self._proxy.end(one["id"], "overall_timeout")

    def _follow(self) -> None:
        position = -1
        while not self._closed.is_set():
            try:
                position = self._listen(position)
                self._look()
            except OSError as error:
                _LOG.warning("%s; tried again", error)
                position = -1  # a proxy that comes back may have another log
                self._closed.wait(_AGAIN_S)
            except Exception as error:  # noqa: BLE001 - told to the controller's own thread
                self._fail(error)
                return

    def _listen(self, position: int) -> int:
        """Wait for events and note the groups that they are about; all groups when some were missed."""
        with self._lock:
            wait_s = 0 if self._unsure & self._wanted.keys() else 1
        if position < 0:
            found = self._proxy.events(2**62, 0)
            found["oldest"] = position + 1
        else:
            found = self._proxy.events(position, wait_s)
        with self._lock:
            now_s = time.monotonic()
            late = {g for g, since in self._lacking.items() if now_s - since > self._settings.executions.refill_s}
            self._unsure |= late
            if found["oldest"] > position:
                self._unsure |= self._wanted.keys()
            for event in found["events"]:
                if event["type"] in ("execution.ended", "score") and event.get("group_id"):
                    self._unsure.add(event["group_id"])
        return int(found["next"])

    def _look(self) -> None:
        with self._lock:
            groups = [group for group in self._wanted if group in self._unsure]
            self._unsure.clear()
        for number, group in enumerate(groups):
            try:
                self._settle(group)
            except OSError:
                with self._lock:
                    self._unsure |= set(groups[number:])
                raise

    def _settle(self, group: str) -> None:
        size = self._settings.group_size
        known = [one for one in self._proxy.executions(group) if one["sample_index"] is not None]
        with self._lock:
            unfinished = self._wanted.get(group)
        if unfinished is None:
            return
        judged = self._settings.executions.judged
        events = settled(group, known, size=size, unfinished=unfinished, judged=judged)
        for number, event in enumerate(events):
            if isinstance(event, ExecutionEnded) and (group, event.member) in self._stopping:
                events[number] = ExecutionEnded(query=group, member=event.member, status="partial")
        if events:
            self._tell(events)
        self._refill(group, known)

    def _refill(self, group: str, known: Sequence[Mapping[str, Any]]) -> None:
        """Replace what nobody replaced; after too many, the group is given up."""
        settings, size = self._settings.executions, self._settings.group_size
        good = sum(one["state"] != "ended" or one["end_reason"] not in _REPLACED for one in known)
        if not known or good >= size:
            self._lacking.pop(group, None)
            return
        since = self._lacking.setdefault(group, time.monotonic())
        if len(known) - good > settings.replacements:
            self._tell([GroupDropped(query=group, reason="infra_fault")])
        elif time.monotonic() - since > settings.refill_s:
            index = max(int(one["sample_index"]) for one in known) + 1
            task = group.partition("#")[0]
            for number in range(size - good):
                self._proxy.create_execution(group, task, index + number, dict(settings.launcher))
            self._lacking.pop(group, None)
