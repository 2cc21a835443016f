"""The tree mask as dense blocks that tile its live cells once.

A *chain* is a run of segments in which each follows its parent without a gap; inside a chain the mask is plain causal.
All rows below a fork see the forked chain from its first row to the fork, in full. So the mask is one causal block per
chain and one full block per fork, and the blocks grow with the branch points, not with the depth.

The forks of one chain make a staircase: the higher a fork, the fewer of the chain's rows do the rows below it see. It
is cut by halves (`_staircase`), so that the blocks of one *level* share neither queries nor keys: a level is one call
of a kernel that takes many sequences, gathers no row twice, and a chain with n forks has about log2(n) levels.

Shapes: T rows, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gyre_data.errors import AlignmentError
from gyre_train.segment_table import SegmentTable, subtree_ends

__all__ = ["Block", "RowRanges", "blocks_of", "check_ranges"]

RowRanges = tuple[tuple[int, int], ...]
"""Ascending [start, end) runs of a pack's rows: those one context-parallel rank holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows [q_start, q_end) against keys [k_start, k_end): causal against themselves, or all of an ancestor range."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    level: int
    """Blocks of one level share neither queries nor keys; level 0 holds the causal blocks, which tile the queries."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _Fork:
    """Below the last row before `k_end`, rows [q_start, q_end) go on elsewhere than in the chain."""

    k_end: int
    q_start: int
    q_end: int


_Key = tuple[int, int, int]
"""Sorts a block into its level."""
_Cells = tuple[_Key, int, int, int, int]
"""Level key, q_start, q_end, k_start, k_end."""


def blocks_of(segments: SegmentTable, rows: RowRanges | None = None) -> tuple[Block, ...]:
    """The mask of `rows` (default: all) as blocks in row numbers of the pack, by level and row."""
    chains, forks, depths = _chains(segments)
    found: list[_Cells] = [((0, 0, 0), start, end, start, end) for start, end in chains.items()]
    for start, of_chain in forks.items():
        found += _staircase(start, of_chain, depths[start])
    if rows is not None:
        check_ranges(segments, rows)
        found = [part for cells in found for part in _clip(cells, rows)]
    found.sort()
    levels: dict[_Key, int] = {}
    return tuple(
        Block(q_start=q0, q_end=q1, k_start=k0, k_end=k1, causal=key[0] == 0, level=levels.setdefault(key, len(levels)))
        for key, q0, q1, k0, k1 in found
    )


def _chains(segments: SegmentTable) -> tuple[dict[int, int], dict[int, list[_Fork]], dict[int, int]]:
    """By a chain's first row: its end, its forks from the top down, and the number of forks above it."""
    ends_S = subtree_ends(segments)
    first_S: list[int] = []
    chains: dict[int, int] = {}
    forks: dict[int, list[_Fork]] = {}
    depths: dict[int, int] = {}
    for segment, (start, end, parent) in enumerate(
        zip(segments.start_S, segments.end_S, segments.parent_S, strict=True)
    ):
        # Depth first, so the next segment is the first child if there is one, and goes on in this chain.
        goes_on = parent >= 0 and parent == segment - 1
        first = first_S[parent] if goes_on else int(start)
        if not goes_on:
            depths[first] = depths[first_S[parent]] + 1 if parent >= 0 else 0
        first_S.append(first)
        chains[first] = int(end)
        if segment + 1 < len(ends_S) and segments.parent_S[segment + 1] == segment:
            q_start, q_end = int(ends_S[segment + 1]), int(ends_S[segment])  # all other children's subtrees
            if q_start < q_end:
                forks.setdefault(first, []).append(_Fork(k_end=int(end), q_start=q_start, q_end=q_end))
    return chains, forks, depths


def _staircase(start: int, forks: list[_Fork], depth: int) -> Iterator[_Cells]:
    """One block per fork: the middle fork and all below it see the rows down to it; then each half on its own.

    Rows below later forks come first in the layout and without gaps, so their union is one run.
    """
    pending = [(0, len(forks), start, 0)]
    while pending:
        low, high, k_start, halvings = pending.pop()
        if low == high:
            continue
        middle = (low + high) // 2
        fork = forks[middle]
        yield (1 + depth, 1 + halvings, 0), forks[high - 1].q_start, fork.q_end, k_start, fork.k_end
        pending.append((low, middle, k_start, halvings + 1))
        pending.append((middle + 1, high, fork.k_end, halvings + 1))


def _clip(cells: _Cells, rows: RowRanges) -> Iterator[_Cells]:
    (kind, halvings, _), q_start, q_end, k_start, k_end = cells
    for number, (first, last) in enumerate(rows):
        low, high = max(q_start, first), min(q_end, last)
        if low >= high:
            continue
        if kind:
            yield (kind, halvings, number), low, high, k_start, k_end
            continue
        yield (0, 0, 0), low, high, low, high
        if k_start < low:  # the part of the chain that other rows hold, seen in full
            yield (1, 0, number), low, high, k_start, low


def check_ranges(segments: SegmentTable, rows: Sequence[tuple[int, int]]) -> None:
    """Refuse ranges that are not ascending runs of the pack's rows."""
    edges = [edge for run in rows for edge in run]
    inside = not edges or (edges[0] >= 0 and edges[-1] <= segments.num_rows)
    if not inside or edges != sorted(edges) or any(start >= end for start, end in rows):
        raise AlignmentError(
            f"attention rows: wanted ascending [start, end) runs within {segments.num_rows} rows, got {tuple(rows)}; "
            "pass those this rank holds"
        )
