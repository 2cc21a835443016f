"""When evaluators failed: the outage map. A failed evaluation leaves an execution without a verdict, never with a zero.

An outage of an evaluator is a longest run of failed verdicts, in the order of time, without a scored one of the same
evaluator and version between them. An execution is *excluded* by it while no verdict of that evaluator scored it; one
that was judged again later is *recovered*.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from .schema import ScoreStatus
from .types import Score

__all__ = ["Outage", "evaluator_name", "outages"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """One window in which an evaluator failed."""

    evaluator: str
    """With its version behind an @, where it has one."""
    first_failed_at: datetime
    last_failed_at: datetime
    scored_again_at: datetime | None
    """The next verdict that scored; None when there is none yet."""
    failures: int
    executions: tuple[str, ...]
    """Hit by it, by the time of their first failure."""
    excluded: int
    """Of these, still without a verdict of this evaluator: left out of training, not counted as zero."""


def evaluator_name(row: Score) -> str:
    """`name@version`, or the name of an evaluator without a version."""
    return row.evaluator + (f"@{row.evaluator_version}" if row.evaluator_version else "")


def outages(scores: Mapping[str, Iterable[Score]]) -> tuple[Outage, ...]:
    """Every outage in the verdicts of a run (`scores_by_execution`), by evaluator and time."""
    by_name: dict[str, list[Score]] = {}
    for rows in scores.values():
        for row in rows:
            by_name.setdefault(evaluator_name(row), []).append(row)
    return tuple(outage for name, rows in sorted(by_name.items()) for outage in _of_one(name, rows))


def _of_one(name: str, rows: Sequence[Score]) -> Iterable[Outage]:
    scored = {row.execution_id for row in rows if row.status == ScoreStatus.SCORED}
    open_: list[Score] = []
    for row in sorted(rows, key=lambda row: (row.at, row.score_id)):
        if row.status == ScoreStatus.FAILED:
            open_.append(row)
        elif row.status == ScoreStatus.SCORED and open_:
            yield _outage(name, open_, row.at, scored)
            open_ = []
    if open_:
        yield _outage(name, open_, None, scored)


def _outage(name: str, failed: Sequence[Score], again: datetime | None, scored: set[str]) -> Outage:
    hit = tuple(dict.fromkeys(row.execution_id for row in failed))
    return Outage(
        evaluator=name,
        first_failed_at=failed[0].at,
        last_failed_at=failed[-1].at,
        scored_again_at=again,
        failures=len(failed),
        executions=hit,
        excluded=sum(execution_id not in scored for execution_id in hit),
    )
