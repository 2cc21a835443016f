"""Names between nodes and calls of one execution, resolved to places, and the nodes put in depth-first order.

Legend: R nodes as they come, N nodes of the tree, C calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .columns import Rows, found_in, joined, valid
from .depth_first import Order, depth_first
from .errors import CorruptError
from .tree_calls import CallColumns

__all__ = ["Links", "link"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Places in the tree; -1 where nothing is named, or what is named is not in it."""

    order: Order
    call_N: Rows
    copied_N: Rows
    output_C: Rows
    prompt_C: Rows
    spawned_by_C: Rows


def link(execution_id: str, nodes: pa.Table, calls: CallColumns) -> Links:
    """Resolve the names; CorruptError when a node id occurs twice or a call's path does not lead to a root."""
    ids = joined(nodes.column("node_id"))
    named = [calls.table.column(name) for name in ("output_node", "prompt_node", "spawned_by_node")]
    wanted = [nodes.column("node_id"), nodes.column("parent_id"), nodes.column("copy_of"), *named]
    chunks = pa.chunked_array([chunk for column in wanted for chunk in column.chunks], pa.string())
    cuts = np.cumsum([len(column) for column in wanted])[:-1]
    same_R, parent_R, copied_R, output_C, prompt_C, spawned_by_C = np.split(found_in(ids, chunks), cuts)
    if (same_R != np.arange(len(ids))).any():
        raise CorruptError(f"execution {execution_id}: a node id occurs twice; run `gyre verify` on the run")
    added_R = found_in(calls.ids, nodes.column("call_id"))
    order = None
    if all((calls.given(name) == (row_C >= 0)).all() for name, row_C in _ends(output_C, prompt_C)):
        needed_R = np.zeros(len(ids), np.bool_)
        for _, row_C in _ends(output_C, prompt_C):
            needed_R[row_C[row_C >= 0]] = True
        rank_R = _rank(ids, parent_R, np.where(added_R < 0, len(calls), added_R))
        order = depth_first(parent_R, rank_R, needed_R)
    torn_R = (parent_R < 0) & valid(nodes.column("parent_id"))
    if order is None or torn_R[order.row_N].any():
        raise _refusal(execution_id, ids.to_pylist(), nodes.column("parent_id").to_pylist(), calls)
    place_R1 = np.full(len(ids) + 1, -1, np.int64)  # what is -1 takes the last place, and stays -1
    place_R1[order.row_N] = np.arange(len(order.row_N))
    return Links(
        order=order,
        call_N=added_R[order.row_N],
        copied_N=place_R1[copied_R[order.row_N]],
        output_C=place_R1[output_C],
        prompt_C=place_R1[prompt_C],
        spawned_by_C=place_R1[spawned_by_C],
    )


def _ends(output_C: Rows, prompt_C: Rows) -> tuple[tuple[str, Rows], ...]:
    """The nodes that must be there for a call: those at the end of its paths."""
    return ("output_node", output_C), ("prompt_node", prompt_C)


def _refusal(execution_id: str, ids: list[str], parent: list[str | None], calls: CallColumns) -> CorruptError:
    """What is wrong with the first path that does not lead to a root."""
    row = {name: number for number, name in enumerate(ids)}
    columns = (calls.table.column(name).to_pylist() for name in ("call_id", "output_node", "prompt_node"))
    for call_id, *ends in zip(*columns, strict=True):
        for end in ends:
            at, steps = end, 0
            while at in row and steps <= len(row):
                at, steps = parent[row[at]], steps + 1
            if at is not None and at not in row:
                return CorruptError(
                    f"call {call_id} of {execution_id} needs node {at}, which the run does not hold; "
                    "run `gyre verify` on it"
                )
    return CorruptError(f"execution {execution_id}: parents run in a circle; run `gyre verify` on the run")


def _rank(ids: pa.Array, parent_R: Rows, started_R: Rows) -> Rows:
    """Place of each node among all by the number of the call that added it, then id; ids matter between siblings."""
    key_R = parent_R * (int(started_R.max(initial=0)) + 1) + started_R
    if len(np.unique(key_R)) == len(key_R):
        order = np.argsort(started_R, kind="stable")
    else:
        keys = pa.table({"started": started_R, "id": ids})
        order = pc.sort_indices(keys, sort_keys=[("started", "ascending"), ("id", "ascending")]).to_numpy()
    rank_R = np.empty(len(order), np.int64)
    rank_R[order] = np.arange(len(order))
    return rank_R
