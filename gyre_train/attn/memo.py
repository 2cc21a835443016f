"""What is derived from a segment table, kept for the packs in flight: every layer and recomputation asks again."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

from gyre_train.segment_table import SegmentTable

__all__ = ["per_table"]

T = TypeVar("T")


class _SameTable:
    """A table as a key of a cache, by identity: its arrays have no hash, and a pack keeps one table."""

    __slots__ = ("table",)

    def __init__(self, table: SegmentTable) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameTable) and self.table is other.table


def per_table(derive: Callable[..., T]) -> Callable[..., T]:
    """Remember the last 16 results of a function of a table and hashable arguments."""

    @lru_cache(maxsize=16)
    def remembered(key: _SameTable, *arguments: Any) -> T:
        return derive(key.table, *arguments)

    @wraps(derive)
    def ask(segments: SegmentTable, *arguments: Any) -> T:
        return remembered(_SameTable(segments), *arguments)

    return ask
