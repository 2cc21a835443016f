"""The trainer's contract: packed forest == independent trajectories with shared targets counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_train.pack import Pack, Piece, SegmentTable, lay_out, node_values
from gyre_train.plan import plan
from gyre_train.tree_input import TreeInput
from tests.support.exactness import ExactnessError, assert_exact
from tests.support.faults import FAULTS as FOREST_FAULTS
from tests.support.tiny_transformer import TinyTransformer
from tests.support.tree_inputs import forests, make_tree

torch.set_num_threads(1)


def longest(trees: list[TreeInput]) -> int:
    return max(int(t.num_tokens_N[t.needed_path(j)].sum()) for t in trees for j in range(len(t.trajectories)))


def with_old(model: TinyTransformer, trees: list[TreeInput], seed: int) -> list[TreeInput]:
    """logp_old near the model's (the first tree is not clipped, others may be), behaviour off by enough to cap."""
    rng = np.random.default_rng(seed)
    made = plan(trees, tokens=10**6)
    with torch.no_grad():
        values = node_values(trees, made.packs, [model.edge_logprobs(p).double().numpy() for p in made.packs])
    out = []
    for index, (tree, logp) in enumerate(zip(trees, values, strict=True)):
        shift = 0.0 if index == 0 else float(rng.choice([-0.02, 0.0, 0.02]))
        old = tuple(None if x is None else x + shift + rng.uniform(-0.004, 0.004, len(x)) for x in logp)
        behaviour = tuple(None if x is None else x - rng.uniform(-0.5, 2.5, len(x)) for x in old)
        out.append(replace(tree, logp_old=old, logp_behaviour=behaviour))
    return out


@pytest.mark.parametrize("backend", ["segments", "reference"])
@settings(max_examples=40, deadline=None)
@given(
    trees=forests(),
    slack=st.integers(0, 40),
    sharing=st.sampled_from(["tree", "rows"]),
    loss=st.sampled_from(
        [("sft", "step"), ("sequence", "step"), ("sequence", "burst"), ("execution", "burst"), ("token", "burst")]
    ),
)
def test_packed_equals_independent(
    backend: str, trees: list[TreeInput], slack: int, sharing: str, loss: tuple[str, str]
) -> None:
    model, (objective, anchor) = TinyTransformer(backend=backend), loss
    if anchor == "burst":
        trees = with_old(model, trees, slack)
    budget = longest(trees) + slack
    made = plan(trees, tokens=budget, sharing=sharing)
    assert max(p.num_tokens for p in made.packs) <= budget
    assert_exact(model, trees, made.packs, objective=objective, anchor=anchor)


@settings(max_examples=30, deadline=None)
@given(
    trees=forests(), seed=st.integers(0, 2**16), objective=st.sampled_from(["sequence", "execution", "token", "sft"])
)
def test_any_cut_over_micro_steps_is_exact(trees: list[TreeInput], seed: int, objective: str) -> None:
    """Owned nodes thrown into packs at random: trajectories span packs, so s needs the first phase."""
    rng, model = np.random.default_rng(seed), TinyTransformer()
    trees = with_old(model, trees, seed)
    packs: list[list[Piece]] = [[] for _ in range(rng.integers(1, 4))]
    for index, tree in enumerate(trees):
        where_N = rng.integers(0, len(packs), len(tree.ids))
        for number, pieces in enumerate(packs):
            owned = [t.owned_O[where_N[t.owned_O] == number] for t in tree.trajectories]
            pieces.append(Piece(tree=index, trajectories=tuple(range(len(owned))), owned=tuple(owned)))
    made = [lay_out(trees, pieces, share=bool(rng.integers(2))) for pieces in packs]
    assert_exact(model, trees, made, objective=objective, anchor="burst")


@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("fault", FOREST_FAULTS)
@settings(max_examples=5, deadline=None)
@given(trees=forests())
def test_the_check_sees_in_any_forest(fault: str, backend: str, trees: list[TreeInput]) -> None:
    (pack,) = plan(trees, tokens=10**6).packs
    broken = FOREST_FAULTS[fault](pack)
    with pytest.raises(ExactnessError, match="relative difference"):
        assert_exact(TinyTransformer(backend=backend), trees, [broken], anchor="step")


def test_float32_is_within_its_bound() -> None:
    trees = [FORK, replace(CHAIN, execution=1)]
    for backend in ("segments", "reference"):
        model = TinyTransformer(backend=backend, dtype=torch.float32)
        figures = assert_exact(model, trees, plan(trees, tokens=100).packs, anchor="step")
        assert figures["gradient"] > 0  # float32 is not secretly something wider


FORK = make_tree([-1, 0, 1, 1, 2, 2], [4, 3, 2, 3, 4, 3], [False, True, False, True, True, True], seed=3)
CHAIN = make_tree([-1, 0, 1, 2], [3, 2, 2, 3], [False, True, False, True], seed=4)


def _change(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Pack], Pack]:
    return lambda pack: replace(pack, **{name: change(getattr(pack, name))})


def _siblings_see_each_other(pack: Pack) -> Pack:
    table = pack.segments
    parent_S = np.where(table.parent_S >= 0, np.arange(len(table.parent_S)) - 1, -1).astype(np.int32)
    return replace(pack, segments=SegmentTable(start_S=table.start_S, end_S=table.end_S, parent_S=parent_S))


def _prefix_hidden(pack: Pack) -> Pack:
    parent_S = pack.segments.parent_S.copy()
    parent_S[-1] = -1
    return replace(pack, segments=replace(pack.segments, parent_S=parent_S))


def _nudge(array: np.ndarray, by: float) -> np.ndarray:
    out = array.copy()
    out[-2] += by  # the last row of all predicts nothing
    return out


FAULTS = {
    "mask: siblings visible": _siblings_see_each_other,
    "mask: prefix hidden": _prefix_hidden,
    "position: row number": _change("position_T", lambda x: np.arange(len(x))),
    "position: one off": _change("position_T", partial(_nudge, by=1)),
    "weight: one edge": _change("weight_E", partial(_nudge, by=1e-6)),
    "weight: halved": _change("weight_E", lambda x: x / 2),
    "source row: one late": _change("source_row_E", partial(_nudge, by=1)),
    "target: another id": _change("target_id_E", lambda x: (x + 1) % 13),
    "temperature: ignored": _change("temperature_E", np.ones_like),
    "advantage: another sign": _change("advantage_E", np.negative),
    "owner: one trajectory": _change("trajectory_E", np.zeros_like),
}


@pytest.mark.parametrize("backend", ["segments", "reference"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees(fault: str, backend: str) -> None:
    trees, model = [FORK], TinyTransformer(backend=backend)
    trees = with_old(model, trees, 0)
    (pack,) = plan(trees, tokens=100).packs
    assert_exact(model, trees, [pack], anchor="burst")
    broken = FAULTS[fault](pack)
    with pytest.raises((ExactnessError, ValueError)):
        assert_exact(model, trees, [broken], anchor="burst")


def test_the_check_sees_a_dropped_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from gyre_train.attn import segments

    whole = segments.calls_of

    def forgetful(table: SegmentTable, *arguments: object) -> tuple[segments.Call, ...]:
        calls = whole(table, *arguments)
        return calls[: max(1, len(calls) - 1)]

    model = TinyTransformer()
    (pack,) = plan([FORK], tokens=100).packs
    monkeypatch.setattr(segments, "calls_of", forgetful)
    with pytest.raises(ExactnessError, match="relative difference"):
        assert_exact(model, [FORK], [pack], anchor="step")


def test_the_check_refuses_nan_and_zeros() -> None:
    (pack,) = plan([FORK], tokens=100).packs
    flat = replace(FORK, trajectories=tuple(replace(t, advantage=0.0) for t in FORK.trajectories))
    unmoved = plan([flat], tokens=100).packs
    with pytest.raises(ExactnessError, match="zero everywhere"):
        assert_exact(TinyTransformer(), [flat], unmoved, anchor="step")
    model = TinyTransformer()
    with torch.no_grad():
        model.weights["norm"].fill_(float("nan"))
    with pytest.raises(ExactnessError, match="not finite"):
        assert_exact(model, [FORK], [pack], objective="sft")
