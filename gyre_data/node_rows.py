"""The nodes of a run as arrays in the order of its rows: sums over subtrees without building a tree.

For figures over a whole run that need to know what lies below a node, at any size: every step is an array operation
over nodes, and no token is touched. Legend: N nodes of committed calls.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .errors import CorruptError
from .tree import Tables

__all__ = ["NodeRows", "flat_lists", "node_rows"]

_DEEPEST = 40  # doublings: a path of 2^40 nodes is a circle


class NodeRows:
    """Small columns of the nodes whose call was committed; `row_N` are their rows in the table.

    It gives the tables of its run too, so that whatever takes a run takes this, and several figures share the work.
    """

    def __init__(self, run: Tables) -> None:
        self.run = run
        nodes = run.table("nodes")
        self.calls = run.table("calls")
        known = pc.unique(self.calls.column("call_id"))
        self.row_N = np.flatnonzero(pc.is_in(nodes.column("call_id"), value_set=known).to_numpy())
        self._nodes = nodes
        self._ids = self.column("node_id")

    def __len__(self) -> int:
        return len(self.row_N)

    def table(self, name: str) -> pa.Table:
        """A table of the run."""
        return self.run.table(name)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column for these nodes; a copy, so not for tokens or log-probs."""
        return self._nodes.column(name).take(pa.array(self.row_N))

    @cached_property
    def num_tokens_N(self) -> npt.NDArray[np.int64]:
        """Tokens of each node, counted locally where ids are not known."""
        length = pc.list_value_length(self._nodes.column("token_ids"))
        whole: npt.NDArray[np.int64] = pc.coalesce(self._nodes.column("counted_tokens"), length).to_numpy()
        return whole[self.row_N]

    @cached_property
    def call_N(self) -> npt.NDArray[np.int64]:
        """Row in `calls` of the call that added each node."""
        known = self.calls.column("call_id")
        found: npt.NDArray[np.int64] = pc.index_in(self.column("call_id"), value_set=known).to_numpy()
        return found

    @cached_property
    def parent_N(self) -> npt.NDArray[np.int64]:
        """Place of each node's parent; -1 for a root."""
        return self.place(self.column("parent_id"))

    def place(self, node_ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
        """Place of each node named; -1 for null and for one that is not here."""
        found = pc.index_in(node_ids, value_set=self._ids, skip_nulls=True)
        return pc.fill_null(found, -1).to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    @cached_property
    def depth_N(self) -> npt.NDArray[np.int64]:
        """Ancestors of each node. Raises CorruptError when nodes name one another in a circle."""
        above = self.parent_N.copy()
        depth_N = (above >= 0).astype(np.int64)
        for _ in range(_DEEPEST):
            inner = np.flatnonzero(above >= 0)
            if not len(inner):
                return depth_N
            depth_N[inner] += depth_N[above[inner]]
            above[inner] = above[above[inner]]
        raise CorruptError("nodes: wanted trees, got a node that is its own ancestor; run `gyre verify` on the run")

    def below(self, values_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Each node's value and those of all nodes below it, added up."""
        out = values_N.copy()
        order = np.argsort(self.depth_N, kind="stable")
        cuts = np.searchsorted(self.depth_N[order], np.arange(1, int(self.depth_N.max(initial=0)) + 1))
        for level in reversed(np.split(order, cuts)[1:]):
            np.add.at(out, self.parent_N[level], out[level])
        return out


def node_rows(run: Tables) -> NodeRows:
    """The arrays of a run; as they are when it is them already."""
    return run if isinstance(run, NodeRows) else NodeRows(run)


def flat_lists(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
    """The items of a list column one after the other, and the row that each is from."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    return np.repeat(np.arange(len(lengths)), lengths), pc.list_flatten(column)
