"""How lengths and times are distributed: fixed quantiles, and histograms whose bins never depend on the data.

Bins are the same for every run, so that histograms of two runs can be compared and added up: a bin holds the values
from its edge up to the next edge, the last one all that is larger. Quantiles interpolate linearly between values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .execution import ExecutionInfo
from .tree import Tables

__all__ = ["QUANTILES", "SECOND_EDGES", "TOKEN_EDGES", "Distribution", "Distributions", "distribution", "distributions"]

QUANTILES = (5, 25, 50, 75, 95, 99)
TOKEN_EDGES = (0, *(2**power for power in range(8, 22)))
"""0, 256, 512, ... 1,048,576, 2,097,152 tokens."""
SECOND_EDGES = (
    0.0,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
    7200.0,
    14400.0,
)

Values = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Values of one quantity; `count` have one, `unknown` have none and are in no figure."""

    unit: str
    count: int
    unknown: int
    mean: float | None
    minimum: float | None
    maximum: float | None
    quantiles: dict[str, float]
    """By name, p5 to p99; empty without values."""
    edges: tuple[float, ...]
    histogram: tuple[int, ...]
    """Values per bin; bin k starts at edge k."""

    def __getitem__(self, name: str) -> float | None:
        """A quantile by its name; None without values."""
        return self.quantiles.get(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distributions:
    """The distributions that `gyre stats` tells."""

    trajectory_tokens: Distribution
    """Per candidate trajectory, root to leaf."""
    execution_tokens: Distribution
    """Distinct tokens per execution with calls."""
    execution_calls: Distribution
    call_prompt_tokens: Distribution
    """Tokens sent, per call."""
    call_output_tokens: Distribution
    execution_s: Distribution
    """From start to end, per ended execution."""
    call_s: Distribution
    """From acceptance to the end of the reply, per call."""
    call_first_token_s: Distribution
    """From acceptance to the first sampled token."""


def distribution(values: Values, unit: str, *, unknown: int = 0) -> Distribution:
    """Describe values, none of them missing; `unit` is tokens, calls or seconds and chooses the bins."""
    edges = SECOND_EDGES if unit == "seconds" else TOKEN_EDGES if unit == "tokens" else (0, *(2**p for p in range(13)))
    some = len(values) > 0
    shares: Values = np.percentile(values, QUANTILES) if some else np.zeros(0)
    return Distribution(
        unit=unit,
        count=len(values),
        unknown=unknown,
        mean=float(np.mean(values)) if some else None,
        minimum=float(np.min(values)) if some else None,
        maximum=float(np.max(values)) if some else None,
        quantiles={f"p{q}": float(value) for q, value in zip(QUANTILES, shares, strict=False)},
        edges=tuple(edges),
        histogram=tuple(np.histogram(values, [*edges, np.inf])[0].tolist()) if some else (0,) * len(edges),
    )


def distributions(
    runs: Sequence[Tables], known: Iterable[ExecutionInfo], trajectory_lengths: Sequence[int]
) -> Distributions:
    """Distributions over runs together; `known` are their executions, `trajectory_lengths` their candidates' tokens."""
    calls = [_of_calls(run.table("calls")) for run in runs]
    sizes = [_of_executions(run) for run in runs]
    known = list(known)
    took = [(e.ended_at - e.started_at).total_seconds() for e in known if e.ended_at and e.started_at]
    made = {name: _joined([one[name] for one in calls], unit) for name, unit in _CALL_UNITS.items()}
    return Distributions(
        trajectory_tokens=distribution(np.array(trajectory_lengths, np.int64), "tokens"),
        execution_tokens=distribution(np.concatenate([_NONE, *(tokens for tokens, _ in sizes)]), "tokens"),
        execution_calls=distribution(np.concatenate([_NONE, *(number for _, number in sizes)]), "calls"),
        execution_s=distribution(np.array(took), "seconds", unknown=len(known) - len(took)),
        **made,
    )


_NONE = np.zeros(0, np.int64)
_CALL_UNITS = {
    "call_prompt_tokens": "tokens",
    "call_output_tokens": "tokens",
    "call_s": "seconds",
    "call_first_token_s": "seconds",
}
assert set(_CALL_UNITS) < {field.name for field in fields(Distributions)}


def _joined(columns: Sequence[pa.ChunkedArray], unit: str) -> Distribution:
    values = [column.drop_null().to_numpy() for column in columns]
    return distribution(np.concatenate([_NONE, *values]), unit, unknown=sum(column.null_count for column in columns))


def _of_calls(calls: pa.Table) -> dict[str, pa.ChunkedArray]:
    start = calls.column("started_at")
    return {
        "call_prompt_tokens": calls.column("prompt_tokens"),
        "call_output_tokens": calls.column("output_tokens"),
        "call_s": _seconds(start, calls.column("ended_at")),
        "call_first_token_s": _seconds(start, calls.column("first_token_at")),
    }


def _seconds(start: pa.ChunkedArray, end: pa.ChunkedArray) -> pa.ChunkedArray:
    took = pc.cast(pc.subtract(end, start), pa.int64())  # microseconds
    return pc.divide(pc.cast(took, pa.float64()), 1e6)


def _of_executions(run: Tables) -> tuple[Values, Values]:
    """Distinct tokens and calls of each execution with calls. Nodes of calls that were never committed do not count."""
    calls, nodes = run.table("calls"), run.table("nodes")
    ids = pc.unique(calls.column("execution_id"))
    if not len(ids):
        return _NONE, _NONE
    committed = pc.is_in(nodes.column("call_id"), value_set=pc.unique(calls.column("call_id"))).to_numpy()
    length = pc.coalesce(nodes.column("counted_tokens"), pc.list_value_length(nodes.column("token_ids")))
    owner = pc.index_in(nodes.column("execution_id"), value_set=ids).fill_null(0).to_numpy()
    tokens = np.bincount(owner[committed], weights=length.to_numpy()[committed], minlength=len(ids))
    number = np.bincount(pc.index_in(calls.column("execution_id"), value_set=ids).to_numpy(), minlength=len(ids))
    return tokens.astype(np.int64), number
