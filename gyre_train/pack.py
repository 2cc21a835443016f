"""One flat token sequence for a forest: every needed token laid out once, with the loss edges that leave its rows.

Shapes: N nodes of a tree, T rows of a pack, S segments, E loss edges, U rows that need logits.

A *row* is a token of the pack. A *segment* is a run of rows with one parent segment: its rows see each other causally
and all rows of its ancestors. A *loss edge* is one trained target: the row that predicts it, the id, its owner
trajectory and what the loss needs to know about it. A fork gives one row several edges. The layout is depth first
with the subtree of most tokens first, so that a long trunk stays contiguous however many side branches leave it.
Numpy only; no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_data.schema import AgentRole
from gyre_train.routes import joined_routes
from gyre_train.segment_table import Array, SegmentTable, check_array
from gyre_train.tree_input import TreeInput

__all__ = ["ROLES", "Array", "Pack", "Piece", "SegmentTable", "lay_out", "node_values"]

ROLES = tuple(str(role) for role in AgentRole)
"""Names of the agent roles, by the number that `Pack.role_E` holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """What one pack takes of one tree: some trajectories, each with the owned nodes it trains there."""

    tree: int
    """Index into the trees of the plan."""
    trajectories: tuple[int, ...]
    owned: tuple[Array, ...]
    """Owned nodes per trajectory, in path order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """What one forward pass takes: rows, who sees whom, and the loss edges, all as numpy arrays.

    `source_row_E` is the row whose logits predict the edge's target. Trajectory numbers run over the whole plan, so
    that edges of one trajectory in several packs find each other. `tree_E, node_E, offset_E` say where a value
    belongs.
    """

    ids_T: Array
    position_T: Array
    """Depth of the token in its path; what the rotary embedding takes."""
    segments: SegmentTable
    source_row_E: Array
    target_id_E: Array
    trajectory_E: Array
    execution_E: Array
    temperature_E: Array
    advantage_E: Array
    logp_behaviour_E: Array
    """NaN where nothing was recorded; the policy loss refuses those, SFT does not read them."""
    logp_old_E: Array | None
    """None: the anchor is the weights of this very forward."""
    weight_E: Array
    """1 / N_e: the share of the edge in its execution's mean, whatever pack it lands in."""
    trajectory_tokens_E: Array
    """Owned tokens of the edge's whole trajectory, to notice one that is spread over packs."""
    execution_tokens_E: Array
    """N_e."""
    logp_teacher_E: Array
    """NaN where there is none."""
    role_E: Array
    """Index into ROLES of the owner trajectory's role."""
    version_E: Array
    """`TreeInput.version`, -1 where unknown."""
    tree_E: Array
    node_E: Array
    offset_E: Array
    routes_TLK: Array | None = None
    """Recorded experts of each row, -1 where there are none; None: nothing is replayed."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids_T)

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.source_row_E)

    @property
    def logit_row_U(self) -> Array:
        """Rows that need logits, ascending, each once however many edges leave it."""
        return np.flatnonzero(self._edge_rows())

    @property
    def edge_logit_E(self) -> Array:
        """Index of each edge's row in `logit_row_U`."""
        return (np.cumsum(self._edge_rows()) - 1)[self.source_row_E]

    def _edge_rows(self) -> Array:
        out_T = np.zeros(self.num_tokens, dtype=bool)
        out_T[self.source_row_E] = True
        return out_T


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Where a tree's nodes landed: first row and last row of the path down to each node (-1 before any token)."""

    first_N: Array
    last_N: Array


class _Layout:
    """Rows, positions and segments of a pack while it is being filled."""

    def __init__(self) -> None:
        self.ids: list[Array] = []
        self.depths: list[int] = []
        self.routes: dict[int, Array] = {}
        self.start: list[int] = []
        self.end: list[int] = []
        self.parent: list[int] = []
        self.num_rows = 0

    def add(self, ids: Array, depth: int, parent: int, extends: bool) -> int:
        """Append a node's rows to the open segment `parent`, or as a new segment below it; returns its segment."""
        self.ids.append(ids)
        self.depths.append(depth)
        if extends:
            segment = parent
            self.end[segment] += len(ids)
        else:
            segment = len(self.start)
            self.start.append(self.num_rows)
            self.end.append(self.num_rows + len(ids))
            self.parent.append(parent)
        self.num_rows += len(ids)
        return segment

    def positions(self) -> Array:
        """Depth of every row."""
        num_C = np.array([len(ids) for ids in self.ids], dtype=np.int64)
        before_C = np.cumsum(num_C) - num_C
        return np.arange(self.num_rows) - np.repeat(before_C - np.array(self.depths, dtype=np.int64), num_C)

    def table(self) -> SegmentTable:
        start, end, parent = (np.array(x, dtype=np.int32) for x in (self.start, self.end, self.parent))
        return SegmentTable(start_S=start, end_S=end, parent_S=parent)


def _children(tree: TreeInput, needed_N: Array) -> tuple[list[list[int]], list[int]]:
    """Needed children per node and needed roots, the subtree of most tokens first, then by node index."""
    # Plain integers here and below: element by element, arrays take several times as long.
    weight = list(map(int, np.where(needed_N, tree.num_tokens_N, 0)))
    parents = list(map(int, tree.parent_N))
    for node in range(len(weight) - 1, -1, -1):
        if parents[node] >= 0:
            weight[parents[node]] += weight[node]
    children: list[list[int]] = [[] for _ in tree.ids]
    roots: list[int] = []
    for node in map(int, np.flatnonzero(needed_N)):
        (children[parents[node]] if parents[node] >= 0 else roots).append(node)
    for family in [*children, roots]:
        if len(family) > 1:
            family.sort(key=lambda node: (-weight[node], node))
    return children, roots


def _lay_tree(layout: _Layout, tree: TreeInput, needed_N: Array) -> _Rows:
    """Depth-first rows of the needed nodes; a node continues its parent's segment where nothing else leaves it."""
    children, roots = _children(tree, needed_N)
    parents, num_nodes = list(map(int, tree.parent_N)), len(tree.ids)
    first_row, last_row, segment_of = [-1] * num_nodes, [-1] * num_nodes, [-1] * num_nodes
    end_depth, is_open = [0] * num_nodes, [False] * num_nodes
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        parent, ids = parents[node], tree.ids[node]
        segment, depth, last, extends = -1, 0, -1, False
        if parent >= 0:
            segment, depth, last, extends = segment_of[parent], end_depth[parent], last_row[parent], is_open[parent]
        single = len(children[node]) == 1
        if len(ids):
            first_row[node], last = layout.num_rows, layout.num_rows + len(ids) - 1
            segment = layout.add(ids, depth, segment, extends)
            is_open[node] = single
            if tree.routes is not None and (routes := tree.routes[node]) is not None:
                layout.routes[first_row[node]] = routes
        else:
            is_open[node] = single and extends
        segment_of[node], end_depth[node], last_row[node] = segment, depth + len(ids), last
        stack.extend(reversed(children[node]))
    return _Rows(first_N=np.array(first_row, np.int64), last_N=np.array(last_row, np.int64))


def _edges(tree: TreeInput, piece: Piece, rows: Sequence[_Rows], first_trajectory: int) -> dict[str, Array]:
    """Loss edges of a piece, node after node; `rows` holds the place of each trajectory's nodes."""
    num_tokens_N = tree.num_tokens_N
    owned = [owned_O[num_tokens_N[owned_O] > 0] for owned_O in piece.owned]
    if not any(map(len, owned)):
        return {name: np.zeros(0, dtype) for name, dtype in _EDGE_DTYPES.items()}
    node_O = np.concatenate(owned).astype(np.int64)
    first_O = np.concatenate([place.first_N[nodes] for place, nodes in zip(rows, owned, strict=True)])
    above_O = np.concatenate([place.last_N[tree.parent_N[nodes]] for place, nodes in zip(rows, owned, strict=True)])
    num_O = num_tokens_N[node_O]
    start_O = np.cumsum(num_O) - num_O
    num_edges = int(num_O.sum())
    kept_J = [tree.trajectories[t] for t in piece.trajectories]
    count_J = [sum(int(num_tokens_N[node]) for node in nodes) for nodes in owned]

    def per_trajectory(values: Sequence[float], dtype: type) -> Array:
        return np.repeat(np.array(values, dtype), count_J)

    offset_E = np.arange(num_edges) - np.repeat(start_O, num_O)
    source_row_E = np.repeat(first_O - 1, num_O) + offset_E
    source_row_E[start_O] = above_O  # the first token of a node is predicted by the row before it on the path
    return {
        "source_row_E": source_row_E,
        "target_id_E": np.concatenate([tree.ids[node] for node in node_O]).astype(np.int64),
        "trajectory_E": per_trajectory([first_trajectory + t for t in piece.trajectories], np.int64),
        "execution_E": _constant(tree.execution, num_edges, np.int64),
        "temperature_E": np.repeat(tree.temperature_N[node_O].astype(np.float64), num_O),
        "advantage_E": per_trajectory([t.advantage for t in kept_J], np.float64),
        "logp_behaviour_E": _along(tree.logp_behaviour, node_O, num_O, np.nan, np.float64),
        "logp_old_E": _along(tree.logp_old, node_O, num_O, np.nan, np.float64),
        "logp_teacher_E": _along(tree.logp_teacher, node_O, num_O, np.nan, np.float64),
        "weight_E": _constant(1.0 / tree.num_owned, num_edges, np.float64),
        "trajectory_tokens_E": per_trajectory([int(num_tokens_N[t.owned_O].sum()) for t in kept_J], np.int64),
        "execution_tokens_E": _constant(tree.num_owned, num_edges, np.int64),
        "role_E": per_trajectory([ROLES.index(t.role) for t in kept_J], np.int64),
        "version_E": _along(tree.version, node_O, num_O, -1, np.int64),
        "tree_E": _constant(piece.tree, num_edges, np.int64),
        "node_E": np.repeat(node_O, num_O),
        "offset_E": offset_E,
    }


def _constant(value: float, length: int, dtype: type) -> Array:
    """The same value so often, in no memory: `_joined` writes it out once."""
    return np.broadcast_to(np.array(value, dtype), length)


def _along(values: tuple[Array | None, ...] | None, node_O: Array, num_O: Array, missing: float, dtype: type) -> Array:
    """The values of these nodes one after another, `missing` where a node has none."""
    if values is None:
        return _constant(missing, int(num_O.sum()), dtype)
    parts = (values[node] for node in node_O)
    return np.concatenate(
        [np.full(num, missing, dtype) if part is None else part for part, num in zip(parts, num_O, strict=True)]
    ).astype(dtype, copy=False)


_EDGE_DTYPES: dict[str, type] = {
    **dict.fromkeys(("source_row_E", "target_id_E", "trajectory_E", "execution_E", "trajectory_tokens_E"), np.int64),
    **dict.fromkeys(("execution_tokens_E", "role_E", "version_E"), np.int64),
    **dict.fromkeys(("temperature_E", "advantage_E", "logp_behaviour_E", "logp_old_E", "weight_E"), np.float64),
    "logp_teacher_E": np.float64,
    **dict.fromkeys(("tree_E", "node_E", "offset_E"), np.int64),
}


def _joined(chunks: Sequence[Array], dtype: type) -> Array:
    """One array of them all that may be written to; a single chunk is not copied if it can be helped."""
    if len(chunks) == 1:
        return chunks[0].astype(dtype, copy=not chunks[0].flags.writeable)
    return np.concatenate(chunks, dtype=dtype, casting="unsafe") if chunks else np.zeros(0, dtype)


def lay_out(trees: Sequence[TreeInput], pieces: Sequence[Piece], *, share: bool = True) -> Pack:
    """The pack that holds these pieces: shared prefixes once (`share`), or one row sequence per trajectory.

    Only what the owned nodes need is laid out. Pieces of one tree in one pack must have been joined before.
    """
    layout = _Layout()
    edges: dict[str, list[Array]] = {name: [] for name in _EDGE_DTYPES}
    first_trajectory = np.cumsum([0, *(len(tree.trajectories) for tree in trees)])
    for piece in pieces:
        tree = trees[piece.tree]
        paths = [tree.needed_path(t, owned) for t, owned in zip(piece.trajectories, piece.owned, strict=True)]
        needed = [np.isin(np.arange(len(tree.ids)), path) for path in paths]
        if share:
            rows = [_lay_tree(layout, tree, np.logical_or.reduce(needed))] * len(paths) if paths else []
        else:
            rows = [_lay_tree(layout, tree, needed_N) for needed_N in needed]
        for name, values in _edges(tree, piece, rows, int(first_trajectory[piece.tree])).items():
            edges[name].append(values)
    joined: dict[str, Any] = {name: _joined(chunks, _EDGE_DTYPES[name]) for name, chunks in edges.items()}
    if not any(trees[piece.tree].logp_old is not None for piece in pieces):
        joined["logp_old_E"] = None
    return Pack(
        ids_T=_joined(layout.ids, np.int64),
        position_T=layout.positions(),
        segments=layout.table(),
        routes_TLK=joined_routes(layout.routes, layout.num_rows),
        **joined,
    )


def node_values(
    trees: Sequence[TreeInput], packs: Sequence[Pack], values: Sequence[Array]
) -> list[tuple[Array | None, ...]]:
    """Edge values put back on the nodes they belong to, per tree; None for nodes without edges.

    This is how log-probabilities under the anchor weights become `TreeInput.logp_old`, whatever the packs were.
    """
    out: list[list[Array | None]] = [[None] * len(tree.ids) for tree in trees]
    for pack, value_E in zip(packs, values, strict=True):
        check_array("values", value_E, "f", pack.num_edges)
        start_C = np.flatnonzero(pack.offset_E == 0)  # edges of a node stand together, in token order
        for start, end in zip(start_C, np.append(start_C[1:], pack.num_edges), strict=True):
            out[pack.tree_E[start]][pack.node_E[start]] = np.array(value_E[start:end])
    return [tuple(nodes) for nodes in out]
