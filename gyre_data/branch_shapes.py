"""The shapes of branches by their reason: how deep they leave, how much lies below, what they threw away.

A branch is a call with a branch reason. It *leaves* where its first own node begins: the tokens above are shared with
what was recorded before (a sub-agent of its own prompt shares none, a retry shares its whole prompt). What lies below
that node, later calls included, is the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from .distributions import Distribution, distribution
from .node_rows import NodeRows, node_rows
from .tree import Tables

__all__ = ["BranchShape", "branch_shapes"]

Values = npt.NDArray[Any]


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
    parts = [_of_run(node_rows(run)) for run in runs if len(run.table("calls"))]
    if not parts:
        return ()
    reason_B, *figures = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    reasons = sorted(set(reason_B.tolist()))
    shapes = [_shape(reason, *(figure[reason_B == reason] for figure in figures)) for reason in reasons]
    return tuple(sorted(shapes, key=lambda shape: -shape.branches))


def _shape(
    reason: str, first_B: Values, shared_B: Values, tokens_B: Values, calls_B: Values, lost_B: Values
) -> BranchShape:
    own_B = first_B >= 0
    return BranchShape(
        reason=reason,
        branches=len(own_B),
        without_nodes=int((~own_B).sum()),
        shared_tokens=distribution(shared_B[own_B], "tokens"),
        branch_tokens=distribution(tokens_B[own_B], "tokens"),
        branch_calls=distribution(calls_B[own_B], "calls"),
        tokens_lost=int(lost_B.sum()),
    )


def _of_run(nodes: NodeRows) -> tuple[Values, ...]:
    """Of each branch: reason, its first own node (-1: none), tokens above that, tokens and calls below, tokens lost."""
    calls = nodes.calls
    checks, reasons = calls.column("fork_check").is_valid().to_numpy(), calls.column("branch_reason").to_pylist()
    reason_C = np.array(["false" if false else reason for false, reason in zip(checks, reasons, strict=True)], object)
    branch_B = np.flatnonzero([reason is not None for reason in reason_C])
    # A call's own nodes are one chain: the first of them is the least deep.
    first_C = np.full(len(calls), -1, np.int64)
    deepest_first = np.argsort(-nodes.depth_N, kind="stable")
    first_C[nodes.call_N[deepest_first]] = deepest_first
    leaf = nodes.place(pc.coalesce(calls.column("output_node"), calls.column("prompt_node")))
    columns = (
        nodes.column("start_pos").to_numpy(),
        nodes.below(nodes.num_tokens_N),
        nodes.below(np.bincount(leaf[leaf >= 0], minlength=len(nodes))),
    )
    first_B = first_C[branch_B]
    figures = [column[first_B] if len(column) else np.zeros(len(first_B), np.int64) for column in columns]
    lost_C = pc.fill_null(calls.column("tokens_lost"), 0).to_numpy()
    return reason_C[branch_B], first_B, *figures, lost_C[branch_B]
