"""The loss by hand-written numbers: normalisers, shift and temperature, anchors, clip and cap."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gyre_data.errors import AlignmentError, DataError
from gyre_train.config import LossConfig
from gyre_train.edges import Edges, edges_of
from gyre_train.figures import total, values
from gyre_train.loss import (
    inert_settings,
    policy_loss,
    sequence_ratios,
    sequence_sums,
    sft_loss,
    step_scale,
)
from gyre_train.mismatch import mismatch
from gyre_train.pack import Pack, Piece, lay_out, node_values
from gyre_train.plan import plan
from gyre_train.tree_input import TrajectoryInput, TreeInput
from tests.support.tiny_transformer import TinyTransformer, edge_logprobs
from tests.support.tree_inputs import make_tree

CASES = Path(__file__).parents[1] / "data" / "cases"


def case(name: str) -> dict[str, Any]:
    return json.loads((CASES / f"{name}.json").read_text())


def flat(lengths: list[int], execution: int = 0, trained: list[bool] | None = None) -> TreeInput:
    """A prompt with one reply per trajectory, of the given lengths; untrained ones own nothing."""
    trained = trained or [True] * len(lengths)
    num = len(lengths)
    return TreeInput(
        execution=execution,
        parent_N=np.array([-1, *[0] * num], np.int32),
        ids=(np.zeros(2, np.int32), *(np.full(n, 1 + i, np.int32) for i, n in enumerate(lengths))),
        temperature_N=np.ones(num + 1),
        trajectories=tuple(
            TrajectoryInput(
                path_P=np.array([0, 1 + i], np.int32), owned_O=np.array([1 + i][: trained[i]], np.int32), advantage=1.0
            )
            for i in range(num)
        ),
        logp_behaviour=(None, *(np.full(n, -1.0) for n in lengths)),
    )


def micro_step(trees: list[TreeInput], pieces: list[Piece], token_loss: dict[int, float]) -> float:
    """SFT sum of one pack in which every token of node n loses token_loss[n]."""
    pack = lay_out(trees, pieces)
    logp_E = torch.tensor([-token_loss[int(n)] for n in pack.node_E], dtype=torch.float64)
    return float(sft_loss(edges_of(pack, dtype=torch.float64), logp_E).loss)


def pieces_of(tree: TreeInput, trajectories: tuple[int, ...], index: int = 0) -> Piece:
    return Piece(tree=index, trajectories=trajectories, owned=tuple(tree.trajectories[t].owned_O for t in trajectories))


@pytest.mark.parametrize("batches", ["micro_batches", "with_empty"])
@pytest.mark.parametrize("cut", [[(0,), (1,), (2,)], [(0, 1, 2)], [(2, 0), (1,)], [(1,), (), (0, 2)]])
def test_l01_no_cut_changes_the_mean(batches: str, cut: list[tuple[int, ...]]) -> None:
    given, expected = case("L01")["input"], case("L01")["expected"]
    batch = given[batches]
    tree = flat([b["tokens"] for b in batch])
    token_loss = {1 + i: b["loss_sum"] / max(b["tokens"], 1) for i, b in enumerate(batch)}
    cut = [*cut, tuple(range(3, len(batch)))]
    ranks = [cut[0 :: given["ranks"]], cut[1 :: given["ranks"]]]
    summed = sum(micro_step([tree], [pieces_of(tree, part)], token_loss) for rank in ranks for part in rank)
    assert summed * step_scale(1) == pytest.approx(expected["token_mean"])


def test_l02_an_untrained_sample_counts_for_nothing() -> None:
    given, expected = case("L02")["input"], case("L02")["expected"]
    trees = [
        flat([len(sample["mask"])], execution=e, trained=[bool(sample["mask"][0])])
        for e, sample in enumerate(given["samples"])
    ]
    made = plan(trees, tokens=100)
    assert made.num_executions == 1
    assert made.num_edges == expected["denominator"]
    pieces = [pieces_of(tree, (0,), index) for index, tree in enumerate(trees)]
    loss = micro_step(trees, pieces, {1: 1.0})
    assert loss * step_scale(made.num_executions) == pytest.approx(expected["token_mean"])


@pytest.mark.parametrize("objective", ["sft", "rl"])
def test_l02_nothing_trained_is_a_zero_gradient(objective: str) -> None:
    tree = flat([2], trained=[False])
    made = plan([tree], tokens=100)
    assert made.num_executions == step_scale(made.num_executions) == 0
    edges = edges_of(lay_out([tree], [pieces_of(tree, (0,))]), dtype=torch.float64)
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    logp_E = weight[:0] * 2
    result = sft_loss(edges, logp_E) if objective == "sft" else policy_loss(edges, logp_E)
    result.loss.backward()
    gradient = weight.grad * step_scale(made.num_executions)
    assert torch.equal(gradient, torch.zeros(3, dtype=torch.float64))
    assert all(math.isfinite(x) for x in values(result.figures).values())


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_l09_shift_and_temperature(temperature: float) -> None:
    given, expected = case("L09")["input"], case("L09")["expected"]
    ids, prompt = np.array(given["ids"], np.int32), given["prompt_len"]
    want = expected["logprob_T1" if temperature == 1.0 else "logprob_T0.5"]
    tree = TreeInput(
        execution=0,
        parent_N=np.array([-1, 0], np.int32),
        ids=(ids[:prompt], ids[prompt:]),
        temperature_N=np.array([1.0, temperature]),
        trajectories=(
            TrajectoryInput(path_P=np.array([0, 1], np.int32), owned_O=np.array([1], np.int32), advantage=1.0),
        ),
        logp_behaviour=(None, np.array(want)),
    )
    (pack,) = plan([tree], tokens=100).packs
    np.testing.assert_array_equal(pack.logit_row_U, [int(row) for row in given["logits_at"]])
    edges = edges_of(pack, anchor="behaviour", dtype=torch.float64)
    # The case has two words: the target (here word 1) and one other (word 0).
    pack = replace(pack, target_id_E=np.ones_like(pack.target_id_E))
    logits_UV = torch.tensor(
        [[at["other"], at[str(ids[int(row) + 1])]] for row, at in given["logits_at"].items()], dtype=torch.float64
    )
    logp_E = edge_logprobs(logits_UV, pack)
    np.testing.assert_allclose(logp_E, want, atol=1e-9)
    (ratio,) = sequence_ratios([sequence_sums(edges, logp_E)]).ratio_J
    assert float(ratio) == pytest.approx(1.0, abs=1e-8)


def two_tokens(old: list[float] | None, behaviour: list[float], advantage: float) -> Edges:
    zero = torch.zeros(2, dtype=torch.int64)
    return Edges(
        sequence_E=zero + 4,
        sequence_tokens_E=zero + 2,
        advantage_E=torch.full((2,), advantage, dtype=torch.float64),
        weight_E=torch.full((2,), 0.5, dtype=torch.float64),
        logp_behaviour_E=torch.tensor(behaviour, dtype=torch.float64),
        logp_old_E=None if old is None else torch.tensor(old, dtype=torch.float64),
        logp_teacher_E=torch.full((2,), math.nan, dtype=torch.float64),
        logp_reference_E=None,
        role_E=zero,
        version_E=zero - 1,
    )


@pytest.mark.parametrize(
    ("shift", "advantage", "clipped"),
    [(0.01, 1.0, True), (0.01, -1.0, False), (-0.01, -1.0, True), (-0.01, 1.0, False), (0.002, 1.0, False)],
)
def test_the_clip_by_hand(shift: float, advantage: float, clipped: bool) -> None:
    logp_E = torch.tensor([-1.0 + 2 * shift, -2.0], dtype=torch.float64, requires_grad=True)  # mean log-ratio = shift
    result = policy_loss(two_tokens([-1.0, -2.0], [-1.0, -2.0], advantage), logp_E)
    result.loss.backward()
    s = math.exp(shift)
    value = min(max(s, 0.995), 1.005) if clipped else s
    assert float(result.loss.detach()) == pytest.approx(-value * advantage)
    want = 0.0 if clipped else -0.5 * s * advantage
    np.testing.assert_allclose(logp_E.grad, [want, want], atol=1e-15)
    assert values(result.figures)["clip_fraction"] == float(clipped)


def test_the_cap_by_hand() -> None:
    logp_E = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    result = policy_loss(two_tokens(None, [-4.0, -1.5], 2.0), logp_E)
    result.loss.backward()
    weights = [5.0, math.exp(0.5)]
    assert float(result.loss.detach()) == pytest.approx(-sum(weights))
    np.testing.assert_allclose(logp_E.grad, [-w for w in weights])
    means = values(result.figures)
    assert (means["cap_fraction"], means["clip_fraction"], means["ratio"]) == (0.5, 0.0, 1.0)
    gaps = values(mismatch(two_tokens(None, [-4.0, -1.5], 2.0), logp_E.detach(), version=0))
    assert gaps == {"mismatch_mean": (3.0 + 0.5) / 2, "mismatch_max": 3.0, "mismatch_main": (3.0 + 0.5) / 2}


def test_anchors_choose_logp_old() -> None:
    tree = make_tree([-1, 0], [3, 2], [False, True])
    (pack,) = plan([tree], tokens=10).packs
    assert edges_of(pack, anchor="burst").logp_old_E is None
    assert edges_of(pack, anchor="step").logp_old_E is None
    recorded = torch.tensor(pack.logp_behaviour_E)
    assert torch.equal(edges_of(pack, anchor="behaviour", dtype=torch.float64).logp_old_E, recorded)
    held = replace(pack, logp_old_E=np.array([-1.0, -2.0]))
    assert edges_of(held, anchor="burst").logp_old_E.numpy() == pytest.approx([-1.0, -2.0])


def test_inert_settings_are_named() -> None:
    assert "clip is inert" in inert_settings("burst", 1)[0]
    assert "clip is inert" in inert_settings("step", 4)[0]
    assert "cap is inert" in inert_settings("behaviour", 4)[0]
    assert inert_settings("burst", 2) == ()


def test_two_updates_on_one_burst_reach_clip_and_cap() -> None:
    """K = 2 with the burst anchor: the first step has ratio 1, the second is clipped, and the cap acts in both."""
    model = TinyTransformer()
    trees = [
        make_tree([-1, 0, 0], [3, 4, 5], [False, True, True], execution=e, advantages=[a, a], seed=e)
        for e, a in enumerate([1.0, -1.0])
    ]
    with torch.no_grad():
        packs = plan(trees, tokens=100).packs
        at_start = node_values(trees, packs, [model.edge_logprobs(pack).numpy() for pack in packs])
    # The engine that sampled disagreed by more than log 5 on each reply's first token.
    trees = [
        replace(tree, logp_behaviour=tuple(None if x is None else x - 2.0 * (np.arange(len(x)) == 0) for x in logp))
        for tree, logp in zip(trees, at_start, strict=True)
    ]
    optimiser = torch.optim.SGD(model.weights.values(), lr=0.05)
    seen = []
    for update in range(2):
        if update:
            trees = [replace(tree, logp_old=old) for tree, old in zip(trees, at_start, strict=True)]
        made = plan(trees, tokens=13)
        assert len(made.packs) == 2
        optimiser.zero_grad()
        figures = {}
        for pack in made.packs:
            result = policy_loss(edges_of(pack, anchor="burst", dtype=model.dtype), model.edge_logprobs(pack))
            result.loss.backward()
            figures = total(figures, result.figures)
        for weight in model.weights.values():
            weight.grad *= step_scale(made.num_executions)
        optimiser.step()
        seen.append(values(figures))
    assert seen[0]["clip_fraction"] == 0.0
    assert seen[0]["ratio"] == 1.0
    assert seen[1]["clip_fraction"] > 0
    assert seen[0]["cap_fraction"] > 0
    assert seen[1]["cap_fraction"] > 0


def test_a_trajectory_in_pieces_needs_the_first_phase() -> None:
    tree = make_tree([-1, 0, 1, 2], [2, 2, 1, 3], [False, True, False, True])
    parts = [lay_out([tree], [Piece(tree=0, trajectories=(0,), owned=(np.array([n]),))]) for n in (1, 3)]
    logp = [torch.full((pack.num_edges,), -1.0, dtype=torch.float64) for pack in parts]
    edges = [edges_of(pack, anchor="behaviour", dtype=torch.float64) for pack in parts]
    with pytest.raises(DataError, match="wanted all 5 owned tokens of sequence 0, got 2; sum sequence_sums"):
        policy_loss(edges[0], logp[0])
    ratios = sequence_ratios([sequence_sums(e, x) for e, x in zip(edges, logp, strict=True)])
    want = math.exp(np.mean(-1.0 - np.concatenate([tree.logp_behaviour[n] for n in (1, 3)])))
    assert float(ratios.ratio_J) == pytest.approx(want)
    parts_of = [policy_loss(e, x, ratios).figures for e, x in zip(edges, logp, strict=True)]
    assert total(*parts_of)["ratio"].count == 5
    with pytest.raises(AlignmentError, match="wanted a ratio for every sequence; pass"):
        policy_loss(replace(edges[0], sequence_E=edges[0].sequence_E + 1), logp[0], ratios)


def _one_pack() -> tuple[Pack, Edges]:
    (pack,) = plan([make_tree([-1, 0], [3, 2], [False, True])], tokens=10).packs
    return pack, edges_of(pack, anchor="burst")


def test_missing_values_are_refused_not_guessed() -> None:
    pack, edges = _one_pack()
    with pytest.raises(DataError, match=r"recorded log-probability for every owned token, 2 .* set loss\.kind = sft"):
        policy_loss(replace(edges, logp_behaviour_E=edges.logp_behaviour_E * math.nan), torch.zeros(2))
    with pytest.raises(DataError, match="wanted logp_old for every edge, 1 are missing"):
        policy_loss(replace(edges, logp_old_E=torch.tensor([-1.0, math.nan])), torch.zeros(2))
    with pytest.raises(AlignmentError, match=r"one per edge, got \(3,\)"):
        sft_loss(edges, torch.zeros(3))
    assert pack.logp_old_E is None


@pytest.mark.parametrize(
    ("step", "advantage", "clipped"), [(0.3, 1.0, True), (0.3, -1.0, False), (-0.3, -1.0, True), (0.1, 1.0, False)]
)
def test_the_clip_of_tokens_by_hand(step: float, advantage: float, clipped: bool) -> None:
    """PPO: each token has a ratio of its own, so the second, unmoved token keeps its gradient."""
    logp_E = torch.tensor([-1.0 + step, -2.0], dtype=torch.float64, requires_grad=True)
    edges = two_tokens([-1.0, -2.0], [-1.0, -2.0], advantage)
    result = policy_loss(edges, logp_E, settings=LossConfig(kind="token"))
    result.loss.backward()
    ratio = min(max(math.exp(step), 0.8), 1.2) if clipped else math.exp(step)
    assert float(result.loss.detach()) == pytest.approx(-0.5 * advantage * (ratio + 1))
    want = 0.0 if clipped else -0.5 * math.exp(step) * advantage
    np.testing.assert_allclose(logp_E.grad, [want, -0.5 * advantage], atol=1e-15)


def test_kl_and_teacher_by_hand() -> None:
    logp_E = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    edges = replace(
        two_tokens(None, [-1.0, -2.0], 3.0),
        logp_teacher_E=torch.tensor([-0.5, -2.25], dtype=torch.float64),
        logp_reference_E=torch.tensor([-1.5, -1.0], dtype=torch.float64),
    )
    settings = LossConfig(advantage=0.5, teacher=2.0, kl=0.1)
    result = policy_loss(edges, logp_E, settings=settings)
    result.loss.backward()
    advantages = [1.5 + 2 * 0.5, 1.5 - 2 * 0.25]
    kl = [math.exp(x) - x - 1 for x in (-0.5, 1.0)]
    assert float(result.loss.detach()) == pytest.approx(-0.5 * sum(advantages) + 0.1 * 0.5 * sum(kl))
    slope = [1 - math.exp(x) for x in (-0.5, 1.0)]
    want = [-0.5 * a + 0.1 * 0.5 * k for a, k in zip(advantages, slope, strict=True)]
    np.testing.assert_allclose(logp_E.grad, want, atol=1e-15)
    figures = values(result.figures)
    assert figures["kl"] == pytest.approx(sum(kl) / 2)
    assert figures["teacher_gap"] == pytest.approx(0.125)
    with pytest.raises(DataError, match="wanted a recorded teacher log-probability for every owned token, 2 are"):
        policy_loss(two_tokens(None, [-1.0, -2.0], 3.0), logp_E, settings=settings)


def test_no_cap_means_no_weights() -> None:
    logp_E = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    result = policy_loss(two_tokens(None, [-4.0, -1.5], 2.0), logp_E, settings=LossConfig(cap=0.0))
    assert float(result.loss.detach()) == pytest.approx(-2.0)
    assert values(result.figures)["importance"] == 1.0


def test_mismatch_by_role_and_age() -> None:
    edges = replace(
        two_tokens(None, [-1.0, math.nan], 1.0),
        role_E=torch.tensor([2, 0]),
        version_E=torch.tensor([3, 0]),
    )
    logp_E = torch.tensor([-1.5, -2.0], dtype=torch.float64)
    want = {"mismatch_mean": 0.5, "mismatch_max": 0.5, "mismatch_sub_agent": 0.5}
    aged = {**want, "age_mean": 2.0, "age_max": 2.0}
    assert values(mismatch(edges, logp_E, version=5)) == {**aged, "mismatch_age_2": 0.5}
    aged = {**want, "age_mean": 27.0, "age_max": 27.0}
    assert values(mismatch(edges, logp_E, version=30)) == {**aged, "mismatch_age_8_up": 0.5}
    unknown = replace(edges, version_E=torch.tensor([-1, 0]))
    assert values(mismatch(unknown, logp_E, version=5)) == want
    assert mismatch(replace(edges, logp_behaviour_E=edges.logp_behaviour_E * math.nan), logp_E, version=5) == {}
