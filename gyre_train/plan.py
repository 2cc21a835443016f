"""Which trajectories share a pack: prefixes are shared inside a pack and replayed where a tree is cut over several.

A tree that fits the token budget is one piece. A larger one is divided into pieces of whole trajectories so that the
pieces' tokens, replayed prefixes included, are fewest, then the pieces. Up to `EXACT` trajectories every division is
weighed (a dynamic programme over sets), so the result is optimal; beyond, only those between neighbours in depth-first
order (optimal for that order). Pieces then go into packs first-fit, largest first. A trajectory's owned tokens stay in
one pack. All of it is deterministic.

Guarantee: with budget B, distinct tokens U of a tree and its longest shared prefix p, the tree costs at most
U (B + p) / (B - p) tokens; for the pieces so cut, first-fit decreasing opens at most 11/9 of the fewest packs plus one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from gyre_data.errors import ConfigError, DataError
from gyre_data.forecast import training_flops
from gyre_data.model_shapes import ModelShape
from gyre_train.pack import Pack, Piece, lay_out
from gyre_train.segment_table import Array
from gyre_train.tree_input import TreeInput

__all__ = ["EXACT", "Plan", "Sharing", "flops", "least_tokens", "plan"]


EXACT = 10
"""Most trajectories of a tree for which every division is weighed."""


class Sharing(StrEnum):
    """How trajectories are laid out."""

    TREE = "tree"
    """Common prefixes once per pack."""
    ROWS = "rows"
    """Every trajectory as a row of its own, each target still trained by its owner: the independent baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Packs, and what they cost beside what they could have cost."""

    packs: tuple[Pack, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """Per pack, what it holds."""
    num_packed_tokens: int
    """Rows over all packs, replayed prefixes included."""
    num_unpacked_tokens: int
    """Rows if every trajectory ran alone."""
    num_distinct_tokens: int
    """Rows if no budget forced a replay: no plan with sharing takes fewer."""
    bound_tokens: float
    """Guaranteed ceiling for `num_packed_tokens` when prefixes are shared."""
    num_pairs: int
    """Query-key pairs that attention computes over all packs."""
    num_logit_rows: int
    num_edges: int
    num_executions: int
    """Executions with at least one loss edge: E of the loss."""
    trajectory_tree_J: Array
    """Tree of each trajectory number used in `Pack.trajectory_E`; its index there counts from the tree's first."""

    @property
    def sharing_factor(self) -> float:
        """Unpacked over packed tokens: what the layout saves."""
        return self.num_unpacked_tokens / max(self.num_packed_tokens, 1)


def flops(made: Plan, shape: ModelShape) -> int:
    """Floating-point operations of one forward and backward over the plan; `gyre_data.forecast` has the formula.

    Sliding windows count as full attention, which is what tree attention computes.
    """
    return training_flops(
        shape, tokens=made.num_packed_tokens, pairs=made.num_pairs, logit_rows=made.num_logit_rows,
        window_pairs=made.num_pairs,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """A piece before it is laid out, with its size in rows."""

    piece: Piece
    num_tokens: int


def plan(trees: Sequence[TreeInput], *, tokens: int, sharing: Sharing | str = Sharing.TREE) -> Plan:
    """Packs of at most `tokens` rows for one step's trees; the same input gives the same packs.

    Raises DataError when a single trajectory is longer than the budget, ConfigError for a budget below one.
    """
    sharing = Sharing(sharing)
    if tokens < 1:
        raise ConfigError(f"pack.tokens: wanted a budget of at least 1 token, got {tokens}; raise it")
    executions = [tree.execution for tree in trees]
    if len(set(executions)) != len(executions):
        raise DataError(f"wanted one tree per execution, got executions {executions}; join the trees of an execution")
    cuts: list[_Cut] = []
    unpacked = distinct = 0
    bound = 0.0
    for index, tree in enumerate(trees):
        order, paths = _depth_first(tree)
        length_K = np.array([int(tree.num_tokens_N[path].sum()) for path in paths], dtype=np.int64)
        _check_budget(tree, order, length_K, tokens)
        common_K = _common_prefixes(tree, paths)
        unpacked += int(length_K.sum())
        fresh_K = length_K - common_K
        fresh = int(fresh_K.sum())
        distinct += fresh
        longest = int(common_K[fresh_K > 0].max(initial=0))
        bound += fresh * (tokens + longest) / (tokens - longest) if fresh > tokens else fresh
        parts: list[tuple[tuple[int, ...], int]]
        if sharing is Sharing.ROWS:
            parts = [((k,), int(length_K[k])) for k in range(len(order))]
        elif fresh <= tokens:
            parts = [(tuple(range(len(order))), fresh)] if order else []
        elif len(order) <= EXACT:
            parts = _cheapest_division(tree, paths, tokens)
        else:
            parts = _cheapest_cuts(length_K, common_K, tokens)
        for members, size in parts:
            cuts.append(_Cut(piece=_piece(tree, index, [order[k] for k in members]), num_tokens=size))
    groups = _first_fit(cuts, tokens, join=sharing is Sharing.TREE)
    packs = tuple(lay_out(trees, group, share=sharing is Sharing.TREE) for group in groups)
    return Plan(
        packs=packs,
        pieces=groups,
        num_packed_tokens=sum(pack.num_tokens for pack in packs),
        num_unpacked_tokens=unpacked,
        num_distinct_tokens=distinct,
        bound_tokens=bound,
        num_pairs=sum(pack.segments.num_pairs for pack in packs),
        num_logit_rows=sum(len(pack.logit_row_U) for pack in packs),
        num_edges=sum(pack.num_edges for pack in packs),
        num_executions=sum(tree.num_owned > 0 for tree in trees),
        trajectory_tree_J=np.repeat(np.arange(len(trees)), [len(tree.trajectories) for tree in trees]),
    )


def least_tokens(tree: TreeInput, tokens: int) -> int:
    """Fewest rows that any division of a tree over packs of `tokens` rows takes: what a plan can be held against.

    A pack that holds something below a node holds the path down to it too. So where the path takes p rows and all
    packs together hold at least c rows below, the path is in c / (B - p) packs or more, counted from the leaves up.
    No plan need reach it. `tokens` must hold every trajectory, as for `plan`.
    """
    rows_N = np.zeros(len(tree.ids), np.int64)
    for index in range(len(tree.trajectories)):
        path_P = tree.needed_path(index)
        rows_N[path_P] = tree.num_tokens_N[path_P]
    path_N = rows_N.copy()
    for node in range(len(rows_N)):
        if tree.parent_N[node] >= 0:
            path_N[node] += path_N[tree.parent_N[node]]
    below_N, packs_N = np.zeros_like(rows_N), np.ones_like(rows_N)
    for node in range(len(rows_N) - 1, -1, -1):
        if below_N[node]:
            packs_N[node] = max(packs_N[node], -(-below_N[node] // (tokens - path_N[node])))
        parent = tree.parent_N[node]
        if parent >= 0:
            below_N[parent] += below_N[node] + rows_N[node] * packs_N[node]
            packs_N[parent] = max(packs_N[parent], packs_N[node])
    return int((rows_N * packs_N).sum())


def _piece(tree: TreeInput, index: int, trajectories: Sequence[int]) -> Piece:
    owned = tuple(tree.trajectories[t].owned_O for t in trajectories)
    return Piece(tree=index, trajectories=tuple(trajectories), owned=owned)


def _depth_first(tree: TreeInput) -> tuple[list[int], list[Array]]:
    """Trajectories that train something, and their needed paths, in an order that keeps common prefixes together."""
    needed = [(index, tree.needed_path(index)) for index in range(len(tree.trajectories))]
    # Node indices along a path sort like a depth-first walk, since siblings differ at the first node they do not share.
    kept = sorted(((tuple(map(int, path)), index) for index, path in needed if len(path)), key=lambda item: item)
    paths = dict(needed)
    return [index for _, index in kept], [paths[index] for _, index in kept]


def _common_prefixes(tree: TreeInput, paths: Sequence[Array]) -> Array:
    """Tokens each path shares with the one before it; in depth-first order no earlier path shares more."""
    common_K = np.zeros(len(paths), dtype=np.int64)
    for k in range(1, len(paths)):
        n = min(len(paths[k - 1]), len(paths[k]))
        same = int(np.argmin(np.append(paths[k - 1][:n] == paths[k][:n], False)))
        common_K[k] = int(tree.num_tokens_N[paths[k][:same]].sum())
    return common_K


def _check_budget(tree: TreeInput, order: Sequence[int], length_K: Array, tokens: int) -> None:
    if len(length_K) and int(length_K.max()) > tokens:
        worst = int(length_K.argmax())
        raise DataError(
            f"pack.tokens: wanted every trajectory within {tokens} tokens, got {int(length_K[worst])} in trajectory "
            f"{order[worst]} of execution {tree.execution}; set pack.tokens to {int(length_K[worst])} or more, or "
            "exclude it"
        )


def _cheapest_division(tree: TreeInput, paths: Sequence[Array], tokens: int) -> list[tuple[tuple[int, ...], int]]:
    """Sets of trajectories, each within the budget, of least total tokens, then fewest sets; with their sizes."""
    set_M = np.arange(1 << len(paths))
    on_N = np.zeros(len(tree.ids), np.int64)  # which paths hold the node, as bits
    for k, path in enumerate(paths):
        on_N[path] |= 1 << k
    size_M = np.zeros(len(set_M), np.int64)
    for bits in np.unique(on_N[on_N > 0]):
        size_M[set_M & bits > 0] += int(tree.num_tokens_N[on_N == bits].sum())
    fits_F = set_M[(size_M <= tokens) & (set_M > 0)]
    fits = {int(lowest): fits_F[fits_F & -fits_F == lowest] for lowest in 1 << np.arange(len(paths))}
    # Cost of the cheapest division of each set: tokens, and one part in a million of a token for each piece.
    cost_M, last_M = np.zeros(len(set_M)), np.zeros(len(set_M), np.int64)
    for chosen in range(1, len(set_M)):
        piece = fits[chosen & -chosen]  # the piece that holds the first trajectory is tried in every way
        piece = piece[piece & ~chosen == 0]
        total = cost_M[chosen ^ piece] + size_M[piece] + 1e-6
        best = int(total.argmin())
        cost_M[chosen], last_M[chosen] = total[best], piece[best]
    out = []
    rest = len(set_M) - 1
    while rest:
        piece = int(last_M[rest])
        out.append((tuple(k for k in range(len(paths)) if piece >> k & 1), int(size_M[piece])))
        rest ^= piece
    return out


def _cheapest_cuts(length_K: Array, common_K: Array, tokens: int) -> list[tuple[tuple[int, ...], int]]:
    """Runs of consecutive trajectories, each within the budget, of least total tokens, then fewest runs; with sizes."""
    num = len(length_K)
    best: list[tuple[int, int]] = [(0, 0)]  # (tokens, runs) for the first k trajectories
    origin = [(0, 0)]  # (first of the last run, its tokens)
    for end in range(1, num + 1):
        candidates: list[tuple[int, int, int, int]] = []
        tail = 0  # what the run's later trajectories add to its first path
        for first in range(end - 1, -1, -1):
            size = int(length_K[first]) + tail
            if size <= tokens:
                candidates.append((best[first][0] + size, best[first][1] + 1, first, size))
            tail += int(length_K[first] - common_K[first])
            if tail > tokens:
                break
        total, runs, first, size = min(candidates)
        best.append((total, runs))
        origin.append((first, size))
    out: list[tuple[tuple[int, ...], int]] = []
    while num:
        first, size = origin[num]
        out.append((tuple(range(first, num)), size))
        num = first
    return out[::-1]


def _first_fit(cuts: Sequence[_Cut], tokens: int, *, join: bool) -> tuple[tuple[Piece, ...], ...]:
    """First-fit decreasing; pieces of one tree that meet in a pack are joined, which can only save tokens."""
    groups: list[list[_Cut]] = []
    free: list[int] = []
    for cut in sorted(cuts, key=lambda cut: -cut.num_tokens):
        slot = next((i for i, room in enumerate(free) if room >= cut.num_tokens), None)
        if slot is None:
            groups.append([])
            free.append(tokens)
            slot = len(groups) - 1
        groups[slot].append(cut)
        free[slot] -= cut.num_tokens
    return tuple(_joined([cut.piece for cut in group], join=join) for group in groups)


def _joined(pieces: Sequence[Piece], *, join: bool) -> tuple[Piece, ...]:
    by_tree: dict[int, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.tree, piece.trajectories)):
        by_tree.setdefault(piece.tree, []).append(piece)
    if not join:
        return tuple(piece for group in by_tree.values() for piece in group)
    return tuple(
        Piece(
            tree=tree,
            trajectories=tuple(t for piece in group for t in piece.trajectories),
            owned=tuple(owned for piece in group for owned in piece.owned),
        )
        for tree, group in by_tree.items()
    )
