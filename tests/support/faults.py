"""Deliberate mistakes in a pack: each must fail whatever compares packed trees with something."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from hypothesis import reject

from gyre_data.errors import AlignmentError
from gyre_train.pack import Pack
from gyre_train.segment_table import SegmentTable

__all__ = ["FAULTS", "ancestor_left_out"]


def ancestor_left_out(table: SegmentTable, segment: int) -> SegmentTable:
    """The segment sees its grandparent and above, and no longer its parent."""
    parent_S = table.parent_S.copy()
    parent_S[segment] = parent_S[parent_S[segment]] if parent_S[parent_S[segment]] >= 0 else -1
    return replace(table, parent_S=parent_S)


def _branch(pack: Pack) -> int:
    """A segment with a parent, whose rows predict something, and which can do without its parent."""
    table = pack.segments
    for segment in range(len(table.parent_S) - 1, 0, -1):
        inside = (pack.source_row_E >= table.start_S[segment]) & (pack.source_row_E < table.end_S[segment])
        if table.parent_S[segment] < 0 or not inside.any():
            continue
        try:
            ancestor_left_out(table, segment)
        except AlignmentError:  # its parent has more children
            continue
        return segment
    reject()


def _mask(pack: Pack) -> Pack:
    return replace(pack, segments=ancestor_left_out(pack.segments, _branch(pack)))


def _position(pack: Pack) -> Pack:
    segment, position_T = _branch(pack), pack.position_T.copy()
    position_T[pack.segments.start_S[segment] : pack.segments.end_S[segment]] += 1
    return replace(pack, position_T=position_T)


def _weight(pack: Pack) -> Pack:
    """As if a second trajectory owned a node too."""
    last = (pack.tree_E == pack.tree_E[-1]) & (pack.node_E == pack.node_E[-1])
    return replace(pack, weight_E=pack.weight_E * np.where(last, 2.0, 1.0))


FAULTS: dict[str, Callable[[Pack], Pack]] = {
    "mask: an ancestor left out": _mask,
    "position: one more in a branch": _position,
    "weight: an owner counted twice": _weight,
}
