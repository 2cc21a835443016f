"""What every plan guarantees, whatever the trees and the budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data.errors import ConfigError, DataError
from gyre_data.model_shapes import ModelShape
from gyre_train.attn.blocks import blocks_of
from gyre_train.attn.reference import dense_mask
from gyre_train.pack import Pack
from gyre_train.plan import EXACT, flops, least_tokens, plan
from gyre_train.tree_input import TreeInput
from tests.support.tree_inputs import forests, make_tree
from tests.support.tree_inputs import trees as random_trees


def longest(trees: list[TreeInput]) -> int:
    return max(int(t.num_tokens_N[t.needed_path(j)].sum()) for t in trees for j in range(len(t.trajectories)))


def check_context(trees: list[TreeInput], pack: Pack) -> None:
    """Each edge's row sees exactly the tokens before the target on its path, at their depths, and only those."""
    mask = dense_mask(pack.segments).numpy()
    for e in range(pack.num_edges):
        tree, node = trees[pack.tree_E[e]], int(pack.node_E[e])
        path = []
        while node >= 0:
            path.insert(0, node)
            node = int(tree.parent_N[node])
        before = np.concatenate([tree.ids[n] for n in path[:-1]] + [tree.ids[path[-1]][: pack.offset_E[e]]])
        seen = np.flatnonzero(mask[pack.source_row_E[e]])
        np.testing.assert_array_equal(pack.ids_T[seen], before)
        np.testing.assert_array_equal(pack.position_T[seen], np.arange(len(before)))
        assert pack.target_id_E[e] == tree.ids[path[-1]][pack.offset_E[e]]


@settings(max_examples=150, deadline=None)
@given(trees=forests(), slack=st.integers(0, 30), sharing=st.sampled_from(["tree", "rows"]))
def test_every_plan(trees: list[TreeInput], slack: int, sharing: str) -> None:
    budget = longest(trees) + slack
    made = plan(trees, tokens=budget, sharing=sharing)
    want = sorted(
        (index, first + j, int(node), offset)
        for index, (tree, first) in enumerate(
            zip(trees, np.cumsum([0, *(len(t.trajectories) for t in trees)]), strict=False)
        )
        for j, trajectory in enumerate(tree.trajectories)
        for node in trajectory.owned_O
        for offset in range(len(tree.ids[node]))
    )
    came: list[tuple[int, ...]] = []
    home: dict[int, int] = {}
    for number, pack in enumerate(made.packs):
        assert 0 < pack.num_tokens <= budget
        check_context(trees, pack)
        assert pack.segments.num_pairs == int(dense_mask(pack.segments).sum())
        came += map(tuple, np.stack([pack.tree_E, pack.trajectory_E, pack.node_E, pack.offset_E], 1))
        for trajectory in np.unique(pack.trajectory_E):
            assert home.setdefault(int(trajectory), number) == number  # owned tokens stay together
            here = pack.trajectory_E == trajectory
            assert (pack.trajectory_tokens_E[here] == here.sum()).all()
    assert sorted(came) == want
    for tree in trees:
        shares = np.concatenate([p.weight_E[p.execution_E == tree.execution] for p in made.packs])
        assert tree.num_owned == len(shares)
        assert len(shares) == 0 or np.isclose(shares.sum(), 1.0)
    assert made.num_executions == sum(t.num_owned > 0 for t in trees)
    assert made.num_packed_tokens == sum(pack.num_tokens for pack in made.packs)
    if sharing == "tree":
        assert made.num_distinct_tokens <= made.num_packed_tokens <= made.num_unpacked_tokens
        assert made.num_packed_tokens <= made.bound_tokens + 1e-9
        assert plan(trees, tokens=10**6).num_packed_tokens == made.num_distinct_tokens
    else:
        assert made.num_packed_tokens == made.num_unpacked_tokens


def divisions(items: list[int]) -> list[list[list[int]]]:
    """Every way to divide the items into sets."""
    if not items:
        return [[]]
    first, *rest = items
    out = []
    for smaller in divisions(rest):
        out.append([[first], *smaller])
        out += [[*smaller[:i], [first, *smaller[i]], *smaller[i + 1 :]] for i in range(len(smaller))]
    return out


@settings(max_examples=150, deadline=None)
@given(tree=random_trees(max_nodes=16), slack=st.integers(0, 12))
def test_a_division_is_the_best_of_all(tree: TreeInput, slack: int) -> None:
    """By brute force over all divisions of up to six trajectories."""
    tree = replace(tree, trajectories=tree.trajectories[:6])
    paths = [set(map(int, tree.needed_path(t))) for t in range(len(tree.trajectories))]
    budget = max(longest([tree]) + slack, 1)
    costs = []
    for division in divisions([t for t, path in enumerate(paths) if path]):
        sizes = [sum(int(tree.num_tokens_N[n]) for n in set().union(*(paths[t] for t in part))) for part in division]
        if max(sizes, default=0) <= budget:
            costs.append((sum(sizes), len(sizes)))
    made = plan([tree], tokens=budget)
    assert (made.num_packed_tokens, len(made.packs)) == min(costs)
    assert made.num_distinct_tokens <= least_tokens(tree, budget) <= made.num_packed_tokens


def test_many_trajectories_are_cut_in_depth_first_order() -> None:
    """More than EXACT: a comb whose teeth fork from a trunk, where neighbours share most."""
    teeth = EXACT + 4
    parents = [-1, *range(teeth), *range(1, teeth + 1)]
    tree = make_tree(parents, [3] * len(parents), [False] * (teeth + 1) + [True] * teeth, keep=teeth, seed=1)
    made = plan([tree], tokens=60)
    assert len(made.packs) > 1
    assert made.num_packed_tokens <= min(made.bound_tokens, 1.5 * made.num_distinct_tokens)


# Parents and messages of the published case's unforked stretches: a conversation cut in three by a compaction and two
# forks, what leaves it there, and three sub-agents of which two fork near their start.
PUBLISHED = [
    (-1, 1), (0, 199), (1, 138), (1, 80), (0, 44), (4, 75), (5, 163), (5, 120), (4, 60),
    (-1, 1), (9, 104), (-1, 1), (11, 140), (11, 80), (-1, 2), (14, 99), (14, 40),
]  # fmt: skip


@pytest.mark.parametrize("room", [1.1, 1.2, 1.7, 2.0])
@pytest.mark.parametrize("kind", ["published", "thinking"])
def test_realistic_trees_take_little_more_than_the_least(kind: str, room: float) -> None:
    """Ten trajectories of the published shape; or 64 turns whose thoughts are stripped from the history."""
    if kind == "published":
        parents, messages = zip(*PUBLISHED, strict=True)
        lengths = [int(n * per) for n, per in zip(messages, np.random.default_rng(3).uniform(5, 10, 17), strict=True)]
    else:
        turns = 64
        parents = (-1, *range(turns - 1), *range(turns))
        lengths = [150, *[40] * (turns - 1), *[55] * turns]
    outputs = [node not in parents for node in range(len(parents))]
    tree = make_tree(list(parents), lengths, outputs, keep=len(parents))
    budget = int(longest([tree]) * room)
    made = plan([tree], tokens=budget)
    assert len(made.packs) > 1
    assert made.num_packed_tokens <= 1.03 * least_tokens(tree, budget)


@settings(max_examples=100, deadline=None)
@given(trees=forests(max_trees=2), sharing=st.sampled_from(["tree", "rows"]))
def test_blocks_tile_the_mask_once(trees: list[TreeInput], sharing: str) -> None:
    (pack,) = plan(trees, tokens=10**6, sharing=sharing).packs
    hits = np.zeros((pack.num_tokens, pack.num_tokens), int)
    for block in blocks_of(pack.segments):
        live = np.ones((block.q_end - block.q_start, block.k_end - block.k_start), int)
        hits[block.q_start : block.q_end, block.k_start : block.k_end] += np.tril(live) if block.causal else live
    np.testing.assert_array_equal(hits, dense_mask(pack.segments).int())


def test_a_plan_is_deterministic() -> None:
    trees = [make_tree([-1, 0, 0, 1, 1], [5, 4, 6, 3, 4], [False, True, True, True, True], seed=s) for s in range(3)]
    trees = [replace(tree, execution=e) for e, tree in enumerate(trees)]
    one, two = (plan(trees, tokens=20) for _ in range(2))
    for a, b in zip(one.packs, two.packs, strict=True):
        np.testing.assert_array_equal(a.ids_T, b.ids_T)
        np.testing.assert_array_equal(a.trajectory_E, b.trajectory_E)


def test_the_cut_replays_the_shorter_prefix() -> None:
    # Root 10; two halves that fork again after 8 more tokens: cutting between the halves replays 10, inside one 18.
    tree = make_tree(
        [-1, 0, 0, 1, 1, 2, 2], [10, 8, 8, 4, 4, 4, 4], [False, False, False, True, True, True, True], keep=9
    )
    made = plan([tree], tokens=27)
    assert (made.num_distinct_tokens, made.num_packed_tokens, len(made.packs)) == (42, 52, 2)


def test_small_executions_share_a_pack() -> None:
    trees = [make_tree([-1, 0], [3, 2], [False, True], execution=e) for e in range(5)]
    assert [pack.num_tokens for pack in plan(trees, tokens=15).packs] == [15, 10]
    mixed = [make_tree([-1, 0], [n - 2, 2], [False, True], execution=n) for n in (3, 4, 6, 7)]
    assert [pack.num_tokens for pack in plan(mixed, tokens=10).packs] == [10, 10]


def test_refusals_name_the_mend() -> None:
    tree = make_tree([-1, 0], [5, 4], [False, True], execution=7)
    with pytest.raises(DataError, match=r"got 9 in trajectory 0 of execution 7; set pack\.tokens to 9 or more"):
        plan([tree], tokens=8)
    with pytest.raises(ConfigError, match="at least 1 token"):
        plan([tree], tokens=0)
    with pytest.raises(DataError, match="one tree per execution"):
        plan([tree, tree], tokens=100)


def test_flops_by_formula() -> None:
    shape = ModelShape(num_layers=2, hidden=8, ffn=16, num_heads=4, num_kv_heads=2, head_dim=2, vocab=11)
    made = plan([make_tree([-1, 0], [3, 2], [False, True])], tokens=9)
    weights = 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16)  # q, k and v, o, gate-up-down over two layers
    attention = 4 * (5 * 6 // 2) * 2 * 4 * 2
    assert flops(made, shape) == 3 * (2 * 5 * weights + attention + 2 * 2 * 8 * 11)
