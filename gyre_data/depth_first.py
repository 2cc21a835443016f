"""Nodes of one execution in depth-first order, as arrays.

Given places of parents, the order, the parent and the end of the subtree of every node that a committed call's path
holds. Legend: R nodes as they come, N nodes of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .columns import Rows

__all__ = ["Order", "depth_first", "path_sums", "subtree_sums"]

Places = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Depth-first order: `row_N` says which row each node is; the subtree of node i is [i, end_N[i])."""

    row_N: Rows
    parent_N: Places
    depth_N: Places
    end_N: Places


def depth_first(parent_R: Rows, rank_R: Rows, needed_R: npt.NDArray[np.bool_]) -> Order | None:
    """Order the nodes that are needed and those above them; None when parents of a needed one run in a circle.

    `parent_R` is -1 for a root. Siblings stand in the order of `rank_R`, which is a permutation.
    """
    order = _preorder(parent_R, rank_R)
    place_R = np.full(len(parent_R), -1, np.int64)
    place_R[order] = np.arange(len(order))
    if (needed_R & (place_R < 0)).any():
        return None
    above = parent_R[order]
    parent_N = np.where(above >= 0, place_R[above], -1)
    end_N = np.arange(len(order)) + _sizes(parent_N)
    needed_N = subtree_sums(needed_R[order].astype(np.int64), end_N) > 0
    if not needed_N.all():
        place_N1 = np.concatenate([[0], np.cumsum(needed_N)])
        order, end_N, parent_N = order[needed_N], place_N1[end_N[needed_N]], parent_N[needed_N]
        parent_N = np.where(parent_N >= 0, place_N1[parent_N], -1)
    depth_N = np.arange(len(order)) - np.searchsorted(np.sort(end_N), np.arange(len(order)), side="right")
    return Order(
        row_N=order,
        parent_N=parent_N.astype(np.int32),
        depth_N=depth_N.astype(np.int32),
        end_N=end_N.astype(np.int32),
    )


def subtree_sums(value_N: Rows, end_N: npt.NDArray[np.integer]) -> Rows:
    """Sum over each node and all below it."""
    before_N1 = np.concatenate([[0], np.cumsum(value_N)])
    return np.asarray(before_N1[end_N] - before_N1[:-1], np.int64)


def path_sums(value_N: Rows, end_N: npt.NDArray[np.integer]) -> Rows:
    """Sum over each node and all above it."""
    step_N1 = np.zeros(len(value_N) + 1, np.int64)
    step_N1[:-1] = value_N
    np.subtract.at(step_N1, end_N, value_N)
    return np.cumsum(step_N1[:-1])


def _preorder(parent_R: Rows, rank_R: Rows) -> Rows:
    """Rows in depth-first order, as far as they can be reached from a root. A plain loop: a step a node."""
    count = len(parent_R)
    first, after = [-1] * (count + 1), [-1] * count  # slot -1, the last one, is above the roots
    parent = parent_R.tolist()
    for row in np.argsort(rank_R)[::-1].tolist():
        above = parent[row]
        after[row] = first[above]
        first[above] = row
    order: list[int] = []
    add, row = order.append, first[-1]
    while row >= 0:
        add(row)
        down = first[row]
        while down < 0 and row >= 0:  # up, until there is a sibling
            down = after[row]
            row = parent[row]
        row = down
    return np.asarray(order, np.int64)


def _sizes(parent_N: Rows) -> Rows:
    """Nodes in each subtree, itself included."""
    size, parent = [1] * len(parent_N), parent_N.tolist()
    for here in range(len(parent) - 1, -1, -1):
        if parent[here] >= 0:
            size[parent[here]] += size[here]
    return np.asarray(size, np.int64)
