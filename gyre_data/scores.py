"""Verdicts on executions: append-only rows, the latest scored row of each evaluator counts.

The latest is the one written last: rows of a run stand in the order of their commits. Their times are for people; a
clock that was set back must not bring an older verdict into force again.

A missing verdict is never a zero: an evaluator that failed, was skipped, or gave something that is not a number leaves
the execution without a reward, with a reason.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .arrays import from_table
from .errors import ConfigError
from .reasons import Reason
from .schema import ScoreStatus
from .tree import Tables
from .types import Score

__all__ = [
    "Reward",
    "evaluator_weights",
    "known_weights",
    "latest_scored",
    "make_score",
    "parse_weights",
    "reward",
    "score",
    "scores_by_execution",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """R of one execution with the rows it came from, or why there is none."""

    value: float | None = None
    score_ids: tuple[str, ...] = ()
    partial: bool = False
    reason: Reason | None = None
    detail: str = ""


def make_score(
    execution_id: str,
    value: float | None,
    *,
    evaluator: str,
    version: str | None = None,
    status: ScoreStatus | str | None = None,
    partial: bool | None = None,
    state_id: str | None = None,
    config_digest: str | None = None,
    detail: str | None = None,
) -> Score:
    """Build a row of `scores`; `evaluator` may be `name@version`. Status defaults to scored.

    Raises ConfigError for a value that is not a finite number, a scored row without a value, and a value on a row that
    was not scored.
    """
    name, _, named_version = evaluator.partition("@")
    status = ScoreStatus.SCORED if status is None else ScoreStatus(status)
    if not name:
        raise ConfigError(f"wanted an evaluator's name, got {evaluator!r}; write NAME or NAME@VERSION")
    if status == ScoreStatus.SCORED and (value is None or not math.isfinite(value)):
        came = "no value" if value is None else f"{value}, which is not a number"
        raise ConfigError(
            f"wanted a finite score of {execution_id} from {name}, got {came}; record it as failed "
            "(--failed), not as a guess"
        )
    if status != ScoreStatus.SCORED and value is not None:
        raise ConfigError(f"wanted no value on a {status} row of {name}, got {value}; leave the value out")
    return Score(
        score_id=f"s_{secrets.token_hex(10)}",
        execution_id=execution_id,
        evaluator=name,
        evaluator_version=version or named_version or None,
        config_digest=config_digest,
        status=status,
        value=None if value is None else float(value),
        partial=partial,
        state_id=state_id,
        detail=detail,
        at=datetime.now(UTC),
    )


def score(
    target: Any, execution: Any, value: float | None, *, evaluator: str, key: str | None = None, **more: Any
) -> Score:
    """Append a verdict durably and return its row; `more` as in `make_score`.

    `target` is a run or its path, written through the proxy that records it (which may want `key`) or under its own
    lock; or a writer that holds the lock. `execution` is an `Execution` or an id; of a run, the start of one is enough.
    """
    execution_id = getattr(execution, "execution_id", execution)
    if hasattr(target, "write"):
        row = make_score(execution_id, value, evaluator=evaluator, **more)
        target.write([row])
        return row
    from .execution import executions, find  # loaded here: admission reads scores and needs no writer
    from .reader import Run
    from .remote import append_scores

    if isinstance(target, str | Path):
        target = Run(Path(target))
    row = make_score(find(executions(target), execution_id), value, evaluator=evaluator, **more)
    (stored,), _ = append_scores(target, [row], key=key)
    return stored


def scores_by_execution(run: Tables) -> dict[str, list[Score]]:
    """All verdicts of a run by execution, in the order in which they were written."""
    found: dict[str, list[Score]] = {}
    rows: list[Score] = from_table("scores", run.table("scores"))
    for row in rows:
        found.setdefault(row.execution_id, []).append(row)
    return found


def latest_scored(rows: Iterable[Score], evaluator: str) -> Score | None:
    """The last scored row of an evaluator, given as `name` or `name@version`; None when it never scored."""
    scored = [row for row in _of(rows, evaluator) if row.status == ScoreStatus.SCORED]
    return scored[-1] if scored else None


def parse_weights(words: Iterable[str] | None) -> dict[str, float] | None:
    """Evaluators as commands take them, NAME or NAME=WEIGHT; None when none is named."""
    found: dict[str, float] = {}
    for word in words or ():
        name, sep, weight = word.partition("=")
        try:
            found[name] = float(weight) if sep else 1.0
        except ValueError:
            raise ConfigError(f"wanted --evaluator NAME or NAME=WEIGHT, got {word!r}; write pytest=0.5") from None
    return found or None


def known_weights(words: Iterable[str] | None, runs: Iterable[Tables]) -> dict[str, float] | None:
    """`parse_weights`, for runs whose verdicts are there: ConfigError for an evaluator of which they hold no row."""
    found = parse_weights(words)
    if found is None:
        return None
    rows = [row for run in runs for held in scores_by_execution(run).values() for row in held]
    names = sorted({row.evaluator for row in rows})
    for name in found:
        if not any(_of(rows, name)):
            raise ConfigError(
                f"wanted an evaluator that judged something here, got {name!r}; there is {', '.join(names) or 'none'}"
            )
    return found


def evaluator_weights(rows: Iterable[Score], wanted: Mapping[str, float] | None) -> dict[str, float]:
    """The evaluators that make the reward: those wanted, else the only one there is.

    Raises ConfigError when several evaluators scored and none was named: the choice is not ours to guess.
    """
    names = sorted({row.evaluator for row in rows})
    if wanted is not None:
        bad = [f"{name}={weight}" for name, weight in wanted.items() if not math.isfinite(weight)]
        if bad or not wanted:
            raise ConfigError(f"wanted evaluators with finite weights, got {', '.join(bad) or 'none'}; known: {names}")
        return dict(wanted)
    if len(names) > 1:
        raise ConfigError(
            f"wanted to know which evaluator is the reward, the runs hold {', '.join(names)}; "
            f"set evaluators, for example {{{names[0]!r}: 1.0}}, or --evaluator {names[0]}"
        )
    return dict.fromkeys(names, 1.0)


def reward(rows: Iterable[Score], weights: Mapping[str, float]) -> Reward:
    """R = weighted sum over the evaluators of their latest scored rows; every one of them must have scored.

    `rows` are in the order in which they were written, as `scores_by_execution` gives them.
    """
    rows = list(rows)
    if not weights:
        return Reward(reason=Reason.NO_SCORE, detail="no evaluator result")
    used: list[tuple[float, Score]] = []
    for evaluator, weight in weights.items():
        row = latest_scored(rows, evaluator)
        if row is None:
            return _missing(list(_of(rows, evaluator)), evaluator)
        if row.value is None or not math.isfinite(row.value):
            return Reward(reason=Reason.NOT_A_NUMBER, detail=f"{evaluator} gave {row.value}: not a number")
        used.append((weight, row))
    return Reward(
        value=math.fsum(weight * row.value for weight, row in used if row.value is not None),
        score_ids=tuple(row.score_id for _, row in used),
        partial=any(bool(row.partial) for _, row in used),
    )


def _missing(tried: list[Score], evaluator: str) -> Reward:
    if not tried:
        return Reward(reason=Reason.NO_SCORE, detail=f"no evaluator result: {evaluator} never ran")
    last = tried[-1]
    told = f"no evaluator result: {evaluator} {last.status}" + (f" ({last.detail})" if last.detail else "")
    return Reward(reason=Reason.EVALUATOR_FAILED if last.status == ScoreStatus.FAILED else Reason.NO_SCORE, detail=told)


def _of(rows: Iterable[Score], evaluator: str) -> Iterable[Score]:
    name, _, version = evaluator.partition("@")
    return (row for row in rows if row.evaluator == name and (not version or row.evaluator_version == version))
