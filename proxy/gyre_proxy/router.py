"""Which engine serves a call: least loaded, with a leaning to the engine that holds the execution's prefix.

An engine is `up` (takes calls), `draining` (finishes what it has) or `down` (failed; watched until it is ready again).
`epoch` counts its recoveries: a reply that lost an engine may come back to it only in a later epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gyre_data.errors import ConfigError, EngineError
from gyre_data.types import PolicyVersion

from .engine import EngineClient, EngineInfo

__all__ = ["Engine", "Router", "read_version"]

log = logging.getLogger(__name__)

_MISSED_POLLS = 3
"""Unanswered polls that make an engine down: one may be lost on a busy machine."""


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
    riders: set[asyncio.Task[object]] = field(default_factory=set)
    """Tasks that wait for this engine's tokens; cancelled when it stops answering without closing its connections."""

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
        slack: int = 2,
        on_change: Callable[[Engine, str], None] | None = None,
    ) -> None:
        self._connect, self._policy_id, self._poll_s, self._slack = connect, policy_id, poll_s, slack
        self._on_change = on_change or (lambda engine, what: None)
        self._engines: dict[str, Engine] = {}
        self._home: dict[str, str] = {}  # affinity key -> url of the engine that served it last
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Every engine that was not removed."""
        return tuple(self._engines.values())

    async def add(self, url: str) -> Engine:
        """Take an engine in once it has answered; adding a known one brings it back from draining."""
        client = self._connect(url)
        known = self._engines.get(client.url)
        info = await client.info()
        version = read_version(info.weight_version, self._policy_id)
        if known is not None:
            known.info, known.version = info, version
            self._set(known, "up")
            return known
        engine = Engine(client=client, info=info, version=version)
        self._engines[engine.url] = engine
        self._note(engine, "added")
        return engine

    def drain(self, url: str) -> Engine:
        """No new calls; those in flight finish."""
        engine = self.get(url)
        self._set(engine, "draining")
        return engine

    def remove(self, url: str) -> Engine:
        """Forget an engine. Calls in flight go on for as long as it answers."""
        engine = self.get(url)
        del self._engines[engine.url]
        self._set(engine, "removed")
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
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await asyncio.gather(*(self._look(engine) for engine in self.engines))

    async def _look(self, engine: Engine) -> None:
        try:
            if engine.state == "down" and not await engine.client.ready():
                return
            weight_version = await engine.client.weight_version()
            self.note_version(engine, weight_version)
        except (EngineError, ConfigError) as error:
            engine.num_missed += 1
            if engine.num_missed >= _MISSED_POLLS:
                self.note_failure(engine, str(error))
                for rider in tuple(engine.riders):
                    rider.cancel()
            return
        engine.num_missed = 0
        if engine.state == "down" and engine.url in self._engines:
            engine.epoch += 1
            engine.error = None
            self._set(engine, "up")

    def _set(self, engine: Engine, state: str) -> None:
        if engine.state != state:
            engine.state, engine.since = state, time.time()
            self._note(engine, state)

    def _note(self, engine: Engine, what: str) -> None:
        self._on_change(engine, what)
        self._changed.set()
        self._changed = asyncio.Event()
