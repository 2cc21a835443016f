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

from .tree import Tables

__all__ = ["NodeRows", "depths", "flat_lists", "node_rows"]


class NodeRows:
    """Small columns of the nodes whose call was committed; `row_N` are their rows in the table.

    An execution in which nodes name one another in a circle is left out, calls and all: nothing lies below or above
    there. Counting by trees names it (`counts.Fault`). It gives the tables of its run too, so that whatever takes a run
    takes this, and several figures share the work.
    """

    def __init__(self, run: Tables) -> None:
        self.run = run
        nodes = run.table("nodes")
        self.calls = run.table("calls")
        known = pc.unique(self.calls.column("call_id"))
        self.row_N = np.flatnonzero(pc.is_in(nodes.column("call_id"), value_set=known).to_numpy())
        self._nodes = nodes
        self._ids = self.column("node_id")
        self.parent_N = self.place(self.column("parent_id"))
        """Place of each node's parent; -1 for a root."""
        self.depth_N, circular_N = depths(self.parent_N)
        """Ancestors of each node."""
        self.left_out: tuple[str, ...] = ()
        """Executions with a circle."""
        if circular_N.any():
            self._leave_out(pc.unique(self.column("execution_id").filter(pa.array(circular_N))))

    def _leave_out(self, executions: pa.Array) -> None:
        self.left_out = tuple(executions.to_pylist())
        keep_N = ~pc.is_in(self.column("execution_id"), value_set=executions).to_numpy()
        self.calls = self.calls.filter(pc.invert(pc.is_in(self.calls.column("execution_id"), value_set=executions)))
        self.row_N = self.row_N[keep_N]
        self._ids = self.column("node_id")
        self.parent_N = self.place(self.column("parent_id"))
        self.depth_N, _ = depths(self.parent_N)

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

    def place(self, node_ids: pa.ChunkedArray) -> npt.NDArray[np.int64]:
        """Place of each node named; -1 for null and for one that is not here."""
        found = pc.index_in(node_ids, value_set=self._ids, skip_nulls=True)
        return pc.fill_null(found, -1).to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def below(self, values_N: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Each node's value and those of all nodes below it, added up."""
        out = values_N.copy()
        order = np.argsort(self.depth_N, kind="stable")
        cuts = np.searchsorted(self.depth_N[order], np.arange(1, int(self.depth_N.max(initial=0)) + 1))
        for level in reversed(np.split(order, cuts)[1:]):
            np.add.at(out, self.parent_N[level], out[level])
        return out


def depths(parent_N: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Ancestors of each node, and which nodes lead into a circle, where the number means nothing."""
    above = parent_N.copy()
    depth_N = (above >= 0).astype(np.int64)
    for _ in range(len(parent_N).bit_length()):
        inner = np.flatnonzero(above >= 0)
        if not len(inner):
            break
        depth_N[inner] += depth_N[above[inner]]
        above[inner] = above[above[inner]]
    return depth_N, above >= 0


def node_rows(run: Tables) -> NodeRows:
    """The arrays of a run; as they are when it is them already."""
    return run if isinstance(run, NodeRows) else NodeRows(run)


def flat_lists(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
    """The items of a list column one after the other, and the row that each is from."""
    lengths = pc.list_value_length(column).fill_null(0).to_numpy()
    return np.repeat(np.arange(len(lengths)), lengths), pc.list_flatten(column)
