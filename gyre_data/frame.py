"""Results that any data library takes: an Arrow table, or a tuple of records, with doors to Polars and pandas.

Both kinds speak the Arrow PyCapsule interface (`__arrow_c_stream__`), so `polars.DataFrame(x)`, `pyarrow.table(x)`,
`pandas.DataFrame.from_arrow(x)` and DuckDB read them as they are. Polars and pandas are needed by nobody: `pl` and `df`
import them when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import pyarrow as pa

from .errors import ConfigError

__all__ = ["Frame", "Records", "rows"]

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Sequence as _Base  # that is how records are used
else:
    _Base = Generic  # a Sequence at run time would be taken for rows, see `Records`


def rows(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Rows as Python values; ConfigError for a time that Python has none for."""
    try:
        return zip(*(column.to_pylist() for column in table.columns), strict=True)
    except OverflowError as error:
        raise ConfigError(
            f"wanted times of the years 1 to 9999, got others ({error}); cast them to varchar in the SQL"
        ) from error


class _Tabular(ABC):
    """The doors, over `arrow`."""

    __slots__ = ()

    @abstractmethod
    def arrow(self) -> pa.Table:
        """As a pyarrow table."""

    def pl(self) -> Any:
        """As a `polars.DataFrame`; ConfigError when Polars is not installed."""
        return _library("polars").from_arrow(self.arrow())

    def df(self) -> Any:
        """As a `pandas.DataFrame`; ConfigError when pandas is not installed."""
        _library("pandas")
        return self.arrow().to_pandas()

    def to_pylist(self) -> list[dict[str, Any]]:
        """As plain dictionaries, one a row."""
        return [dict(zip(self.arrow().column_names, row, strict=True)) for row in rows(self.arrow())]

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.arrow().__arrow_c_stream__(requested_schema)


class Frame(_Tabular):
    """The result of a query."""

    __slots__ = ("_table",)

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def arrow(self) -> pa.Table:
        """As a pyarrow table, without a copy."""
        return self._table

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in order."""
        return tuple(self._table.column_names)

    def __len__(self) -> int:
        """Number of rows."""
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Rows as tuples of Python values."""
        for batch in self._table.to_batches():
            yield from rows(batch)

    def __repr__(self) -> str:
        return f"Frame({len(self)} rows: {', '.join(self.columns)})"


class Records(_Tabular, _Base[T]):
    """Records of one dataclass, in order, that are a table too: their plain fields are the columns.

    No `tuple`, though it compares, unpacks and indexes like one: Polars and DuckDB would take a tuple for rows.
    """

    __slots__ = ("_items", "_kind")

    def __init__(self, kind: type[T], items: Iterable[T] = ()) -> None:
        """`kind` is told, so that no records are still a table with columns."""
        self._kind: Any = kind
        self._items = tuple(items)

    def arrow(self) -> pa.Table:
        """As a pyarrow table; fields that are no plain values (trees, runs) are left out."""
        columns = _columns(self._kind)
        arrays = [pa.array([getattr(item, name) for item in self], type_) for name, type_ in columns.items()]
        return pa.table(arrays, schema=pa.schema(list(columns.items())))

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Records[T]: ...
    def __getitem__(self, at: int | slice) -> T | Records[T]:
        return Records(self._kind, self._items[at]) if isinstance(at, slice) else self._items[at]

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, Records) else other)

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return f"Records({self._kind.__name__}, {list(self._items)!r})"


_PLAIN: dict[type, pa.DataType] = {
    bool: pa.bool_(),
    int: pa.int64(),
    float: pa.float64(),
    str: pa.string(),
    datetime: pa.timestamp("us", tz="UTC"),
}


@cache
def _columns(kind: Any) -> dict[str, pa.DataType]:
    hints = get_type_hints(kind)
    found = {field.name: _arrow_type(hints[field.name]) for field in fields(kind)}
    return {name: type_ for name, type_ in found.items() if type_ is not None}


def _arrow_type(hint: Any) -> pa.DataType | None:
    if get_origin(hint) in (Union, UnionType):
        kinds = [one for one in get_args(hint) if one is not NoneType]
        return _arrow_type(kinds[0]) if len(kinds) == 1 else None
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        inner = _arrow_type(get_args(hint)[0])
        return None if inner is None else pa.list_(inner)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return pa.string()
    return _PLAIN.get(hint) if isinstance(hint, type) else None


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"wanted {name} for this, but it is not installed; run: pip install {name}, or take .arrow()"
        ) from error
