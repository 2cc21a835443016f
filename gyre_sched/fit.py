"""The two-level lognormal fitted to what a ledger holds, executions that were cut among it.

log seconds of member j of group i = mu + b_i + e_ij with b, e normal. An execution that was cut at c counts as one of
at least c: expectation maximisation, each cut one stands at its expected value given its group's (Dempster, Laird and
Rubin 1977; the moments of a normal cut from below).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from .durations import TwoLevel
from .errors import ScenarioError
from .history import Sample

__all__ = ["estimate_error", "two_level"]

_ROUNDS = 40
_LEAST = 1e-4
"""Variances stay above this, so that a handful of equal durations divides by no zero."""


def two_level(samples: Sequence[Sample]) -> TwoLevel:
    """The fit; ScenarioError when no execution finished."""
    groups = [
        ([math.log(s) for s in one.ended if s > 0], [math.log(s) for s in one.cut if s > 0])
        for one in samples
        if one.ended or one.cut
    ]
    ended = [value for group in groups for value in group[0]]
    if not ended:
        raise ScenarioError("wanted executions that finished, got none; plan after the first burst")
    mu = statistics.fmean(ended)
    between = within = max(_LEAST, statistics.pvariance(ended) / 2)
    for _ in range(_ROUNDS):
        mu, between, within = _round(groups, mu, between, within)
    return TwoLevel(
        mean_s=math.exp(mu + (between + within) / 2),
        cv_query=math.sqrt(math.expm1(between)),
        cv_execution=math.sqrt(math.expm1(within)),
    )


def _round(
    groups: Sequence[tuple[list[float], list[float]]], mu: float, between: float, within: float
) -> tuple[float, float, float]:
    centres, spread, uncertain, members = [], 0.0, 0.0, 0
    deviation = math.sqrt(within)
    for ended, cut in groups:
        centre = (sum(ended) / within + mu / between) / (len(ended) / within + 1 / between)
        values, extra = ended, 0.0
        if cut:
            imputed = [_beyond(value, centre, deviation) for value in cut]
            values = ended + [value for value, _ in imputed]
            extra = sum(variance for _, variance in imputed)
        precision = len(values) / within + 1 / between
        centre = (sum(values) / within + mu / between) / precision
        centres.append(centre)
        uncertain += 1 / precision
        spread += sum((value - centre) ** 2 for value in values) + extra + len(values) / precision
        members += len(values)
    mu = statistics.fmean(centres)
    between = (sum((centre - mu) ** 2 for centre in centres) + uncertain) / len(centres)
    return mu, max(_LEAST, between), max(_LEAST, spread / members)


def _beyond(cut: float, centre: float, deviation: float) -> tuple[float, float]:
    """Mean and variance of a normal value that is known to lie beyond `cut`."""
    a = (cut - centre) / deviation
    tail = math.erfc(a / math.sqrt(2)) / 2
    hazard = math.exp(-a * a / 2) / math.sqrt(2 * math.pi) / tail if tail > 1e-300 else a
    return centre + deviation * hazard, deviation**2 * max(0.0, 1 + a * hazard - hazard * hazard)


def estimate_error(samples: Sequence[Sample], durations: TwoLevel) -> float:
    """Relative error of the estimates that queries carried; -1, as in `Scenario`, when too few carried one.

    A group's own mean is uncertain by its members' spread, which is taken off.
    """
    found = [
        (math.log(one.predicted_s / statistics.fmean(one.ended)), len(one.ended))
        for one in samples
        if one.predicted_s and not one.cut and sum(one.ended) > 0
    ]
    if len(found) < 2:
        return -1.0
    own = statistics.fmean(durations.cv_execution**2 / members for _, members in found)
    return math.sqrt(max(0.0, statistics.pvariance([error for error, _ in found]) - own))
