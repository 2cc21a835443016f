"""The shapes of branches by their reason: how deep they leave, how much lies below, what they threw away.

A branch is a call with a branch reason. It *leaves* where its first own node begins: the tokens above are shared with
what was recorded before (a sub-agent of its own prompt shares none, a retry shares its whole prompt). What lies below
that node, later calls included, is the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .distributions import Distribution, distribution
from .node_rows import node_rows
from .tree import Tables

__all__ = ["BranchShape", "branch_shapes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchShape:
    """Branches of one reason."""

    reason: str
    """A branch reason; `false` for forks that a failed check made, whatever their reason."""
    branches: int
    without_nodes: int
    """Of these, calls that added no node of their own (served from a running call, or failed): in no figure below."""
    shared_tokens: Distribution
    """Tokens above the branch."""
    branch_tokens: Distribution
    """Distinct tokens in the branch."""
    branch_calls: Distribution
    """Calls in the branch, its first one included."""
    tokens_lost: int
    """Recorded tokens of the old path that the first prompts did not reuse, added up over those where it is known."""


def branch_shapes(runs: Sequence[Tables]) -> tuple[BranchShape, ...]:
    """Shapes over runs together, most frequent reason first."""
    parts = [part for run in runs if len(run.table("calls")) for part in _of_run(run)]
    reasons: dict[str, list[pa.Table]] = {}
    for reason, rows in parts:
        reasons.setdefault(reason, []).append(rows)
    shapes = [_shape(reason, pa.concat_tables(tables)) for reason, tables in sorted(reasons.items())]
    return tuple(sorted(shapes, key=lambda shape: -shape.branches))


def _shape(reason: str, rows: pa.Table) -> BranchShape:
    with_nodes = rows.filter(pc.is_valid(rows.column("shared")))
    values = {name: with_nodes.column(name).to_numpy() for name in ("shared", "tokens", "calls")}
    return BranchShape(
        reason=reason,
        branches=len(rows),
        without_nodes=len(rows) - len(with_nodes),
        shared_tokens=distribution(values["shared"], "tokens"),
        branch_tokens=distribution(values["tokens"], "tokens"),
        branch_calls=distribution(values["calls"], "calls"),
        tokens_lost=pc.sum(rows.column("lost")).as_py() or 0,
    )


def _of_run(run: Tables) -> list[tuple[str, pa.Table]]:
    nodes = node_rows(run)
    calls = nodes.calls
    # A call's own nodes are one chain: the first of them is the least deep.
    first_C = np.full(len(calls), -1, np.int64)
    deepest_first = np.argsort(-nodes.depth_N, kind="stable")
    first_C[nodes.call_N[deepest_first]] = deepest_first
    tokens_N, start_N = nodes.below(nodes.num_tokens_N), nodes.column("start_pos").to_numpy()
    leaf = nodes.place(pc.coalesce(calls.column("output_node"), calls.column("prompt_node")))
    calls_N = nodes.below(np.bincount(leaf[leaf >= 0], minlength=len(nodes)))
    missing_C = first_C < 0
    at_C = np.where(missing_C, 0, first_C)
    figures = {
        name: pa.array(values[at_C] if len(values) else np.zeros(len(calls), np.int64), pa.int64(), mask=missing_C)
        for name, values in (("shared", start_N), ("tokens", tokens_N), ("calls", calls_N))
    }
    whole = pa.table({**figures, "lost": calls.column("tokens_lost")})
    false = pc.is_valid(calls.column("fork_check"))
    reason = pc.if_else(false, "false", calls.column("branch_reason"))
    names = pc.unique(reason).drop_null().to_pylist()
    return [(name, whole.filter(pc.fill_null(pc.equal(reason, name), False))) for name in names]
