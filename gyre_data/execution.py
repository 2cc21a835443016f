"""What a run says about its executions: event rows merged into one record each, and the `Execution` handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from .arrays import from_table
from .eligible import candidates, eligibility
from .errors import DataError
from .path import Path
from .schema import AgentRole, EndReason
from .scores import scores_by_execution
from .tree import Forest, Tables, Tree
from .types import ExecutionEvent, Score

__all__ = ["Execution", "ExecutionInfo", "executions", "find", "newest", "short_id"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionInfo:
    """An execution as its event rows tell it; later rows add to earlier ones, null never overwrites."""

    execution_id: str
    started_at: datetime | None = None
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    group_id: str | None = None
    task_id: str | None = None
    sample_index: int | None = None
    harness: str | None = None
    harness_version: str | None = None
    launcher: str | None = None
    dispatch_policy_id: str | None = None
    dispatch_version: int | None = None
    attributes: str | None = None

    @property
    def running(self) -> bool:
        """True until an `ended` row is there."""
        return self.ended_at is None

    def merged(self, event: ExecutionEvent) -> ExecutionInfo:
        """Return this record with the row's values laid over it."""
        names = (n for n in self.__slots__ if n not in ("execution_id", "started_at", "ended_at"))
        new: dict[str, Any] = {n: value for n in names if (value := getattr(event, n)) is not None}
        if event.event == "ended":
            new["ended_at"] = event.at
        elif self.started_at is None:
            new["started_at"] = event.at
        return replace(self, **new)


def executions(run: Tables) -> dict[str, ExecutionInfo]:
    """Every execution of the run by id, oldest first; one that has calls but no event row is there too."""
    found: dict[str, ExecutionInfo] = {}
    events: list[ExecutionEvent] = from_table("executions", run.table("executions"))
    for event in sorted(events, key=lambda event: event.at):
        found[event.execution_id] = found.get(
            event.execution_id, ExecutionInfo(execution_id=event.execution_id)
        ).merged(event)
    for execution_id in sorted(set(run.table("calls").column("execution_id").unique().to_pylist()) - set(found)):
        found[execution_id] = ExecutionInfo(execution_id=execution_id)
    return found


def find(ids: Iterable[str], prefix: str) -> str:
    """Return the one id that starts with `prefix` (its `e_` may be left out); raise DataError unless it is one."""
    ids = list(ids)
    if prefix in ids:
        return prefix
    hits = [name for name in ids if name.startswith(prefix) or name.removeprefix("e_").startswith(prefix)]
    if len(hits) == 1:
        return hits[0]
    if not hits:
        raise DataError(f"wanted one execution for {prefix!r}, but no execution starts with it; see `gyre ls RUN`")
    came = f"{len(hits)} executions start with it ({', '.join(hits[:5])})"
    raise DataError(f"wanted one execution for {prefix!r}, but {came}; give a longer prefix, see `gyre ls RUN`")


class Execution:
    """One execution of a run: its record, tree, scores and paths, each loaded when first used."""

    def __init__(self, run: Tables, info: ExecutionInfo, forest: Forest | None = None) -> None:
        self.run, self.info = run, info
        self._forest = forest

    @classmethod
    def load(cls, run: Tables, prefix: str) -> Execution:
        """Find an execution of `run` by a unique prefix of its id."""
        known = executions(run)
        return cls(run, known[find(known, prefix)])

    def __repr__(self) -> str:
        return f"Execution({self.execution_id!r})"

    @property
    def execution_id(self) -> str:
        """The full id."""
        return self.info.execution_id

    @cached_property
    def tree(self) -> Tree:
        """The tree of this execution; raises DataError when it has no calls yet."""
        return (self._forest or Forest(self.run)).tree(self.execution_id)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """All verdicts, in the order in which they were written."""
        return tuple(scores_by_execution(self.run).get(self.execution_id, ()))

    @property
    def main(self) -> Path:
        """The path to the newest output of the main agent."""
        for call in reversed(self.tree.calls):
            if call.agent_role == AgentRole.MAIN and (leaf := self.tree.output(call)) is not None:
                return Path(self, leaf)
        raise DataError(
            f"execution {self.execution_id} has no output of a main agent; see `gyre tree {self.execution_id}`"
        )

    def path(self, name: str) -> Path:
        """The path that ends with this node, or with what the call of this id or number (`c2`) sampled."""
        tree = self.tree
        if name in tree.index:
            return Path(self, tree.index[name])
        for number, call in enumerate(tree.calls, 1):
            if name in (call.call_id, f"c{number}") and (leaf := tree.leaf(call)) is not None:
                return Path(self, leaf)
        raise DataError(
            f"wanted a node or a rendered call of execution {self.execution_id}, got {name!r}; see `gyre tree --json`"
        )

    def paths(self) -> list[Path]:
        """The candidate trajectories, depth first: paths to an eligible output without an eligible output below it."""
        return [Path(self, found.leaf) for found in candidates(self.tree, eligibility(self.tree))]


def newest(run: Tables) -> str:
    """Id of the execution that a command means when none is named: the one started last among those with calls."""
    with_calls = set(run.table("calls").column("execution_id").unique().to_pylist())
    known = [name for name in executions(run) if name in with_calls]
    if not known:
        raise DataError("wanted an execution, the run holds no call yet; record one with `gyre record` or `gyre run`")
    return known[-1]


def short_id(ids: Iterable[str], execution_id: str) -> str:
    """Shortest start of the id, four characters at least and without its `e_`, that `find` takes back to it."""
    bare = execution_id.removeprefix("e_")
    others = [name for name in ids if name != execution_id]
    for length in range(4, len(bare) + 1):
        start = bare[:length]
        if not any(name.startswith(start) or name.removeprefix("e_").startswith(start) for name in others):
            return start
    return execution_id
