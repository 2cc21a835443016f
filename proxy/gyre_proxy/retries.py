"""What an identical request means: another sample, the same reply again, or a reply that got lost.

Clients retry without saying so, so it is read from what became of the earlier connection. Pure: the caller acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Earlier", "Verdict", "judge"]


class Verdict(StrEnum):
    """What to do with a request."""

    NEW = "new"  # no earlier request like it matters
    SIBLING = "sibling"  # sample again beside it
    ATTACH = "attach"  # follow the reply that is still being sampled, from its start
    LOST = "lost"  # sample again, and mark the earlier reply undelivered
    REPLAY = "replay"  # give the lost reply out again


@dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """The newest generation of an identical request (same agent, tools, messages and sampling, streamed or not)."""

    sampling: bool
    """Not complete yet."""
    connected: bool
    """A connection follows it."""
    delivered: bool
    ok: bool = True
    """Complete and good, as opposed to failed or aborted. Meaningless while sampling."""


def judge(earlier: Earlier | None, *, replay_lost: bool = False) -> Verdict:
    """The verdict on a request whose newest identical predecessor is `earlier`.

    While sampling without a connection the grace period is running: when it ends the generation is aborted, and is then
    no longer sampling.
    """
    if earlier is None:
        return Verdict.NEW
    if earlier.sampling:
        return Verdict.SIBLING if earlier.connected else Verdict.ATTACH
    if earlier.connected or earlier.delivered or not earlier.ok:
        return Verdict.SIBLING
    return Verdict.REPLAY if replay_lost else Verdict.LOST
