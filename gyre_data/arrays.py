"""Rows to Arrow and back, and the one place where arrays are checked at a border.

`to_batches` refuses whatever could not be read back exactly: a missing value where null is unlawful, log-probs that do
not match their ids, times without a zone. Batches stay near 4 MiB, so that a column never outgrows a 32-bit offset;
token columns have 64-bit offsets anyway. `from_table` gives the same rows back; token arrays are read-only views into
the file's own bytes.

Legend: N rows, N1 = N + 1 offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .errors import AlignmentError, SchemaError
from .schema import NodeKind, arrow_schema
from .schema import table as declared_table
from .types import ROW_TYPES, Attempt, Floats, Ints, Node, VersionSpan

__all__ = [
    "BATCH_BYTES",
    "check_array",
    "from_table",
    "list_views",
    "offsets_and_values",
    "require_floats",
    "require_ints",
    "table_of",
    "to_batches",
]

BATCH_BYTES = 4 << 20

Array = npt.NDArray[Any]

_TABLE_OF = {row_type: name for name, row_type in ROW_TYPES.items()}
_RECORDS: dict[str, type] = {"policy_versions": VersionSpan, "attempts": Attempt}


def table_of(row: object) -> str:
    """Name of the table that `row` belongs to; SchemaError for anything but a row of `types.ROW_TYPES`."""
    try:
        return _TABLE_OF[type(row)]
    except KeyError:
        known = ", ".join(t.__name__ for t in _TABLE_OF)
        raise SchemaError(f"wanted a row of a known table, got {type(row).__name__}; known rows: {known}") from None


def check_array(name: str, value: object, dtype: npt.DTypeLike, *, length: int | None = None) -> Array:
    """Return `value` if it is a one-dimensional array of exactly `dtype` (and `length`); AlignmentError otherwise.

    Nothing is cast or padded: a wrong dtype means that somebody upstream holds other numbers than it thinks.
    """
    wanted = np.dtype(dtype)
    if not isinstance(value, np.ndarray):
        came = type(value).__name__
        raise AlignmentError(f"{name}: wanted a {wanted} array, got {came}; convert it where it is made")
    if value.dtype != wanted or value.ndim != 1:
        raise AlignmentError(
            f"{name}: wanted {wanted} with 1 axis, got {value.dtype} of shape {value.shape}; mend its maker"
        )
    if length is not None and len(value) != length:
        raise AlignmentError(f"{name}: wanted {length} elements, got {len(value)}; it is never padded, find who cut it")
    return value


def require_ints(name: str, value: object, *, length: int | None = None) -> Ints:
    """`check_array` for token ids (int32)."""
    return check_array(name, value, np.int32, length=length)


def require_floats(name: str, value: object, *, length: int | None = None) -> Floats:
    """`check_array` for log-probs (float32)."""
    return check_array(name, value, np.float32, length=length)


# --- rows to Arrow -------------------------------------------------------------------------------------------------


def to_batches(name: str, rows: Sequence[Any]) -> list[pa.RecordBatch]:
    """Arrow batches of table `name` that hold `rows` in order, each near `BATCH_BYTES` at most.

    Raises SchemaError or AlignmentError, naming row and column, before anything is built from a bad row.
    """
    if name == "nodes":
        for row in rows:
            _check_node(row)
    return [_to_batch(name, part) for part in _parts(rows)]


def _parts(rows: Sequence[Any]) -> Iterable[Sequence[Any]]:
    start, held = 0, 0
    for i, row in enumerate(rows):
        weight = _num_bytes(row)
        if held and held + weight > BATCH_BYTES:
            yield rows[start:i]
            start, held = i, 0
        held += weight
    if start < len(rows):
        yield rows[start:]


def _num_bytes(row: Any) -> int:
    total = 256
    for field in row.__slots__:
        value = getattr(row, field)
        if isinstance(value, np.ndarray):
            total += value.nbytes
        elif isinstance(value, str | bytes | tuple):
            total += 40 * len(value) if isinstance(value, tuple) else len(value)
    return total


def _check_node(node: Node) -> None:
    num_tokens = len(require_ints(f"token_ids of node {node.node_id}", node.token_ids))
    if node.logprobs is not None:
        if node.kind != NodeKind.OUTPUT:
            raise AlignmentError(
                f"logprobs of node {node.node_id}: wanted none on a {node.kind} node, got {len(node.logprobs)}; "
                "only output nodes have them"
            )
        values = require_floats(f"logprobs of node {node.node_id}", node.logprobs, length=num_tokens)
        if np.isnan(values).any():
            at = int(np.isnan(values).argmax())
            raise AlignmentError(
                f"logprobs of node {node.node_id}: wanted numbers, got NaN at {at}; the engine gave none for this token"
            )
    if node.policy_versions is not None:
        _check_spans(node, num_tokens)


def _check_spans(node: Node, num_tokens: int) -> None:
    spans = node.policy_versions or ()
    starts, ends = [span.start for span in spans], [span.end for span in spans]
    if [*starts, num_tokens] != [0, *ends] or any(span.end <= span.start for span in spans):
        raise AlignmentError(
            f"policy_versions of node {node.node_id}: wanted spans that cover 0..{num_tokens} exactly, "
            f"got {[(s.start, s.end) for s in node.policy_versions or ()]}; one span per run of equal versions"
        )


_schema = cache(arrow_schema)


def _to_batch(name: str, rows: Sequence[Any]) -> pa.RecordBatch:
    schema = _schema(name)
    arrays = []
    for column, field in zip(declared_table(name).columns, schema, strict=True):
        values = [getattr(row, column.name) for row in rows]
        if not column.nullable and any(value is None for value in values):
            bad = rows[next(i for i, value in enumerate(values) if value is None)]
            raise SchemaError(
                f"{name}.{column.name}: wanted a value, got None in {_label(name, bad)}; it may not be null"
            )
        if column.nullable and all(value is None for value in values):
            arrays.append(pa.nulls(len(values), field.type))
            continue
        try:
            array = _column(field.type, f"{name}.{column.name}", values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise SchemaError(
                f"{name}.{column.name}: wanted {field.type}, got what does not fit ({error}); mend the row's maker"
            ) from error
        if isinstance(array, pa.ChunkedArray):
            raise SchemaError(f"{name}.{column.name}: wanted below 2 GiB in one batch, got more; split the value")
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _label(name: str, row: Any) -> str:
    key = declared_table(name).key
    return (
        f"{key} {getattr(row, key)}"
        if key
        else f"a row of {row.execution_id}"
        if hasattr(row, "execution_id")
        else name
    )


def _column(type_: pa.DataType, label: str, values: list[Any]) -> pa.Array:
    if pa.types.is_large_list(type_):
        return _list_column(type_, label, values)
    if pa.types.is_list(type_) and pa.types.is_struct(type_.value_type):
        names = [type_.value_type.field(i).name for i in range(type_.value_type.num_fields)]
        return pa.array(
            [None if v is None else [{n: getattr(item, n) for n in names} for item in v] for v in values], type_
        )
    if pa.types.is_timestamp(type_):
        for value in values:
            if isinstance(value, datetime) and value.tzinfo is None:
                raise SchemaError(f"{label}: wanted a time in UTC with its zone, got {value}; use datetime.now(UTC)")
    return pa.array(values, type_)


def _list_column(type_: pa.DataType, label: str, values: list[Array | None]) -> pa.Array:
    dtype = type_.value_type.to_pandas_dtype()
    missing_N = np.array([value is None for value in values])
    present = [check_array(label, value, dtype) for value in values if value is not None]
    offsets_N1 = np.zeros(len(values) + 1, np.int64)
    np.cumsum([0 if value is None else len(value) for value in values], out=offsets_N1[1:])
    flat = np.concatenate(present) if present else np.empty(0, dtype)
    mask = pa.array(missing_N) if missing_N.any() else None
    return pa.LargeListArray.from_arrays(pa.array(offsets_N1), pa.array(flat), type=type_, mask=mask)


# --- Arrow to rows -------------------------------------------------------------------------------------------------


def offsets_and_values(chunk: pa.Array) -> tuple[Array, Array]:
    """Offsets (N1) and all values of one list chunk, zero-copy. `values[offsets[i]:offsets[i + 1]]` is row i."""
    return chunk.offsets.to_numpy(zero_copy_only=True), chunk.values.to_numpy(zero_copy_only=True)


def list_views(column: pa.ChunkedArray) -> list[Array | None]:
    """One read-only numpy view per row of a list column, None for null; no bytes are copied, whatever the chunks."""
    views: list[Array | None] = []
    for chunk in column.chunks:
        offsets_N1, values = offsets_and_values(chunk)
        bounds = offsets_N1.tolist()
        rows: list[Array | None] = [values[a:b] for a, b in pairwise(bounds)]
        if chunk.null_count:
            rows = [row if ok else None for row, ok in zip(rows, chunk.is_valid().to_pylist(), strict=True)]
        views.extend(rows)
    return views


def from_table(name: str, data: pa.Table) -> list[Any]:
    """Rows of table `name` held in `data` (as `Run.table` gives it), in order, as dataclasses of `types`."""
    row_type = ROW_TYPES[declared_table(name).name]
    readers = _readers(name)
    columns = [readers[field.name](data.column(field.name)) for field in fields(row_type)]
    names = [field.name for field in fields(row_type)]
    return [row_type(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]


@cache
def _readers(name: str) -> dict[str, Callable[[pa.ChunkedArray], list[Any]]]:
    hints = get_type_hints(ROW_TYPES[name])
    return {c.name: _reader(c.name, c.type, hints[c.name]) for c in declared_table(name).columns}


def _reader(column: str, type_: pa.DataType, hint: Any) -> Callable[[pa.ChunkedArray], list[Any]]:
    if pa.types.is_large_list(type_):
        return list_views
    if pa.types.is_list(type_):
        record = _RECORDS.get(column)
        make: Callable[[Any], Any] = tuple if record is None else lambda items: tuple(record(**item) for item in items)
        return lambda data: [None if items is None else make(items) for items in data.to_pylist()]
    for kind in get_args(hint) or (hint,):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return lambda data, kind=kind: _enums(kind, data)  # type: ignore[misc]
    return lambda data: data.to_pylist()


def _enums(kind: Any, data: pa.ChunkedArray) -> list[Any]:
    known: dict[str | None, Any] = {}
    values = data.to_pylist()
    for value in values:
        if value not in known:
            known[value] = kind.read(value)
    return [known[value] for value in values]
