"""What one or more runs hold, in one record: `gyre stats` shows it, docs/stats.md defines every figure.

What is not known is None (null in JSON), never zero. Figures that cost more than the time to look at a run are left out
unless they are asked for, and `left_out` says which flag brings them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from .branch_shapes import BranchShape, branch_shapes
from .counts import TreeCounts, count_run
from .distributions import Distributions, distributions
from .errors import ConfigError
from .execution import ExecutionInfo, executions
from .forecast import J_MAX, Forecast, forecast
from .hosted import Hosted, Prices, hosted
from .lean import lean
from .mismatch import Mismatch, mismatch
from .node_rows import NodeRows
from .outages import Outage, evaluator_name, outages
from .schema import ScoreStatus
from .scores import scores_by_execution
from .staleness import Staleness, staleness
from .tools import ToolShares, by_tool, num_messages
from .tree import Tables
from .types import Score

__all__ = ["TOOL_MESSAGES", "EvaluatorCounts", "Stats", "execution_state", "stats"]

TOOL_MESSAGES = 4_000
"""Runs with more messages than this get their tool shares only with `--by tool`: reading these is about a second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatorCounts:
    """Verdicts of one evaluator and version. `scored`, `partial`, `mean` and the extremes are of the last scored row of
    each execution, which is the one that counts."""

    evaluator: str
    scored: int
    failed: int
    skipped: int
    partial: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    first_failed_at: datetime | None
    last_failed_at: datetime | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counts of one or more runs."""

    executions: int
    by_state: dict[str, int]
    """running, scored, evaluator_failed (tried, never scored), unscored."""
    end_reasons: dict[str, int]
    tasks: int
    groups: int
    duration_p50_s: float | None
    """Median time from start to end, over ended executions."""
    evaluators: tuple[EvaluatorCounts, ...]
    trees: TreeCounts
    j_max: int | None
    hosted: Hosted | None
    """What hosted APIs used and cost; None when every call went to our own engines."""
    distributions: Distributions
    branch_shapes: tuple[BranchShape, ...]
    outages: tuple[Outage, ...]
    staleness: Staleness
    mismatch: Mismatch
    tools: ToolShares | None
    """None when there are too many messages to read in passing."""
    tool_messages: int
    """Distinct messages that tool shares are read from."""
    forecast: Forecast | None
    """None without a model."""
    left_out: Mapping[str, str]
    """What was not computed, by the name of its figure, and the flag that brings it."""

    @property
    def sharing(self) -> float | None:
        """Expanded tokens per distinct token."""
        return self.trees.sharing

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`; what is not known is null."""
        out = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("trees", "left_out")}
        for name in ("hosted", "distributions", "staleness", "mismatch", "tools"):
            out[name] = None if out[name] is None else asdict(out[name])
        for name in ("evaluators", "branch_shapes", "outages"):
            out[name] = [asdict(one) for one in out[name]]
        out["forecast"] = self.forecast and self.forecast.to_json()
        plain: dict[str, Any] = _plain(out | self.trees.to_json() | {"left_out": dict(self.left_out)})
        return plain


def _plain(value: Any) -> Any:
    """Times as ISO text, tuples as lists."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def stats(
    runs: Tables | Sequence[Tables],
    *,
    j_max: int | None = 5,
    prices: Prices | None = None,
    trainer: Tables | None = None,
    model: str | Path | None = None,
) -> Stats:
    """Count what one or more runs hold.

    `prices` are for hosted models, None takes the release's own table. `trainer` is the folder of a training run, for
    staleness and mismatch of what it consumed; ConfigError when it has no step. `model` asks for a forecast: a name of
    `model_shapes.MODELS`, or a folder with config.json.
    """
    given: list[Tables] = [cast(Tables, runs)] if hasattr(runs, "table") else list(runs)
    every = lean(given)
    if trainer is not None and not len(trainer.table("steps")):
        raise ConfigError(
            f"wanted the folder of a training run, {getattr(trainer, 'path', 'this one')} holds no step yet; give the "
            "output.dir of a `gyre train` that has taken one"
        )
    known: list[ExecutionInfo] = []
    states: Counter[str] = Counter()
    rows: list[Score] = []
    failed: list[Outage] = []
    total = TreeCounts()
    groups: set[tuple[int, str]] = set()
    for number, run in enumerate(every):
        scores, total = scores_by_execution(run), total + count_run(run, j_max=j_max)
        for info in executions(run).values():
            known.append(info)
            states[execution_state(info, scores.get(info.execution_id, ()))] += 1
            if info.group_id is not None:
                groups.add((number, info.group_id))
        rows += [row for found in scores.values() for row in _in_force(found)]
        failed += outages(scores)
    bills = [bill for run in every if (bill := hosted(run, prices)) is not None]
    spread = distributions(every, known, total.trajectory_lengths)
    nodes = [NodeRows(run) for run in every]
    messages = num_messages(nodes)
    left_out = {} if messages <= TOOL_MESSAGES else {"tools": "--by tool"}
    if model is None:
        left_out["forecast"] = "--model MODEL"
    return Stats(
        executions=len(known),
        by_state=dict(states),
        end_reasons=dict(Counter(str(e.end_reason or "unknown") for e in known if not e.running)),
        tasks=len({e.task_id for e in known if e.task_id is not None}),
        groups=len(groups),
        duration_p50_s=spread.execution_s["p50"],
        evaluators=_evaluators(rows),
        trees=total,
        j_max=j_max,
        hosted=sum(bills, Hosted()) if bills else None,
        distributions=spread,
        branch_shapes=branch_shapes(nodes),
        outages=tuple(failed),
        staleness=staleness(nodes, trainer=trainer),
        mismatch=mismatch(given, trainer=trainer),
        tools=by_tool(nodes) if messages <= TOOL_MESSAGES else None,
        tool_messages=messages,
        forecast=None if model is None else forecast(every, model, caps=sorted({*J_MAX, j_max or J_MAX[0]})),
        left_out=left_out,
    )


def execution_state(info: ExecutionInfo, scores: Iterable[Score]) -> str:
    """scored, running, evaluator_failed (tried, never scored) or unscored."""
    status = {score.status for score in scores}
    if ScoreStatus.SCORED in status:
        return "scored"
    if info.running:
        return "running"
    return "evaluator_failed" if ScoreStatus.FAILED in status else "unscored"


def _in_force(rows: Sequence[Score]) -> Iterator[Score]:
    """One execution's rows but for scored ones that the same evaluator scored anew."""
    last = {evaluator_name(row): row for row in rows if row.status == ScoreStatus.SCORED}
    return (row for row in rows if row.status != ScoreStatus.SCORED or last[evaluator_name(row)] is row)


def _evaluators(rows: Iterable[Score]) -> tuple[EvaluatorCounts, ...]:
    by_name: dict[str, list[Score]] = {}
    for row in rows:
        by_name.setdefault(evaluator_name(row), []).append(row)
    return tuple(_evaluator(name, found) for name, found in sorted(by_name.items()))


def _evaluator(name: str, rows: Sequence[Score]) -> EvaluatorCounts:
    values = [row.value for row in rows if row.value is not None and math.isfinite(row.value)]
    failed = [row.at for row in rows if row.status == ScoreStatus.FAILED]
    return EvaluatorCounts(
        evaluator=name,
        scored=sum(row.status == ScoreStatus.SCORED for row in rows),
        failed=len(failed),
        skipped=sum(row.status == ScoreStatus.SKIPPED for row in rows),
        partial=sum(bool(row.partial) for row in rows),
        mean=math.fsum(values) / len(values) if values else None,
        minimum=min(values, default=None),
        maximum=max(values, default=None),
        first_failed_at=min(failed, default=None),
        last_failed_at=max(failed, default=None),
    )
