"""A comparison as lines of plain text, 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .experiment import Comparison, Interval, Outcome

__all__ = ["lines"]


def lines(found: Comparison) -> Iterator[str]:
    """The table, and what its columns mean."""
    cells = found.outcomes[0].rung.scenario.cells
    seeds = f"{found.seeds[0]}-{found.seeds[-1]}" if len(found.seeds) > 1 else str(found.seeds[0])
    yield f"{found.title}: {found.outcomes[0].runs[0].steps} steps, {cells} cells, seeds {seeds} (paired)"
    published = any(o.rung.published_ratio or o.rung.published_h for o in found.outcomes)
    yield (
        f"{'':11}{'hours':>13}{'x ' + found.base:>15}{'published' if published else '':>11}"
        f"{'x bound':>8}{'x path':>7}{'E[d]':>6}{'max':>4}{'idle':>5}"
    )
    for outcome in found.outcomes:
        yield _line(outcome)
    yield ""
    yield f"{'':11}{'token d':>8}{'train idle':>12}{'rollout idle':>14}{'switches':>10}{'timed out':>11}"
    for outcome in found.outcomes:
        timed_out = outcome.mean("executions_timed_out") / max(1.0, outcome.mean("executions"))
        yield (
            f"{outcome.rung.name[:10]:11}{outcome.mean('staleness_tokens'):8.2f}{outcome.mean('train_idle'):12.1%}"
            f"{outcome.mean('rollout_idle'):14.1%}{outcome.mean('switches'):10.0f}{timed_out:11.2%}"
        )
    yield ""
    yield "x bound: hours over the cells' work alone; x path: over the critical path of"
    yield "its own dispatches; E[d], max: staleness of groups; idle: of the training role"
    if len(found.seeds) < 6:
        count = f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else "one seed"
        yield f"{count} cannot tell differences under 3 %: use --seeds 6 or more"


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.rung.name[:10]:11}{_mean(outcome.hours, 2):>13}{_mean(outcome.ratio, 3):>15}"
        f"{_published(outcome):>11}"
        f"{outcome.work_ratio:8.2f}{outcome.path_ratio:7.2f}{outcome.mean('staleness_groups'):6.2f}"
        f"{max(run.staleness_max for run in outcome.runs):4}{outcome.mean('train_idle'):5.0%}"
    )


def _mean(value: Interval, digits: int) -> str:
    spread = f" ±{value.half:.{digits}f}" if math.isfinite(value.half) else ""
    return f"{value.mean:.{digits}f}{spread}"


def _published(outcome: Outcome) -> str:
    rung = outcome.rung
    if rung.published_h is not None:
        return f"{rung.published_h:.2f} h"
    if rung.published_ratio is None:
        return "-"
    least, most = rung.published_ratio
    return f"{least:.3f}" if least == most else f"{least:.2f}-{most:.2f}"
