"""One execution as a tree of numpy arrays over the run's own memory.

A `Tree` holds small arrays per node and *views* of the tokens: loading 1,347 nodes with a million tokens copies no
token. Nodes stand in depth-first order, so a parent comes before its children and a subtree is one interval. Children
are ordered by the time of the call that added them, then by id: the order of rows on disk never matters.

What only people look at (ids, enums, records of calls) is made when it is touched; what is counted stays in codes.

Shape legend: N nodes of the tree, C calls of the execution, T tokens of one node or path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .by_execution import Part, by_execution
from .columns import Codes, ListColumn, Rows, codes, ints, members, valid
from .errors import AlignmentError, DataError
from .schema import Author, BranchReason, DeliveryState, NodeKind
from .tree_calls import CALL_COLUMNS, DELIVERY_COLUMNS, CallColumns, Calls, latest_deliveries
from .tree_links import link
from .types import Call, Floats, Ints, VersionSpan

__all__ = ["Branch", "Forest", "Tables", "Tree"]

_NODE_COLUMNS = (
    "node_id", "parent_id", "call_id", "start_pos", "kind", "message_role", "author", "copy_of", "counted_tokens",
    "policy_versions",
)  # fmt: skip
_COLUMNS = {"nodes": _NODE_COLUMNS, "calls": CALL_COLUMNS, "deliveries": DELIVERY_COLUMNS}


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


class Tree:
    """Nodes and calls of one execution. Only nodes that a committed call's path holds are in it.

    Get one from `Forest.tree`, or `Tree.load` for a single one.
    """

    execution_id: str
    parent_N: npt.NDArray[np.int32]
    """Index of the parent; -1 for a root."""
    end_N: npt.NDArray[np.int32]
    """The subtree of node i is the interval [i, end_N[i])."""
    depth_N: npt.NDArray[np.int32]
    start_pos_N: npt.NDArray[np.int64]
    num_tokens_N: npt.NDArray[np.int64]
    counted_N: npt.NDArray[np.bool_]
    """Whether the number of tokens is a local count, and the ids are not known (observe mode)."""
    kind_code_N: Codes
    """Place in `NodeKind`; compare with `columns.code_of`, or use `kind_N`."""
    author_code_N: Codes
    """Place in `Author`."""
    call_N: Rows
    """Place in `calls` of the call that added the node; -1 when that call was never committed."""
    copied_N: Rows
    """Index of the node that this one copies; -1 when it copies none, or one that is not in the tree."""
    has_logprobs_N: npt.NDArray[np.bool_]
    calls: Calls
    """Committed calls by start time, then id."""
    facts: CallColumns
    """Columns of the same calls, for counting."""
    output_C: Rows
    """Index of each call's sampled node; -1 when nothing was sampled."""
    prompt_C: Rows
    """Index of the last node of each call's prompt; -1 when it was never rendered."""
    spawned_by_C: Rows
    """Index of the node that started each call's agent; -1 when it is not known, or not in the tree."""
    delivery_C: Codes
    """Place in `DeliveryState` of each call's latest state; -1 when unknown."""

    def __init__(self, forest: Forest, execution_id: str, parts: dict[str, Part]) -> None:
        self.execution_id, self._forest, self._parts = execution_id, forest, parts
        nodes, calls = parts["nodes"].small, parts["calls"].small
        self.facts = CallColumns(calls)
        self.calls = Calls(forest.tables["calls"], parts["calls"].rows)
        links = link(execution_id, nodes, self.facts)
        self.parent_N, self.depth_N, self.end_N = links.order.parent_N, links.order.depth_N, links.order.end_N
        self.call_N, self.copied_N, self.spawned_by_C = links.call_N, links.copied_N, links.spawned_by_C
        self.output_C, self.prompt_C = links.output_C, links.prompt_C
        self.delivery_C = latest_deliveries(parts["deliveries"].small, self.facts.ids)
        self._order_N, self._rows = links.order.row_N, parts["nodes"].rows[links.order.row_N]
        self._read(nodes)
        self._check()

    @classmethod
    def load(cls, run: Tables, execution_id: str) -> Tree:
        """Load one execution; to load many of a run, use `Forest`, which orders its tables once."""
        return Forest(run, only=(execution_id,)).tree(execution_id)

    def _read(self, nodes: pa.Table) -> None:
        """Arrays per node, in the tree's order."""
        order_N, ids, logprobs = self._order_N, self._forest.token_ids, self._forest.logprobs
        self.start_pos_N = ints(nodes.column("start_pos"))[order_N]
        self.kind_code_N = codes(nodes.column("kind"), NodeKind)[order_N]
        self.author_code_N = codes(nodes.column("author"), Author)[order_N]
        counted = nodes.column("counted_tokens")
        self.counted_N = valid(counted)[order_N]
        self.num_tokens_N = np.where(self.counted_N, ints(counted)[order_N], ids.length_R[self._rows])
        self.has_logprobs_N = logprobs.valid_R[self._rows]

    def __len__(self) -> int:
        return len(self.parent_N)

    def __repr__(self) -> str:
        return f"Tree({self.execution_id!r}, nodes={len(self)}, calls={len(self.calls)}, tokens={self.num_tokens})"

    # ------------------------------------------------------------------ names, made when touched

    @cached_property
    def node_id(self) -> list[str]:
        """Id of each node."""
        return self._values("node_id")

    @cached_property
    def index(self) -> dict[str, int]:
        """Index of each node by its id."""
        return {node_id: i for i, node_id in enumerate(self.node_id)}

    @cached_property
    def kind_N(self) -> npt.NDArray[np.object_]:
        """`NodeKind` of each node."""
        return _objects([members(NodeKind)[code] for code in self.kind_code_N.tolist()])

    @cached_property
    def author_N(self) -> npt.NDArray[np.object_]:
        """`Author` of each node."""
        return _objects([members(Author)[code] for code in self.author_code_N.tolist()])

    @cached_property
    def call_of_N(self) -> npt.NDArray[np.object_]:
        """Id of the call that added the node."""
        return _objects(self._values("call_id"))

    @cached_property
    def message_role_N(self) -> npt.NDArray[np.object_]:
        """Role of the message that the node renders; None where it renders none."""
        return _objects(self._values("message_role"))

    @cached_property
    def copy_of_N(self) -> npt.NDArray[np.object_]:
        """Id of the sampled node that this one copies; None where it copies none."""
        return _objects(self._values("copy_of"))

    @cached_property
    def delivery(self) -> dict[str, DeliveryState]:
        """Latest delivery state by call id; a call that is not in it is unknown."""
        known = np.flatnonzero(self.delivery_C >= 0)
        states, ids = self.delivery_C[known].tolist(), self.facts.ids.take(pa.array(known)).to_pylist()
        return {call_id: members(DeliveryState)[code] for call_id, code in zip(ids, states, strict=True)}

    def _values(self, name: str) -> list[Any]:
        found: list[Any] = self._parts["nodes"].small.column(name).take(pa.array(self._order_N)).to_pylist()
        return found

    # ------------------------------------------------------------------ structure and tokens

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
        return self._forest.token_ids[int(self._rows[i])]

    def logprobs(self, i: int) -> Floats | None:
        """Behaviour log-probs of node i, one per token: a read-only view; None where none were recorded."""
        return self._forest.logprobs[int(self._rows[i])] if self.has_logprobs_N[i] else None

    def finite_logprobs(self, nodes: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """Whether each of these nodes has only finite numbers for log-probs."""
        return self._forest.logprobs.finite(self._rows[nodes])

    def versions(self, i: int) -> tuple[VersionSpan, ...] | None:
        """Policy-version spans over the tokens of node i; None when unknown."""
        spans = self._cell("policy_versions", i)
        return None if spans is None else tuple(VersionSpan(**span) for span in spans)

    def version_spans(self, nodes: npt.NDArray[np.integer]) -> pa.ChunkedArray:
        """Policy-version spans of these nodes as one list column."""
        return self._parts["nodes"].small.column("policy_versions").take(pa.array(self._order_N[nodes]))

    def message_blobs(self, i: int) -> tuple[str, ...]:
        """Blob ids of the canonical message(s) that node i renders."""
        return tuple(self._cell("message_blobs", i) or ())

    def _cell(self, name: str, i: int) -> Any:
        return self._forest.tables["nodes"].column(name)[int(self._rows[i])].as_py()

    def path(self, i: int) -> Ints:
        """Indices root..i."""
        return np.flatnonzero(self.end_N[: i + 1] > i).astype(np.int32)

    def path_ids(self, i: int) -> Ints:
        """Token ids along root..i in one array: the exact context that ends with node i."""
        return np.concatenate([self.ids(int(j)) for j in self.path(i)])

    def is_ancestor(self, above: int, below: int) -> bool:
        """True when `above` lies on the path of `below` (a node is its own ancestor)."""
        return bool(above <= below < self.end_N[above])

    # ------------------------------------------------------------------ calls

    def call(self, call_id: str) -> Call:
        """Return the call; raise DataError when this execution has none of that id."""
        try:
            return self.calls[self._call[call_id]]
        except KeyError:
            raise DataError(
                f"wanted a call of execution {self.execution_id}, got {call_id!r}; "
                f"it has {len(self.calls)} calls, see `gyre tree --json`"
            ) from None

    @cached_property
    def _call(self) -> dict[str, int]:
        return {call_id: number for number, call_id in enumerate(self.facts.ids.to_pylist())}

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
        for call, i in zip(self.calls, self.output_C.tolist(), strict=True):
            if i >= 0:
                found[i] = (*found.get(i, ()), call)
        return found

    def branches(self) -> Iterator[Branch]:
        """Every branch point in depth-first order, several roots first."""
        reason_C = [BranchReason.read(value) for value in self.facts.table.column("branch_reason").to_pylist()]
        for node in (-1, *range(len(self))):
            children = self._children[node]
            if len(children) > 1:
                added = [int(self.call_N[child]) for child in children]
                calls = tuple(str(self.call_of_N[child]) for child in children)
                reasons: Any = tuple(reason_C[number] if number >= 0 else None for number in added)
                yield Branch(node=node, children=tuple(children), calls=calls, reasons=reasons)

    @cached_property
    def _children(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {i: [] for i in range(-1, len(self))}
        for child, parent in enumerate(self.parent_N.tolist()):
            found[parent].append(child)
        return found

    # ------------------------------------------------------------------ refusals

    def _check(self) -> None:
        """Refuse a tree whose positions or log-probs do not fit its tokens."""
        if not len(self):
            return
        above = self.parent_N >= 0
        end_N = self.start_pos_N + self.num_tokens_N
        want_N = np.where(above, end_N[self.parent_N], 0)
        self._refuse(self.start_pos_N != want_N, "start_pos", self.start_pos_N, want_N)
        num_logprobs_N = np.where(self.has_logprobs_N, self._forest.logprobs.length_R[self._rows], self.num_tokens_N)
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
    """The trees of one run: each table is put in order once, then any execution loads without a further scan."""

    def __init__(self, run: Tables, *, only: Collection[str] | None = None) -> None:
        """`only` names the executions that will be loaded."""
        self.run = run
        # Calls first: a call that is there has its nodes in any table read later.
        self.tables = {name: run.table(name) for name in ("calls", "nodes", "deliveries")}
        self._parts = {name: by_execution(name, table, _COLUMNS[name], only) for name, table in self.tables.items()}

    @cached_property
    def token_ids(self) -> ListColumn:
        """Token ids by row of `nodes`."""
        return ListColumn(self.tables["nodes"].column("token_ids"))

    @cached_property
    def logprobs(self) -> ListColumn:
        """Log-probs by row of `nodes`."""
        return ListColumn(self.tables["nodes"].column("logprobs"))

    @property
    def execution_ids(self) -> list[str]:
        """Executions that have calls, in the order of their first call's row."""
        return list(self._parts["calls"])

    def __contains__(self, execution_id: str) -> bool:
        return execution_id in self._parts["calls"]

    def consistent(self, execution_id: str) -> Tree | None:
        """Load one execution; None when its rows contradict one another, which says nothing about the others."""
        try:
            return self.tree(execution_id)
        except DataError:
            return None

    def tree(self, execution_id: str) -> Tree:
        """Load one execution; raise DataError when the run has no node or call of it."""
        if not any(execution_id in self._parts[name] for name in ("nodes", "calls")):
            raise DataError(
                f"wanted an execution with calls, got {execution_id!r}; see `gyre ls` for what the run holds"
            )
        none = np.empty(0, np.int64)
        parts = {
            name: found.get(execution_id) or Part(rows=none, small=self.tables[name].select(_COLUMNS[name]).slice(0, 0))
            for name, found in self._parts.items()
        }
        return Tree(self, execution_id, parts)


def _objects(values: list[Any]) -> npt.NDArray[np.object_]:
    out = np.empty(len(values), object)
    out[:] = values
    return out
