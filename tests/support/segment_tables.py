"""Segment tables for attention tests: random forests, one-row segments, many forks in a row and in a column."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from gyre_train.segment_table import SegmentTable


def table_of(lengths: list[int], parents: list[int]) -> SegmentTable:
    """Segments of these lengths in depth-first order."""
    ends = np.cumsum(np.array(lengths, np.int64))
    return SegmentTable(start_S=ends - np.array(lengths, np.int64), end_S=ends, parent_S=np.array(parents, np.int32))


def comb(turns: int, turn: int = 5, side: int = 20, trunk: int = 40) -> SegmentTable:
    """A trunk from which a side branch leaves at every turn; the trunk goes on first."""
    down = [(trunk, -1), *((turn, i) for i in range(turns))]
    up = [(side, i) for i in reversed(range(turns))]
    return table_of(*map(list, zip(*down, *up, strict=True)))


def ladder(rungs: int, run: int = 4) -> SegmentTable:
    """Each run of rows has a one-row child first and then the next run: every row has all runs above it as forks."""
    lengths, parents, last = [run], [-1], 0
    for _ in range(rungs):
        lengths += [1, run]
        parents += [last, last]
        last = len(parents) - 1
    return table_of(lengths, parents)


@st.composite
def segment_tables(draw: st.DrawFn, max_segments: int = 24) -> SegmentTable:
    """Shapes come from a seeded generator rather than from draws, which would be small and nearly always a chain."""
    num, seed = draw(st.integers(1, max_segments)), draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    leaf_first = float(rng.random())
    parents: list[int] = []
    path: list[int] = []
    for segment in range(num):
        keep = 0
        if path and rng.random() >= 0.1:
            keep = len(path) if rng.random() < leaf_first else int(rng.integers(1, len(path) + 1))
        path = path[:keep]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    longest = int(rng.choice([1, 3, 9]))
    return table_of([int(n) for n in rng.integers(1, longest + 1, num)], parents)


@st.composite
def row_ranges(draw: st.DrawFn, table: SegmentTable) -> tuple[tuple[int, int], ...]:
    """One or two ascending runs of rows, perhaps touching."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    cuts = sorted(int(n) for n in rng.integers(0, table.num_rows + 1, 4))
    runs = tuple((a, b) for a, b in (cuts[:2], cuts[2:]) if a < b)
    return runs or ((0, table.num_rows),)
