"""A tree is its trajectories: nothing is lost or invented between rows, tree and paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data.schema import NodeKind
from gyre_data.tree import Forest as Trees
from gyre_data.tree import Tree
from tests.support.forest import Forest, forests

few = settings(max_examples=30, deadline=None)


def trees(run: Forest) -> list[Tree]:
    loaded = Trees(run)
    return [loaded.tree(name) for name in loaded.execution_ids]


@few
@given(forests())
def test_tree_to_trajectories_to_tree_is_the_identity(run: Forest) -> None:
    for tree in trees(run):
        leaves = [i for i in range(len(tree)) if not tree.children(i)]
        rebuilt: dict[str, str | None] = {}
        for leaf in leaves:
            names = [tree.node_id[i] for i in tree.path(leaf)]
            for above, name in zip([None, *names], names, strict=False):
                assert rebuilt.setdefault(name, above) == above
        rows = {row.node_id: row for row in run.rows["nodes"] if row.execution_id == tree.execution_id}
        assert rebuilt == {name: row.parent_id for name, row in rows.items()}
        for i, name in enumerate(tree.node_id):
            assert np.array_equal(tree.ids(i), rows[name].token_ids)
            assert (tree.logprobs(i) is None) == (rows[name].logprobs is None)
            if rows[name].logprobs is not None:
                assert np.array_equal(tree.logprobs(i), rows[name].logprobs)
            assert tree.versions(i) == rows[name].policy_versions


@few
@given(forests())
def test_path_ids_are_the_concatenation_and_positions_fit(run: Forest) -> None:
    for tree in trees(run):
        for i in range(len(tree)):
            path = tree.path(i)
            assert path[-1] == i
            assert tree.parent_N[path[0]] == -1
            assert [int(p) for p in tree.parent_N[path[1:]]] == path[:-1].tolist()
            ids = tree.path_ids(i)
            assert np.array_equal(ids, np.concatenate([tree.ids(int(j)) for j in path]))
            assert len(ids) == tree.start_pos_N[i] + tree.num_tokens_N[i]
        for call in tree.calls:
            if call.prompt_node is not None:
                assert len(tree.path_ids(tree.index[call.prompt_node])) == call.prompt_tokens


@few
@given(forests())
def test_subtrees_are_intervals(run: Forest) -> None:
    for tree in trees(run):
        for i in range(len(tree)):
            inside = {j for j in range(len(tree)) if i in tree.path(j)}
            assert inside == set(range(i, int(tree.end_N[i])))
            assert all(tree.is_ancestor(i, j) == (j in inside) for j in range(len(tree)))


@few
@given(forests(), st.integers(0, 2**32 - 1))
def test_row_order_on_disk_does_not_matter(run: Forest, seed: int) -> None:
    for one, other in zip(
        sorted(trees(run), key=lambda t: t.execution_id),
        sorted(trees(run.shuffled(seed)), key=lambda t: t.execution_id),
        strict=True,
    ):
        assert one.node_id == other.node_id
        assert one.parent_N.tolist() == other.parent_N.tolist()
        assert [c.call_id for c in one.calls] == [c.call_id for c in other.calls]
        assert all(np.array_equal(one.ids(i), other.ids(i)) for i in range(len(one)))


def test_tokens_are_views_that_cannot_be_written() -> None:
    run = Forest()
    e = run.execution()
    e.call(new=[("user", 5)])
    table = run.table("nodes")
    tree = Trees(
        type("Tables", (), {"table": lambda self, name: table if name == "nodes" else run.table(name)})()
    ).tree(e.execution_id)
    flat = [chunk.values.to_numpy() for chunk in table.column("token_ids").chunks]
    assert all(any(np.shares_memory(tree.ids(i), values) for values in flat) for i in range(len(tree)))
    with pytest.raises(ValueError, match="read-only"):
        tree.ids(0)[0] = 1


def test_branches_carry_the_reason_of_the_call_that_made_them() -> None:
    run = Forest()
    e = run.execution()
    a = e.call(new=[("user", 5)])
    b = e.call(after=a, new=[("tool", 2)])
    c = e.retry(b)
    (branch,) = Tree.load(run, e.execution_id).branches()
    assert branch.calls == (b.id, c.id)
    assert branch.reasons == (None, "retry")


def test_nodes_of_a_call_that_never_committed_are_not_in_the_tree() -> None:
    run = Forest()
    e = run.execution()
    e.call(new=[("user", 5)])
    lost = e.call(new=[("user", 7)])
    run.rows["calls"] = [row for row in run.rows["calls"] if row.call_id != lost.id]
    tree = Tree.load(run, e.execution_id)
    assert lost.output not in tree.index
    assert list(tree.kind_N) == [NodeKind.PROMPT, NodeKind.GENERATION_PROMPT, NodeKind.OUTPUT]
