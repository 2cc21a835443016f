"""Layout and loss edges on trees small enough to write down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gyre_data.errors import AlignmentError, DataError
from gyre_train.attn.blocks import blocks_of
from gyre_train.attn.reference import dense_mask
from gyre_train.pack import SegmentTable, lay_out, node_values
from gyre_train.plan import plan
from gyre_train.tree_input import TrajectoryInput, TreeInput
from tests.support.tree_inputs import make_tree

CASES = Path(__file__).parents[1] / "data" / "cases"


def case(name: str) -> dict[str, Any]:
    return json.loads((CASES / f"{name}.json").read_text())


def forked(lengths: list[int], *, count: str = "once", advantages: list[float] | None = None) -> TreeInput:
    """p -> a -> {b, c}: a, b and c are sampled; trajectories end in b and in c."""
    advantages = advantages or [1.0, 1.0]
    start = np.cumsum([0, *lengths])
    paths = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    owned = [[1, 2], [1, 3] if count == "per_row" else [3]]
    return TreeInput(
        execution=0,
        parent_N=np.array([-1, 0, 1, 1], np.int32),
        ids=tuple(np.arange(start[i], start[i + 1], dtype=np.int32) for i in range(4)),
        temperature_N=np.ones(4),
        trajectories=tuple(
            TrajectoryInput(path_P=paths[j], owned_O=np.array(owned[j], np.int32), advantage=advantages[j])
            for j in range(2)
        ),
        logp_behaviour=(None, *(np.zeros(n) for n in lengths[1:])),
    )


def test_l07_who_sees_whom() -> None:
    given, expected = case("L07")["input"], case("L07")["expected"]
    (pack,) = plan([forked(list(given["tree"].values()))], tokens=7).packs
    np.testing.assert_array_equal(pack.position_T, expected["position_ids"])
    np.testing.assert_array_equal(dense_mask(pack.segments).int(), expected["mask_rows(1 = may attend)"])
    from_a = pack.source_row_E == 2
    np.testing.assert_array_equal(np.sort(pack.target_id_E[from_a]), pack.ids_T[[3, 5]])  # b[0] and c[0]
    assert len(pack.logit_row_U) == pack.num_edges - 1
    np.testing.assert_array_equal(pack.logit_row_U[pack.edge_logit_E], pack.source_row_E)


@pytest.mark.parametrize("count", ["once", "per_row"])
def test_l06_weights_of_a_shared_reply(count: str) -> None:
    given, expected = case("L06")["input"], case("L06")["expected"]
    lengths = [node["tokens"] for node in given["tree"]["nodes"]]
    advantages = [given["leaves"][leaf]["advantage"] for leaf in "bc"]
    tree = forked(lengths, count=count, advantages=advantages)
    made = plan([tree], tokens=100)
    (pack,) = made.packs
    assert made.num_packed_tokens == expected["tree_view_tokens"]
    assert made.num_unpacked_tokens == expected["row_view_tokens"]
    coefficient_E = pack.advantage_E * pack.weight_E
    per_token = {
        name: {
            round(float(coefficient_E[(pack.node_E == n) & (pack.offset_E == o)].sum()), 9) for o in range(lengths[n])
        }
        for n, name in enumerate("pabc")
        if name != "p"
    }
    if count == "per_row":
        assert pack.num_edges == expected["row_view"]["trained_row_tokens"]
        assert per_token == {name: {x} for name, x in expected["coef_per_token_after_division"].items()}
    else:  # the owner's advantage alone, and a denominator that counts each target once
        assert pack.num_edges == tree.num_owned == 10
        assert per_token == {"a": {0.1}, "b": {0.1}, "c": {-0.05}}


def test_single_child_nodes_are_one_segment() -> None:
    tree = make_tree([-1, 0, 1, 2], [3, 2, 0, 3], [False, True, False, True])
    (pack,) = plan([tree], tokens=100).packs
    assert len(pack.segments.start_S) == 1
    np.testing.assert_array_equal(pack.position_T, np.arange(8))
    np.testing.assert_array_equal(pack.source_row_E, [2, 3, 4, 5, 6])


def test_an_empty_node_does_not_hide_a_fork() -> None:
    # 0 -> 1 (empty) -> 2 and 0 -> 3: node 2 must not run on in the segment of 0.
    tree = make_tree([-1, 0, 1, 0], [3, 0, 4, 2], [False, False, True, True])
    (pack,) = plan([tree], tokens=100).packs
    np.testing.assert_array_equal(pack.segments.parent_S, [-1, 0, 0])
    np.testing.assert_array_equal(pack.position_T, [0, 1, 2, 3, 4, 5, 6, 3, 4])
    np.testing.assert_array_equal(pack.source_row_E[pack.offset_E == 0], [2, 2])


def test_a_trunk_with_many_side_branches_stays_contiguous() -> None:
    # A long conversation whose every turn was retried once; the retry comes first in the record.
    parents, lengths, outputs, trunk = [-1], [4], [False], 0
    for _ in range(20):
        parents += [trunk, trunk]
        lengths += [3, 3]
        outputs += [True, True]
        trunk = len(parents) - 1
    tree = make_tree(parents, lengths, outputs, keep=30)
    (pack,) = plan([tree], tokens=1000).packs
    blocks = blocks_of(pack.segments)
    assert len([b for b in blocks if b.causal]) == 21  # the trunk and its 20 retries
    assert len([b for b in blocks if not b.causal]) == 20
    assert (blocks[0].q_start, blocks[0].q_end) == (0, 4 + 20 * 3)


def test_what_lies_below_the_last_owned_token_is_not_laid_out() -> None:
    tree = forked([2, 1, 2, 2])
    b_only = replace(tree, trajectories=(replace(tree.trajectories[0], owned_O=np.array([1], np.int32)),))
    (pack,) = plan([b_only], tokens=100).packs
    np.testing.assert_array_equal(pack.ids_T, [0, 1, 2])


def test_rows_repeat_the_prefix_but_not_the_targets() -> None:
    made = plan([forked([2, 1, 2, 2])], tokens=10, sharing="rows")
    (pack,) = made.packs
    np.testing.assert_array_equal(pack.segments.parent_S, [-1, -1])
    assert made.num_packed_tokens == made.num_unpacked_tokens == 10
    assert pack.num_edges == 5


def test_values_go_back_to_their_nodes() -> None:
    tree = forked([2, 1, 2, 2])
    made = plan([tree], tokens=5)
    assert len(made.packs) == 2
    (back,) = node_values([tree], made.packs, [pack.target_id_E.astype(np.float64) for pack in made.packs])
    assert back[0] is None
    for node in (1, 2, 3):
        np.testing.assert_array_equal(back[node], tree.ids[node])
    (pack,) = plan([replace(tree, logp_old=back)], tokens=100).packs
    np.testing.assert_array_equal(pack.logp_old_E, pack.target_id_E)


def test_nothing_to_train_is_no_pack() -> None:
    tree = replace(forked([2, 1, 2, 2]), trajectories=())
    made = plan([tree], tokens=10)
    assert (made.packs, made.num_executions, made.num_edges) == ((), 0, 0)
    pack = lay_out([tree], [])
    assert pack.num_tokens == pack.num_edges == 0


def test_bad_trees_are_refused_with_the_mend() -> None:
    tree = forked([2, 1, 2, 2])
    with pytest.raises(AlignmentError, match=r"ids\[0\].*got int32 \(1, 2\); convert"):
        replace(tree, ids=(tree.ids[0][None], *tree.ids[1:]))
    with pytest.raises(AlignmentError, match=r"logp_behaviour\[1\]: wanted 1 values, got 2; nothing is padded"):
        replace(tree, logp_behaviour=(None, np.zeros(2), None, None))
    with pytest.raises(AlignmentError, match="parents before children"):
        replace(tree, parent_N=np.array([-1, 2, 1, 1], np.int32))
    with pytest.raises(AlignmentError, match="path from a root down"):
        replace(tree, trajectories=(replace(tree.trajectories[0], path_P=np.array([0, 2], np.int32)),))
    with pytest.raises(AlignmentError, match="owned nodes in path order"):
        replace(tree, trajectories=(replace(tree.trajectories[0], owned_O=np.array([2, 1], np.int32)),))
    with pytest.raises(DataError, match="no token before it"):
        replace(tree, trajectories=(replace(tree.trajectories[0], owned_O=np.array([0], np.int32)),))
    with pytest.raises(DataError, match="temperatures above 0"):
        replace(tree, temperature_N=np.array([1.0, 0.0, 1.0, 1.0]))
    with pytest.raises(DataError, match="finite advantage"):
        replace(tree, trajectories=(replace(tree.trajectories[0], advantage=float("nan")),))


def test_segment_tables_are_refused_when_not_depth_first() -> None:
    start, end = np.array([0, 2, 3, 4], np.int32), np.array([2, 3, 4, 6], np.int32)
    with pytest.raises(AlignmentError, match="depth-first"):
        SegmentTable(start_S=start, end_S=end, parent_S=np.array([-1, 0, 0, 1], np.int32))
    with pytest.raises(AlignmentError, match="tile the rows"):
        SegmentTable(start_S=start, end_S=end + np.int32(1), parent_S=np.array([-1, 0, 0, 0], np.int32))
