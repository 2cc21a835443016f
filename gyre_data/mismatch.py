"""How far recorded log-probs are from recomputed ones. Where nobody recomputed them it is unknown, never zero.

Two sources, told apart: a trainer's folder, whose steps record mean and largest |trainer - behaviour| of the tokens
they trained; and `teacher_logprobs` of the run, another model's log-probs of the same tokens. A teacher that is the
very version that sampled measures the engine against itself; any other one measures how far two models are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from .arrays import list_views
from .json_values import object_of
from .ledger import steps
from .tree import Tables

__all__ = ["Mismatch", "TeacherGap", "mismatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherGap:
    """|teacher - behaviour| over the tokens that have both."""

    teacher: str
    tokens: int
    mean: float
    p50: float
    p99: float
    maximum: float
    same_version: bool
    """Every one of these tokens was sampled by exactly this version."""
    nodes_unmatched: int
    """Rows of this teacher on nodes without behaviour log-probs of the same length: in no figure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """|log-prob of the trainer - log-prob of the engine|, as the trainer's steps recorded it."""

    steps: int
    """Steps of the trainer's folder that recorded it; 0 without a folder."""
    tokens: int
    """Trained tokens of these steps."""
    mean: float | None
    """Over tokens; None is unknown."""
    maximum: float | None
    teachers: tuple[TeacherGap, ...]


def mismatch(runs: Sequence[Tables], *, trainer: Tables | None = None) -> Mismatch:
    """Mismatch of what `trainer` trained, and the gaps to teachers recorded in the runs."""
    told: list[tuple[int, float, float]] = []
    for step in steps(trainer) if trainer is not None else ():
        figures = object_of(step.metrics)
        if "mismatch_mean" in figures:
            told.append((step.trained_tokens, figures["mismatch_mean"], figures["mismatch_max"]))
    tokens = sum(number for number, _, _ in told)
    return Mismatch(
        steps=len(told),
        tokens=tokens,
        mean=sum(number * mean for number, mean, _ in told) / tokens if tokens else None,
        maximum=max((largest for _, _, largest in told), default=None),
        teachers=_teachers(runs),
    )


def _teachers(runs: Sequence[Tables]) -> tuple[TeacherGap, ...]:
    gaps: dict[str, list[npt.NDArray[Any]]] = {}
    same: dict[str, bool] = {}
    unmatched: dict[str, int] = {}
    for run in runs:
        rows = run.table("teacher_logprobs")
        if not len(rows):
            continue
        rows = rows.sort_by("at")
        latest = {(one["teacher"], one["node_id"]): i for i, one in enumerate(_keys(rows))}
        nodes = run.table("nodes")
        place = pc.index_in(rows.column("node_id"), value_set=nodes.column("node_id")).to_pylist()
        theirs = list_views(rows.column("logprobs"))
        for (teacher, _), row in latest.items():
            node = place[row]
            ours = None if node is None else nodes.column("logprobs")[node].values
            value = theirs[row]
            if ours is None or value is None or not len(value) or len(ours) != len(value):
                unmatched[teacher] = unmatched.get(teacher, 0) + 1
                continue
            gaps.setdefault(teacher, []).append(np.abs(value - ours.to_numpy()))
            spans = nodes.column("policy_versions")[node].as_py() or [{}]
            own = all(f"{span.get('policy_id')}:{span.get('n')}" == teacher for span in spans)
            same[teacher] = same.get(teacher, True) and own
    return tuple(_gap(teacher, found, same[teacher], unmatched.get(teacher, 0)) for teacher, found in gaps.items())


def _keys(rows: Any) -> list[dict[str, str]]:
    found: list[dict[str, str]] = rows.select(["teacher", "node_id"]).to_pylist()
    return found


def _gap(teacher: str, found: Sequence[npt.NDArray[Any]], same: bool, unmatched: int) -> TeacherGap:
    values = np.concatenate(found)
    return TeacherGap(
        teacher=teacher,
        tokens=len(values),
        mean=float(values.mean(dtype=np.float64)),
        p50=float(np.percentile(values, 50)),
        p99=float(np.percentile(values, 99)),
        maximum=float(values.max()),
        same_version=same,
        nodes_unmatched=unmatched,
    )
