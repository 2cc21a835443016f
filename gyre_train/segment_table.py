"""Who sees whom in a pack. Shapes: T rows, S segments. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_data.errors import AlignmentError

__all__ = ["Array", "SegmentTable", "check_array", "subtree_ends"]

Array = np.ndarray[Any, Any]


def check_array(name: str, array: object, kinds: str, length: int | None = None) -> Array:
    """The one border check: a one-dimensional array of a dtype kind and, where it is known, a length."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
        came = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise AlignmentError(f"{name}: wanted a 1-d array of kind {kinds}, got {came}; convert it before packing")
    if length is not None and len(array) != length:
        raise AlignmentError(f"{name}: wanted {length} values, got {len(array)}; nothing is padded, fix the source")
    return array


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentTable:
    """Who sees whom: contiguous runs of rows in depth-first order, each with its parent (-1 for a root)."""

    start_S: Array
    end_S: Array
    parent_S: Array

    def __post_init__(self) -> None:
        num_segments = len(check_array("start_S", self.start_S, "i"))
        check_array("end_S", self.end_S, "i", num_segments)
        check_array("parent_S", self.parent_S, "i", num_segments)
        contiguous = bool(np.all(self.start_S == np.append(0, self.end_S[:-1]))) if num_segments else True
        if not contiguous or bool(np.any(self.end_S <= self.start_S)):
            raise AlignmentError(
                "segments: wanted non-empty runs that tile the rows, got gaps or overlaps; lay out again"
            )
        stack: list[int] = []
        for segment, parent in enumerate(self.parent_S):
            while stack and stack[-1] != parent:
                stack.pop()
            if parent != -1 and not stack:
                raise AlignmentError(
                    f"segments: wanted depth-first order, got parent {parent} of {segment} after its subtree had "
                    "ended; use lay_out"
                )
            stack.append(segment)

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.end_S[-1]) if len(self.end_S) else 0

    @property
    def num_pairs(self) -> int:
        """Live cells of the attention mask: what exact tree attention must compute."""
        size_S = self.end_S - self.start_S
        above_S = np.zeros(len(size_S), dtype=np.int64)
        for segment, parent in enumerate(self.parent_S):
            if parent >= 0:
                above_S[segment] = above_S[parent] + size_S[parent]
        return int(np.sum(size_S * (size_S + 1) // 2 + size_S * above_S))


def subtree_ends(segments: SegmentTable) -> Array:
    """First row behind each segment's subtree; row q sees row k iff q >= k and q < the end of k's segment's subtree."""
    ends_S = segments.end_S.astype(np.int64)
    for segment in range(len(ends_S) - 1, -1, -1):
        parent = segments.parent_S[segment]
        if parent >= 0:
            ends_S[parent] = max(ends_S[parent], ends_S[segment])
    return ends_S
