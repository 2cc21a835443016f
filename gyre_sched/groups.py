"""The groups of a run from dispatch to consumption, and the sums that the ledger tells policies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .api import ExecutionView, GroupView, LedgerView, Plan

__all__ = ["Group", "Groups"]


@dataclass(kw_only=True, slots=True)
class Group:
    """One outstanding group."""

    query: str
    version: int
    """Of the weights when it was dispatched: its v, whatever is refreshed later."""
    dispatched_s: float
    predicted_s: float | None
    unfinished: set[int]
    returning: set[int] = field(default_factory=set)
    ready: bool = False


class Groups:
    """Outstanding groups in order of dispatch, those ready in order of arrival."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.outstanding: dict[str, Group] = {}
        self.ready: list[str] = []
        self.unfinished = 0
        self.dispatched = self.consumed = self.dropped = self.bursts = 0
        self.staleness_sum = self.staleness_max = 0
        self.plan: Plan | None = None

    def dispatch(self, query: str, *, version: int, now_s: float, predicted_s: float | None) -> None:
        """Start a group's executions."""
        self.outstanding[query] = Group(
            query=query,
            version=version,
            dispatched_s=now_s,
            predicted_s=predicted_s,
            unfinished=set(range(self.group_size)),
        )
        self.dispatched += 1
        self.unfinished += self.group_size

    def ended(self, query: str, member: int) -> bool:
        """An execution makes no further call; False when that was known."""
        group = self.outstanding.get(query)
        if group is None or member not in group.unfinished:
            return False
        group.unfinished.remove(member)
        self.unfinished -= 1
        return True

    def stop(self, query: str, member: int) -> bool:
        """Mark an execution whose end was asked for; False when it has ended or was asked before."""
        group = self.outstanding.get(query)
        if group is None or member not in group.unfinished - group.returning:
            return False
        group.returning.add(member)
        return True

    def arrived(self, query: str) -> bool:
        """A group is ready; False when it is not outstanding, not finished, or was told before."""
        group = self.outstanding.get(query)
        if group is None or group.ready or group.unfinished:
            return False
        group.ready = True
        self.ready.append(query)
        return True

    def drop(self, query: str) -> bool:
        """A group is given up, its executions with it; False when it is not outstanding or a step has it."""
        group = self.outstanding.get(query)
        if group is None or (group.ready and query not in self.ready):
            return False
        self.unfinished -= len(group.unfinished)
        if group.ready:
            self.ready.remove(query)
        del self.outstanding[query]
        self.dropped += 1
        return True

    def consume(self, queries: Iterable[str], version: int) -> None:
        """A step that started from `version` has trained on these."""
        for query in queries:
            staleness = version - self.outstanding.pop(query).version
            self.staleness_sum += staleness
            self.staleness_max = max(self.staleness_max, staleness)
            self.consumed += 1

    def view(self) -> LedgerView:
        """The sums."""
        return LedgerView(
            dispatched=self.dispatched,
            consumed=self.consumed,
            dropped=self.dropped,
            staleness_sum=self.staleness_sum,
            staleness_max=self.staleness_max,
            bursts=self.bursts,
            plan=self.plan,
        )

    def execution_views(self) -> list[ExecutionView]:
        """Every unfinished execution."""
        return [
            ExecutionView(
                query=group.query,
                member=member,
                dispatched_s=group.dispatched_s,
                version=group.version,
                returning=member in group.returning,
            )
            for group in self.outstanding.values()
            for member in sorted(group.unfinished)
        ]

    def group_views(self, now_s: float) -> list[GroupView]:
        """Every group that is not ready."""
        return [
            GroupView(
                query=group.query,
                done=self.group_size - len(group.unfinished),
                left=len(group.unfinished),
                age_s=now_s - group.dispatched_s,
                predicted_s=group.predicted_s,
            )
            for group in self.outstanding.values()
            if not group.ready
        ]
