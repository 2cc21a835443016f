"""Ownership inside one execution: which candidate trajectories are kept, and which trains each sampled token.

Guaranteed: the kept list for a smaller `j_max` is a prefix of the list for a larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import numpy as np

from .eligible import ROLE_ORDER, Candidate, Eligibility, candidates
from .reasons import Reason
from .schema import AgentRole
from .tree import Tree
from .types import Ints

__all__ = ["AdmittedTrajectory", "Count", "Exclusion", "keep"]

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
    rank = {role: number for number, role in enumerate(role_order)}
    left = [c for c in candidates(tree, judged) if c.role in rank]
    out = [
        _exclude(tree, c, Reason.ROLE_NOT_WANTED, f"role {c.role} is not in role_order")
        for c in candidates(tree, judged)
        if c.role not in rank
    ]
    tokens_N = np.where(judged.trainable_N, tree.num_tokens_N, 0)
    free_N = tokens_N.copy()
    kept: list[AdmittedTrajectory] = []

    def place(c: Candidate) -> tuple[int, int, datetime, str]:
        return rank[c.role], -int(free_N[c.path].sum()), c.call.started_at, tree.node_id[c.leaf]

    def owned_by(c: Candidate) -> Ints:
        return c.path[(free_N if count == "once" else tokens_N)[c.path] > 0]

    while left and (j_max is None or len(kept) < j_max):
        best = min(left, key=place)
        left.remove(best)
        owned = owned_by(best)
        if not len(owned):
            out.append(_exclude(tree, best, Reason.NOTHING_NEW, _NOTHING_NEW))
            continue
        kept.append(
            AdmittedTrajectory(
                index=len(kept),
                role=best.role,
                leaf=best.leaf,
                path=tuple(best.path.tolist()),
                owned=tuple(owned.tolist()),
                num_owned=int(tokens_N[owned].sum()),
            )
        )
        free_N[best.path] = 0
    for late in sorted(left, key=place):
        if len(owned_by(late)):
            detail = f"J_max {j_max} reached; {int(free_N[late.path].sum())} tokens without owner"
            out.append(_exclude(tree, late, Reason.BEYOND_J_MAX, detail))
        else:
            out.append(_exclude(tree, late, Reason.NOTHING_NEW, _NOTHING_NEW))
    calls = [
        Exclusion(execution_id=tree.execution_id, call_id=call_id, reason=reason, detail=detail)
        for call_id, (reason, detail) in sorted(judged.reasons.items())
    ]
    return tuple(kept), calls + out


_NOTHING_NEW = "all its trainable tokens have an owner, or it has none"


def _exclude(tree: Tree, candidate: Candidate, reason: Reason, detail: str) -> Exclusion:
    node_id = tree.node_id[candidate.leaf]
    return Exclusion(execution_id=tree.execution_id, node_id=node_id, reason=reason, detail=detail)
