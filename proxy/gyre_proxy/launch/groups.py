"""Keeping groups whole: what fell out is replaced up to a limit, then the group is made smaller.

A trainer takes a group once it has the members it is meant to have. So a member that says nothing about the policy must
be replaced, or the group must say that it is not waited for any more: one of the two is always recorded.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from .client import ProxyClient

__all__ = ["LOST", "Groups", "is_lost"]

LOST = ("infra_fault", "cancelled")
"""End reasons that say nothing about the policy: never trained."""


def is_lost(execution: Mapping[str, Any]) -> bool:
    """Whether an execution is no member of its group any more."""
    return execution["state"] == "ended" and execution["end_reason"] in LOST


class Groups:
    """Fills groups up to their size. `describe` gives what is recorded of an execution of a task beside its number."""

    def __init__(self, client: ProxyClient, describe: Callable[[str], Mapping[str, Any]], replacements: int) -> None:
        self.client, self.describe, self.replacements = client, describe, replacements
        self._replaced: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}

    async def fill(self, group: str, task: str, size: int) -> None:
        """Queue as many executions as the group lacks."""
        async with self._locks.setdefault(group, asyncio.Lock()):
            known = await self.client.executions(group)
            good = sum(not is_lost(one) for one in known)
            following = max((one["sample_index"] for one in known), default=-1) + 1
            for index in range(following, following + size - good):
                await self.client.create_execution(
                    task=task, group=group, sample_index=index, **self.describe(task)
                )  # fmt: skip

    async def replace(self, group: str, task: str, size: int) -> bool:
        """A member was lost: queue another, or, after `replacements` of them, shrink the group and return False."""
        self._replaced[group] += 1
        if self._replaced[group] <= self.replacements:
            await self.fill(group, task, size)
            return True
        good = sum(not is_lost(one) for one in await self.client.executions(group))
        await self.client.resize_group(group, min(size, good))
        return False
