"""Which engine serves a call: least loaded, with a leaning to the engine that holds the execution's prefix.

An engine is `up` (takes calls), `draining` (finishes what it has) or `down` (failed; watched until it is ready again).
A removed one loses its replies to the others at once. An engine that stops answering without closing its connections
loses them as soon as another is up; when it is the only one they wait for it. One that is added or comes back gets
a new `epoch`: a reply that lost an engine may come back to it only in a later one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gyre_data.errors import ConfigError, EngineError
from gyre_data.types import PolicyVersion

from .engine import EngineClient, EngineInfo

__all__ = ["Engine", "Rider", "Router", "read_version"]

log = logging.getLogger(__name__)

_MISSED_POLLS = 3
"""Unanswered polls that make an engine down: one may be lost on a busy machine."""


@dataclass(kw_only=True, slots=True, eq=False)
class Rider:
    """A task that waits for an engine's tokens."""

    task: asyncio.Task[object]
    reason: str | None = None
    """Why it waits no longer: it was sent away, or has arrived."""

    def send_away(self, reason: str) -> None:
        """Interrupt the wait, unless it is over."""
        if self.reason is None:
            self.reason = reason
            self.task.cancel()


def read_version(weight_version: str, policy_id: str | None) -> PolicyVersion:
    """The policy version that an engine's `weight_version` names; with `policy_id`, unlabelled weights are its 0.

    Raises ConfigError for an engine that says `default`: tokens of unknown weights cannot be trained on.
    """
    try:
        return PolicyVersion.parse(weight_version)
    except ValueError:
        if policy_id is None:
            raise ConfigError(
                f"wanted an engine whose weights have a version like base:0, got {weight_version!r}; start it with "
                "--weight-version ID:N, or give the proxy --policy ID to call its weights ID:0"
            ) from None
    return PolicyVersion(policy_id=policy_id, n=int(weight_version) if weight_version.isdigit() else 0)


@dataclass(kw_only=True, slots=True, eq=False)
class Engine:
    """One engine as the router sees it. Changed by the router only, except for `in_flight`."""

    client: EngineClient
    info: EngineInfo
    version: PolicyVersion
    state: str = "up"
    epoch: int = 0
    in_flight: int = 0
    served: int = 0
    since: float = field(default_factory=time.time)
    error: str | None = None
    num_missed: int = 0
    """Polls in a row without an answer."""
    riders: set[Rider] = field(default_factory=set)
    polled: asyncio.Task[None] | None = None
    """The poll under way."""

    @property
    def url(self) -> str:
        """Where it is; also its name in records."""
        return self.client.url

    def describe(self) -> dict[str, object]:
        """As `GET /api/engines` shows it."""
        return {
            "url": self.url,
            "state": self.state,
            "version": str(self.version),
            "in_flight": self.in_flight,
            "served": self.served,
            "since": self.since,
            "context_length": self.info.context_length,
            "error": self.error,
        }


class Router:
    """The engines of a proxy. Single-threaded: used from the event loop only."""

    def __init__(
        self,
        connect: Callable[[str], EngineClient],
        policy_id: str | None = None,
        poll_s: float = 2.0,
        probe_s: float = 5.0,
        slack: int = 2,
        on_change: Callable[[Engine, str], None] | None = None,
    ) -> None:
        self._connect, self._policy_id, self._slack = connect, policy_id, slack
        self._poll_s, self._probe_s = poll_s, probe_s
        self._on_change = on_change or (lambda engine, what: None)
        self._engines: dict[str, Engine] = {}
        self.awaited: dict[str, bool] = {}
        """Engines that this proxy had and that have not answered yet, and whether they were draining."""
        self.rejoining: asyncio.Task[None] | None = None
        """Tries those again."""
        self._home: dict[str, str] = {}  # affinity key -> url of the engine that served it last
        self._epochs = itertools.count()
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine that was not removed."""
        return tuple(self._engines.values())

    def told(self, given: Collection[str]) -> dict[str, bool]:
        """What a restart needs: engines that were added beside the `given` ones or drain, with whether they drain."""
        found = {engine.url: engine.state == "draining" for engine in self.engines}
        own = {url.rstrip("/") for url in given}
        return self.awaited | {url: drains for url, drains in found.items() if drains or url not in own}

    async def add(self, url: str, drains: bool = False) -> Engine:
        """Take an engine in once it has answered; a known one comes back from draining, unless it still `drains`."""
        client = self._connect(url)
        known = self._engines.get(client.url)
        info = await client.info()
        version = read_version(info.weight_version, self._policy_id)
        if self._policy_id is not None and str(version) == info.weight_version:
            log.warning(
                "--policy %s has no effect on engine %s: its weights already have a name and number, %s; leave it out, "
                "or start the engine without --weight-version",
                self._policy_id,
                url,
                version,
            )
        self.awaited.pop(client.url, None)
        state = "draining" if drains else "up"
        if known is not None:
            known.info, known.version, known.num_missed = info, version, 0
            if known.state == "down":
                known.epoch, known.error = next(self._epochs), None
            self._set(known, state)
            return known
        engine = Engine(client=client, info=info, version=version, epoch=next(self._epochs), state=state)
        self._engines[engine.url] = engine
        self._note(engine, "added")
        return engine

    def drain(self, url: str) -> Engine:
        """No new calls; those in flight finish."""
        self.awaited.pop(url.rstrip("/"), None)
        engine = self.get(url)
        self._set(engine, "draining")
        return engine

    def remove(self, url: str) -> Engine:
        """Forget an engine. Its replies go on elsewhere at once."""
        self.awaited.pop(url.rstrip("/"), None)
        engine = self.get(url)
        del self._engines[engine.url]
        self._set(engine, "removed")
        if engine.polled is not None:
            engine.polled.cancel()
        for rider in engine.riders:
            rider.send_away("was removed in mid-reply")
        return engine

    def set_version(self, url: str, weight_version: str) -> Engine:
        """A publisher says that an engine serves other weights now."""
        engine = self.get(url)
        self.note_version(engine, weight_version)
        return engine

    def get(self, url: str) -> Engine:
        """The engine at `url`; raise ConfigError that names the known ones."""
        try:
            return self._engines[url.rstrip("/")]
        except KeyError:
            raise ConfigError(
                f"wanted one of this proxy's engines, got {url!r}; it has: {', '.join(self._engines) or 'none'}"
            ) from None

    def note_version(self, engine: Engine, weight_version: str) -> None:
        """Remember the version that an engine named, in a reply or to a poll."""
        version = read_version(weight_version, self._policy_id)
        if version != engine.version:
            engine.version = version
            self._note(engine, "version")

    def note_failure(self, engine: Engine, error: str) -> None:
        """A call lost this engine: no more calls until it is ready again."""
        engine.error = error
        if engine.state == "up":
            log.warning("engine %s is down: %s", engine.url, error)
            self._set(engine, "down")

    def pick(self, affinity: str, lost: Mapping[str, int] | None = None) -> Engine | None:
        """The engine for a call, or None when there is none now. `lost` holds engines with the epoch they failed in."""
        lost = lost or {}
        fit = [e for e in self._engines.values() if e.state == "up" and lost.get(e.url, -1) < e.epoch]
        if not fit:
            return None
        least = min(fit, key=lambda e: (e.in_flight, e.served))
        home = self._engines.get(self._home.get(affinity, ""))
        chosen = home if home in fit and home is not None and home.in_flight <= least.in_flight + self._slack else least
        self._home[affinity] = chosen.url
        return chosen

    async def wait(self, affinity: str, lost: Mapping[str, int], seconds: float) -> Engine | None:
        """Like `pick`, but waits up to `seconds` for an engine to come (back)."""
        deadline = time.monotonic() + seconds
        while True:
            changed, engine = self._changed, self.pick(affinity, lost)
            left = deadline - time.monotonic()
            if engine is not None or left <= 0:
                return engine
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    def forget(self, affinity: str) -> None:
        """An execution ended: its home matters no more."""
        self._home.pop(affinity, None)

    def start(self) -> None:
        """Begin watching health and versions."""
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """End the watch."""
        tasks = [
            task
            for task in (self._watcher, self.rejoining, *(engine.polled for engine in self.engines))
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watcher = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            for engine in self.engines:  # one that does not answer must not delay the others
                if engine.polled is None or engine.polled.done():
                    engine.polled = asyncio.get_running_loop().create_task(self._look(engine))

    async def _look(self, engine: Engine) -> None:
        try:
            weight_version = await engine.client.weight_version(self._probe_s)
            self.note_version(engine, weight_version)
        except (EngineError, ConfigError) as error:
            self._missed(engine, str(error))
            return
        engine.num_missed = 0
        if engine.state != "down" or not await engine.client.ready(self._probe_s):
            return
        if engine.state == "down":
            engine.epoch, engine.error = next(self._epochs), None
            self._set(engine, "up")

    def _missed(self, engine: Engine, error: str) -> None:
        engine.num_missed += 1
        if engine.num_missed < _MISSED_POLLS:
            return
        self.note_failure(engine, error)
        if any(other.state == "up" for other in self.engines):
            for rider in engine.riders:
                rider.send_away("stopped answering in mid-reply")

    def _set(self, engine: Engine, state: str) -> None:
        if engine.state != state:
            engine.state, engine.since = state, time.time()
            self._note(engine, state)

    def _note(self, engine: Engine, what: str) -> None:
        self._on_change(engine, what)
        self._changed.set()
        self._changed = asyncio.Event()
