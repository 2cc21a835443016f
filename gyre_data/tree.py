"""One execution as a tree of numpy arrays over the run's own memory.

A `Tree` holds small arrays per node and *views* of the tokens: loading 1,347 nodes with a million tokens copies no
token. Nodes stand in depth-first order, so a parent comes before its children and a subtree is one interval. Children
are ordered by the time of the call that added them, then by id: the order of rows on disk never matters.

Shape legend: N nodes of the tree, T tokens of one node or path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .arrays import from_table, offsets_and_values
from .errors import AlignmentError, CorruptError, DataError
from .schema import Author, BranchReason, DeliveryState, NodeKind
from .types import Call, Floats, Ints, VersionSpan

__all__ = ["Branch", "Forest", "Tables", "Tree"]

_KEYS = ("node_id", "parent_id", "root_id", "call_id", "start_pos", "kind", "message_role", "author", "copy_of")
_SMALL = (*_KEYS, "counted_tokens")


class Tables(Protocol):
    """Anything that gives the run's tables by name: a `Run`, or tables in memory."""

    def table(self, name: str) -> pa.Table:
        """Return table `name`, conformed to the schema; empty when the run has none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A node with several children, or several roots (`node` -1): which call added each child, and why."""

    node: int
    children: tuple[int, ...]
    calls: tuple[str, ...]
    reasons: tuple[BranchReason | None, ...]


class _Column:
    """A list column as flat values per chunk: any row is a slice of the file's own memory."""

    def __init__(self, column: pa.ChunkedArray, rows: npt.NDArray[np.int64]) -> None:
        starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
        self.chunk_N = np.searchsorted(starts, rows, side="right") - 1
        local_N = rows - starts[self.chunk_N]
        self.lo_N, self.hi_N = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
        self.valid_N = np.zeros(len(rows), np.bool_)
        self.values: list[npt.NDArray[Any]] = []
        for number, chunk in enumerate(column.chunks):
            here = self.chunk_N == number
            offsets, values = offsets_and_values(chunk)
            self.lo_N[here] = offsets[local_N[here]]
            self.hi_N[here] = offsets[local_N[here] + 1]
            self.valid_N[here] = chunk.is_valid().to_numpy(zero_copy_only=False)[local_N[here]]
            self.values.append(values)

    def __getitem__(self, i: int) -> npt.NDArray[Any]:
        view: npt.NDArray[Any] = self.values[self.chunk_N[i]][self.lo_N[i] : self.hi_N[i]]
        return view


class Tree:
    """Nodes and calls of one execution. Only nodes that a committed call's path holds are in it."""

    execution_id: str
    node_id: list[str]
    parent_N: npt.NDArray[np.int32]
    """Index of the parent; -1 for a root."""
    end_N: npt.NDArray[np.int32]
    """The subtree of node i is the interval [i, end_N[i])."""
    depth_N: npt.NDArray[np.int32]
    start_pos_N: npt.NDArray[np.int64]
    num_tokens_N: npt.NDArray[np.int64]
    counted_N: npt.NDArray[np.bool_]
    """Whether the number of tokens is a local count, and the ids are not known (observe mode)."""
    kind_N: npt.NDArray[np.object_]
    author_N: npt.NDArray[np.object_]
    call_of_N: npt.NDArray[np.object_]
    """Id of the call that added the node."""
    message_role_N: npt.NDArray[np.object_]
    copy_of_N: npt.NDArray[np.object_]
    has_logprobs_N: npt.NDArray[np.bool_]
    calls: tuple[Call, ...]
    """Committed calls by start time, then id."""
    delivery: dict[str, DeliveryState]
    """Latest delivery state by call id; a call that is not in it is unknown."""

    def __init__(
        self,
        execution_id: str,
        nodes: pa.Table,
        rows: Ints | npt.NDArray[np.int64],
        calls: Sequence[Call],
        delivery: dict[str, DeliveryState],
    ) -> None:
        rows = np.asarray(rows, np.int64)
        self.execution_id = execution_id
        self.calls = tuple(sorted(calls, key=lambda call: (call.started_at, call.call_id)))
        self.delivery = delivery
        self._call = {call.call_id: call for call in self.calls}
        small = nodes.select(_SMALL).take(pa.array(rows)) if len(rows) else nodes.select(_SMALL).slice(0, 0)
        order_N, parent_N, self.depth_N, self.end_N = _depth_first(small, self.calls, execution_id)
        rows, small = rows[order_N], small.take(pa.array(order_N))
        self._nodes, self._rows = nodes, rows
        self.node_id = small.column("node_id").to_pylist()
        self.index = {node_id: i for i, node_id in enumerate(self.node_id)}
        self.parent_N = parent_N
        self.start_pos_N = small.column("start_pos").to_numpy()
        self.kind_N = _objects([NodeKind.read(v) for v in small.column("kind").to_pylist()])
        self.author_N = _objects([Author.read(v) for v in small.column("author").to_pylist()])
        self.call_of_N = _objects(small.column("call_id").to_pylist())
        self.message_role_N = _objects(small.column("message_role").to_pylist())
        self.copy_of_N = _objects(small.column("copy_of").to_pylist())
        self._ids, self._logprobs = _Column(nodes.column("token_ids"), rows), _Column(nodes.column("logprobs"), rows)
        counted = small.column("counted_tokens")
        self.counted_N = counted.is_valid().to_numpy()
        num_ids_N = self._ids.hi_N - self._ids.lo_N
        self.num_tokens_N = np.where(self.counted_N, counted.fill_null(0).to_numpy(), num_ids_N)
        self.has_logprobs_N = self._logprobs.valid_N
        self._check()

    @classmethod
    def load(cls, run: Tables, execution_id: str) -> Tree:
        """Load one execution; to load many of a run, use `Forest`, which scans the tables once."""
        return Forest(run).tree(execution_id)

    def __len__(self) -> int:
        return len(self.node_id)

    def __repr__(self) -> str:
        return f"Tree({self.execution_id!r}, nodes={len(self)}, calls={len(self.calls)}, tokens={self.num_tokens})"

    @property
    def num_tokens(self) -> int:
        """Distinct tokens: every node counted once."""
        return int(self.num_tokens_N.sum())

    @property
    def roots(self) -> list[int]:
        """Nodes without a parent."""
        return [int(i) for i in np.flatnonzero(self.parent_N < 0)]

    def children(self, i: int) -> list[int]:
        """Children of node i, in order; -1 gives the roots."""
        return self._children[i]

    def ids(self, i: int) -> Ints:
        """Token ids of node i: a read-only view of the file; empty where `counted_N`."""
        return self._ids[i]

    def logprobs(self, i: int) -> Floats | None:
        """Behaviour log-probs of node i, one per token: a read-only view; None where none were recorded."""
        return self._logprobs[i] if self.has_logprobs_N[i] else None

    def versions(self, i: int) -> tuple[VersionSpan, ...] | None:
        """Policy-version spans over the tokens of node i; None when unknown."""
        spans = self._nodes.column("policy_versions")[int(self._rows[i])].as_py()
        return None if spans is None else tuple(VersionSpan(**span) for span in spans)

    def message_blobs(self, i: int) -> tuple[str, ...]:
        """Blob ids of the canonical message(s) that node i renders."""
        return tuple(self._nodes.column("message_blobs")[int(self._rows[i])].as_py() or ())

    def path(self, i: int) -> Ints:
        """Indices root..i."""
        out = np.empty(int(self.depth_N[i]) + 1, np.int32)
        for slot in range(len(out) - 1, -1, -1):
            out[slot] = i
            i = int(self.parent_N[i])
        return out

    def path_ids(self, i: int) -> Ints:
        """Token ids along root..i in one array: the exact context that ends with node i."""
        return np.concatenate([self.ids(int(j)) for j in self.path(i)])

    def is_ancestor(self, above: int, below: int) -> bool:
        """True when `above` lies on the path of `below` (a node is its own ancestor)."""
        return bool(above <= below < self.end_N[above])

    def call(self, call_id: str) -> Call:
        """Return the call; raise DataError when this execution has none of that id."""
        try:
            return self._call[call_id]
        except KeyError:
            raise DataError(
                f"wanted a call of execution {self.execution_id}, got {call_id!r}; "
                f"it has {len(self.calls)} calls, see `gyre tree --json`"
            ) from None

    def output(self, call: Call) -> int | None:
        """Index of the call's sampled node; None when nothing was sampled."""
        return None if call.output_node is None else self.index[call.output_node]

    def leaf(self, call: Call) -> int | None:
        """Index of the deepest node of the call: its output, else its prompt; None when it was never rendered."""
        node = call.output_node or call.prompt_node
        return None if node is None else self.index[node]

    @cached_property
    def outputs(self) -> dict[int, tuple[Call, ...]]:
        """Calls by the index of their output node: one, or several when a retry was served from a running call."""
        found: dict[int, tuple[Call, ...]] = {}
        for call in self.calls:
            if (i := self.output(call)) is not None:
                found[i] = (*found.get(i, ()), call)
        return found

    def branches(self) -> Iterator[Branch]:
        """Every branch point in depth-first order, several roots first."""
        for node in (-1, *range(len(self))):
            children = self._children[node]
            if len(children) > 1:
                calls = tuple(str(self.call_of_N[child]) for child in children)
                reasons = tuple(self._call[c].branch_reason if c in self._call else None for c in calls)
                yield Branch(node=node, children=tuple(children), calls=calls, reasons=reasons)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {i: [] for i in range(-1, len(self))}
        for child, parent in enumerate(self.parent_N.tolist()):
            found[parent].append(child)
        return found

    def _check(self) -> None:
        """Refuse a tree whose positions or log-probs do not fit its tokens."""
        if not len(self):
            return
        above = self.parent_N >= 0
        end_N = self.start_pos_N + self.num_tokens_N
        want_N = np.where(above, end_N[self.parent_N], 0)
        self._refuse(self.start_pos_N != want_N, "start_pos", self.start_pos_N, want_N)
        num_logprobs_N = np.where(self.has_logprobs_N, self._logprobs.hi_N - self._logprobs.lo_N, self.num_tokens_N)
        self._refuse(num_logprobs_N != self.num_tokens_N, "number of log-probs", num_logprobs_N, self.num_tokens_N)

    def _refuse(
        self, bad_N: npt.NDArray[np.bool_], what: str, got_N: npt.NDArray[Any], want_N: npt.NDArray[Any]
    ) -> None:
        if bad_N.any():
            i = int(np.flatnonzero(bad_N)[0])
            raise AlignmentError(
                f"node {self.node_id[i]} of {self.execution_id}: wanted {what} {want_N[i]}, got {got_N[i]}; "
                "run `gyre verify` on the run"
            )


class Forest:
    """The trees of one run: each table is scanned once, then any execution loads without a further scan."""

    def __init__(self, run: Tables) -> None:
        self.run = run
        # Calls first: a call that is there has its nodes in any table read later.
        self._tables = {name: run.table(name) for name in ("calls", "nodes", "deliveries")}
        self._rows = {name: _rows_by_execution(table) for name, table in self._tables.items()}

    @property
    def execution_ids(self) -> list[str]:
        """Executions that have calls, in the order of their first call's row."""
        return list(self._rows["calls"])

    def __contains__(self, execution_id: str) -> bool:
        return execution_id in self._rows["calls"]

    def tree(self, execution_id: str) -> Tree:
        """Load one execution; raise DataError when the run has no node or call of it."""
        none = np.empty(0, np.int64)
        rows = {name: found.get(execution_id, none) for name, found in self._rows.items()}
        if not len(rows["nodes"]) and not len(rows["calls"]):
            raise DataError(
                f"wanted an execution with calls, got {execution_id!r}; see `gyre ls` for what the run holds"
            )
        calls: list[Call] = from_table("calls", self._tables["calls"].take(pa.array(rows["calls"])))
        delivery = _latest_deliveries(self._tables["deliveries"].take(pa.array(rows["deliveries"])))
        return Tree(execution_id, self._tables["nodes"], rows["nodes"], calls, delivery)


def _rows_by_execution(table: pa.Table) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers of each execution, ascending; executions in order of first appearance."""
    column = table.column("execution_id")
    known = pc.unique(column)
    code_R = pc.index_in(column, value_set=known).to_numpy()
    order_R = np.argsort(code_R, kind="stable")
    cuts = np.cumsum(np.bincount(code_R, minlength=len(known)))[:-1]
    return dict(zip(known.to_pylist(), np.split(order_R.astype(np.int64), cuts), strict=True)) if len(known) else {}


def _latest_deliveries(table: pa.Table) -> dict[str, DeliveryState]:
    """Latest state by call id; of one instant `delivered` wins, so that the order of rows does not matter."""
    best: dict[str, tuple[datetime, bool, DeliveryState]] = {}
    for row in from_table("deliveries", table):
        key = (row.at, row.state == DeliveryState.DELIVERED, row.state)
        if row.call_id not in best or key > best[row.call_id]:
            best[row.call_id] = key
    return {call_id: key[2] for call_id, key in best.items()}


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = values
    return out


def _depth_first(
    small: pa.Table, calls: Sequence[Call], execution_id: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Order the committed nodes depth first: (row of each node, parent, depth, end of its subtree)."""
    node_id, parent_id = small.column("node_id").to_pylist(), small.column("parent_id").to_pylist()
    row = {name: number for number, name in enumerate(node_id)}
    if len(row) != len(node_id):
        raise CorruptError(f"execution {execution_id}: a node id occurs twice; run `gyre verify` on the run")
    committed: set[int] = set()
    for call in calls:
        at: str | None
        for at in (call.output_node, call.prompt_node):
            while at is not None:
                if at not in row:
                    raise CorruptError(
                        f"call {call.call_id} of {execution_id} needs node {at}, which the run does not hold; "
                        "run `gyre verify` on it"
                    )
                if row[at] in committed:
                    break
                committed.add(row[at])
                at = parent_id[row[at]]
    started = {call.call_id: number for number, call in enumerate(calls)}
    added = small.column("call_id").to_pylist()
    late = len(calls)
    children: dict[str | None, list[int]] = {}
    for number in sorted(committed, key=lambda r: (started.get(added[r], late), node_id[r])):
        children.setdefault(parent_id[number], []).append(number)
    order: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    stack = [(number, -1, 0) for number in reversed(children.get(None, []))]
    while stack:
        number, above, level = stack.pop()
        here = len(order)
        order.append(number)
        parent.append(above)
        depth.append(level)
        stack.extend((child, here, level + 1) for child in reversed(children.get(node_id[number], [])))
    if len(order) != len(committed):
        raise CorruptError(f"execution {execution_id}: parents run in a circle; run `gyre verify` on the run")
    end = list(range(1, len(order) + 1))
    for here in range(len(order) - 1, -1, -1):
        if parent[here] >= 0:
            end[parent[here]] = max(end[parent[here]], end[here])
    parent_N, depth_N, end_N = (np.asarray(values, np.int32) for values in (parent, depth, end))
    return np.asarray(order, np.int64), parent_N, depth_N, end_N
