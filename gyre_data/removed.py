"""Rows of removed executions: in the files until a purge, and shown by nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["nodes_of", "visible"]


def visible(name: str, table: pa.Table, removed: Sequence[str], hidden_nodes: Callable[[], pa.Array]) -> pa.Table:
    """`table` without rows of the executions `removed`; batches that hold none of them stay views of the file.

    `hidden_nodes` gives the ids of their nodes, by which the side tables are keyed.
    """
    if not removed:
        return table
    if "execution_id" in table.column_names:
        key, gone = "execution_id", pa.array(sorted(removed))
    elif "node_id" in table.column_names:
        key, gone = "node_id", hidden_nodes()
    else:
        return table  # blobs are shared, groups belong to no execution
    kept: list[pa.RecordBatch] = []
    for batch in table.to_batches():
        mask = pc.invert(pc.is_in(batch.column(key), value_set=gone))
        if mask.true_count == batch.num_rows:
            kept.append(batch)
        elif mask.true_count:
            kept.append(batch.filter(mask))
    return pa.Table.from_batches(kept, table.schema)


def nodes_of(nodes: pa.Table, executions: Sequence[str]) -> pa.Array:
    """Ids of the nodes of these executions."""
    mask = pc.is_in(nodes.column("execution_id"), value_set=pa.array(sorted(executions), pa.string()))
    return pc.unique(nodes.column("node_id").filter(mask))
