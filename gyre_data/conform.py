"""Segments of other versions read as this release's tables."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pyarrow as pa

from .errors import SchemaError
from .schema import MAJOR, arrow_schema, table

__all__ = ["conform", "stamp_of"]


def stamp_of(schema: pa.Schema) -> dict[str, Any]:
    """What a segment says of itself: its table, format, and the codec that its buffers are compressed with, if any."""
    return dict(json.loads((schema.metadata or {}).get(b"gyre", b"{}")))


def conform(name: str, data: pa.Table, columns: Collection[str] | None = None) -> pa.Table:
    """Return `data`, as read from a segment, with exactly the columns of table `name`, or those of them in `columns`.

    Columns that an older writer did not have become null; columns of a newer minor version are dropped.
    Raises SchemaError for a higher major version or a column whose type differs.
    """
    stamp = stamp_of(data.schema)
    if stamp.get("major", MAJOR) > MAJOR:
        raise SchemaError(
            f"table {name} is of format {stamp['major']}, this release reads up to {MAJOR}; upgrade gyre-rl to read it"
        )
    wanted = arrow_schema(name)
    if columns is None and data.schema.equals(wanted, check_metadata=True):
        return data  # written by this release: nothing to look at, column by column
    declared = [column for column in table(name).columns if columns is None or column.name in columns]
    found = []
    for column in declared:
        if column.name not in data.schema.names:
            found.append(pa.nulls(data.num_rows, column.type))
            continue
        got = data.schema.field(column.name).type
        if got != column.type:
            raise SchemaError(
                f"{name}.{column.name}: wanted {column.type}, the file holds {got}; run `gyre verify` on it"
            )
        found.append(data.column(column.name))
    schema = pa.schema([wanted.field(column.name) for column in declared], metadata=wanted.metadata)
    return pa.Table.from_arrays(found, schema=schema)
