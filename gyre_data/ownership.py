"""Ownership inside one execution: which candidate trajectories are kept, and which trains each sampled token.

Guaranteed: the kept list for a smaller `j_max` is a prefix of the list for a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .depth_first import path_sums
from .eligible import ROLE_ORDER, Candidate, Eligibility, candidates
from .reasons import Reason
from .schema import AgentRole
from .tree import Tree
from .types import Ints

__all__ = ["AdmittedTrajectory", "Count", "Exclusion", "keep", "kept_trajectories"]

Count = Literal["once", "per_row"]
"""Whether a sampled token is trained once, by its owner, or in every kept trajectory that holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedTrajectory:
    """A kept path: `owned` are the sampled nodes whose tokens are trained through it (node indices of the tree)."""

    index: int
    role: AgentRole
    leaf: int
    path: tuple[int, ...]
    owned: tuple[int, ...]
    num_owned: int
    """Tokens of the owned nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """Something left out: an execution, a call of it, or a trajectory (named by its leaf node)."""

    execution_id: str
    reason: Reason
    detail: str
    call_id: str | None = None
    node_id: str | None = None


def keep(
    tree: Tree,
    judged: Eligibility,
    *,
    j_max: int | None = 5,
    role_order: Sequence[AgentRole] = ROLE_ORDER,
    count: Count = "once",
) -> tuple[tuple[AdmittedTrajectory, ...], list[Exclusion]]:
    """Choose the kept trajectories of one execution and give every sampled token its owner.

    By role first, then most trainable tokens not yet owned, then time: so the kept list for a smaller `j_max` is a
    prefix of the list for a larger one.
    """
    kept, left_out = _choose(tree, judged, j_max, role_order, count)
    calls = [
        Exclusion(execution_id=tree.execution_id, call_id=call_id, reason=reason, detail=detail)
        for call_id, (reason, detail) in sorted(judged.reasons.items())
    ]
    return kept, calls + left_out


def kept_trajectories(tree: Tree, judged: Eligibility, *, j_max: int | None = 5) -> tuple[AdmittedTrajectory, ...]:
    """The kept trajectories alone, without a word on what is left out: for counting."""
    return _choose(tree, judged, j_max, ROLE_ORDER, "once")[0]


def _choose(
    tree: Tree, judged: Eligibility, j_max: int | None, role_order: Sequence[AgentRole], count: Count
) -> tuple[tuple[AdmittedTrajectory, ...], list[Exclusion]]:
    """The kept trajectories, and the candidates that are not among them."""
    rank = {role: number for number, role in enumerate(role_order)}
    every = candidates(tree, judged)
    left = [c for c in every if c.role in rank]
    out = [
        _exclude(tree, c, Reason.ROLE_NOT_WANTED, f"role {c.role} is not in role_order")
        for c in every
        if c.role not in rank
    ]
    tokens_N = np.where(judged.trainable_N, tree.num_tokens_N, 0)
    free_N = tokens_N.copy()
    started_C = tree.facts.started_us
    kept: list[AdmittedTrajectory] = []

    def by_place(some: list[Candidate]) -> list[Candidate]:
        """Best first, as things are owned now."""
        free = path_sums(free_N, tree.end_N)
        return sorted(
            some, key=lambda c: (rank[c.role], -int(free[c.leaf]), int(started_C[c.number]), tree.node_id[c.leaf])
        )

    def owned_by(path: Ints) -> Ints:
        return path[(free_N if count == "once" else tokens_N)[path] > 0]

    while left and (j_max is None or len(kept) < j_max):
        best = by_place(left)[0]
        left.remove(best)
        path = best.path
        owned = owned_by(path)
        if not len(owned):
            out.append(_exclude(tree, best, Reason.NOTHING_NEW, _NOTHING_NEW))
            continue
        kept.append(
            AdmittedTrajectory(
                index=len(kept),
                role=best.role,
                leaf=best.leaf,
                path=tuple(path.tolist()),
                owned=tuple(owned.tolist()),
                num_owned=int(tokens_N[owned].sum()),
            )
        )
        free_N[path] = 0
    for late in by_place(left):
        path = late.path
        if len(owned_by(path)):
            detail = f"J_max {j_max} reached; {int(free_N[path].sum())} tokens without owner"
            out.append(_exclude(tree, late, Reason.BEYOND_J_MAX, detail))
        else:
            out.append(_exclude(tree, late, Reason.NOTHING_NEW, _NOTHING_NEW))
    return tuple(kept), out


_NOTHING_NEW = "all its trainable tokens have an owner, or it has none"


def _exclude(tree: Tree, candidate: Candidate, reason: Reason, detail: str) -> Exclusion:
    node_id = tree.node_id[candidate.leaf]
    return Exclusion(execution_id=tree.execution_id, node_id=node_id, reason=reason, detail=detail)
