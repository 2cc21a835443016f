"""A controller's figures as Prometheus text, in a file for node_exporter's textfile collector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from .api import Role
from .history import History

__all__ = ["exposition", "write_metrics"]

_MEASURED = ("to_train_s", "to_rollout_s", "optimiser_s", "pull_s", "publish_s")

Sample = tuple[Mapping[str, str], float]


def write_metrics(path: Path, history: History) -> None:
    """Put the figures of this moment into `path`; a reader sees the file before or after, never half of it."""
    partial = path.with_suffix(".partial")
    partial.write_text(exposition(history), encoding="utf-8")
    partial.replace(path)


def exposition(history: History) -> str:
    """Every figure with its help and type."""
    state, groups = history.state, history.state.groups
    roles = Counter(cell.role for cell in state.cells.values())
    step = state.step
    figures: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("cells", "gauge", "cells by role", [({"role": role.value}, roles[role]) for role in Role]),
        ("version", "gauge", "optimiser steps applied", [({}, state.version)]),
        ("rollout_version", "gauge", "version of the weights that serve", [({}, state.rollout_version)]),
        ("executions_unfinished", "gauge", "executions dispatched that may still call", [({}, groups.unfinished)]),
        ("groups_outstanding", "gauge", "groups dispatched and not consumed", [({}, len(groups.outstanding))]),
        ("groups_ready", "gauge", "groups ready that no step has taken", [({}, len(groups.ready))]),
        ("groups_dispatched_total", "counter", "groups dispatched", [({}, groups.dispatched)]),
        ("groups_consumed_total", "counter", "groups trained on", [({}, groups.consumed)]),
        ("groups_dropped_total", "counter", "groups given up", [({}, groups.dropped)]),
        ("staleness_sum", "counter", "sum of the staleness of consumed groups, in steps", [({}, groups.staleness_sum)]),
        ("staleness_max", "gauge", "largest staleness of a consumed group", [({}, groups.staleness_max)]),
        ("bursts_total", "counter", "bursts ended", [({}, groups.bursts)]),
        ("step_open", "gauge", "1 while a step is open", [({}, float(step is not None))]),
        (
            "mean_seconds", "gauge", "mean time that it took, on the ledger's clock",
            [({"of": name[:-2]}, history.mean_s(name)) for name in _MEASURED],
        ),
    ]  # fmt: skip
    lines: list[str] = []
    for name, kind, told, samples in figures:
        lines += [f"# HELP gyre_sched_{name} {told}", f"# TYPE gyre_sched_{name} {kind}"]
        for labels, value in samples:
            inside = ",".join(f'{key}="{label}"' for key, label in labels.items())
            lines.append(f"gyre_sched_{name}{{{inside}}} {value!r}" if inside else f"gyre_sched_{name} {value!r}")
    return "\n".join(lines) + "\n"
