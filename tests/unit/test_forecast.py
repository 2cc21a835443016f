"""The forecast against the trainer's own plan of the same trees, and its formulas by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gyre_data.admission import admit
from gyre_data.errors import ConfigError
from gyre_data.forecast import activation_bytes, causal_pairs, forecast, training_flops
from gyre_data.model_shapes import MODELS, ModelShape
from gyre_data.run_stats import stats
from gyre_train.plan import flops, plan
from gyre_train.tree_input import TrajectoryInput, TreeInput
from tests.support.busy_case import busy_case
from tests.support.forest import Forest
from tests.support.published_case import published_case

MODEL = "Qwen/Qwen3-8B"
GPT = ModelShape(num_layers=3, hidden=64, ffn=256, num_heads=4, num_kv_heads=4, head_dim=16, vocab=99, gated=False)


def trainer_trees(run: Forest, j_max: int | None) -> list[TreeInput]:
    admission = admit(run, j_max=j_max, need_score=False, need_logprobs=True, include_running=True)
    trees = []
    for number, e in enumerate(admission.executions):
        kept = [
            TrajectoryInput(path_P=np.array(t.path, np.int32), owned_O=np.array(t.owned, np.int32), advantage=0.0)
            for t in e.trajectories
        ]
        ids = tuple(e.tree.ids(i) for i in range(len(e.tree)))
        parents, ones = e.tree.parent_N, np.ones(len(ids))
        trees.append(
            TreeInput(
                execution=number, parent_N=parents, ids=ids, temperature_N=ones, trajectories=tuple(kept),
                logp_behaviour=tuple(e.tree.logprobs(i) for i in range(len(ids))),
            )
        )  # fmt: skip
    return trees


def siblings() -> Forest:
    """Two sampled answers to one prompt, and a path whose last turn is not trainable."""
    run = Forest()
    e = run.execution(group="g")
    a = e.call(new=[("system", 9), ("user", 3)], output=5)
    e.retry(a, output=6)
    e.call(after=a, new=[("tool", 7)], output=4, temperature=0.0)
    return run


@pytest.mark.parametrize("j_max", [1, 3, None])
@pytest.mark.parametrize("made", [published_case, busy_case, siblings])
def test_it_is_what_the_trainer_would_lay_out(made: object, j_max: int | None) -> None:
    run: Forest = made()  # type: ignore[operator]
    found = forecast(run, MODEL).cap(j_max)
    trees = trainer_trees(run, j_max)
    tree, rows = (plan(trees, tokens=10**9, sharing=sharing) for sharing in ("tree", "rows"))
    assert (found.tree_tokens, found.rows_tokens) == (tree.num_packed_tokens, rows.num_packed_tokens)
    assert (found.tree_flops, found.rows_flops) == (flops(tree, MODELS[MODEL]), flops(rows, MODELS[MODEL]))
    assert found.trained_tokens == tree.num_edges
    assert found.trajectories == sum(len(one.trajectories) for one in trees)


def test_fewer_trajectories_never_cost_more() -> None:
    found = forecast(published_case(), MODEL)
    caps = found.caps
    assert [cap.j_max for cap in caps] == [1, 2, 3, 4, 5, None]
    for name in ("tree_tokens", "rows_tokens", "tree_flops", "rows_flops", "trained_tokens", "tree_bytes"):
        costs = [getattr(cap, name) for cap in caps]
        assert costs == sorted(costs)
    assert all(cap.tree_flops <= cap.rows_flops for cap in caps)
    assert (caps[0].flops_ratio, caps[0].worth_packing) == (1.0, False)
    assert caps[-1].flops_ratio == pytest.approx(1.33, abs=0.05)
    assert caps[-1].worth_packing is True
    assert found.cap(None) == caps[-1]
    with pytest.raises(ConfigError, match="J_max 7, it was made for 1, 2, 3, 4, 5, None; name it in caps"):
        found.cap(7)
    seven = stats(published_case(), j_max=7, model=MODEL).forecast
    assert seven is not None
    assert [cap.j_max for cap in seven.caps] == [1, 2, 3, 4, 5, 7, None]
    assert caps[4].trajectories < seven.cap(7).trajectories < caps[-1].trajectories


def test_tokens_that_no_policy_sampled_are_forecast_as_if_one_had() -> None:
    run = Forest()
    e = run.execution(group="g")
    e.call(after=e.call(logprobs=False), new=[("tool", 5)], output=2, logprobs=False)
    found = forecast(run, MODEL)
    assert (found.basis, found.executions, found.cap(5).trained_tokens) == ("eligible", 1, 6)
    nothing = forecast(Forest(), MODEL)
    assert (nothing.executions, nothing.cap(5).flops_ratio, nothing.cap(5).worth_packing) == (0, None, None)
    assert nothing.basis == "trainable"


def test_flops_of_a_long_dense_row_are_six_per_weight_and_token() -> None:
    shape = MODELS[MODEL]
    tokens = 64
    found = training_flops(shape, tokens=tokens, pairs=0, logit_rows=tokens)
    weights = shape.num_parameters() - shape.vocab * shape.hidden  # the embedding is looked up, not multiplied
    assert found == pytest.approx(6 * weights * tokens, rel=1e-3)


def test_a_mixture_costs_its_active_part() -> None:
    shape = MODELS["Qwen/Qwen3-30B-A3B"]
    found = training_flops(shape, tokens=1, pairs=0, logit_rows=0)
    assert found == pytest.approx(6 * (shape.num_parameters(active=True) - 2 * shape.vocab * shape.hidden), rel=1e-3)


def test_pairs() -> None:
    alive = np.tril(np.ones((7, 7), int))
    assert causal_pairs(7) == alive.sum()
    assert causal_pairs(np.array([7, 2]), 3).tolist() == [np.triu(alive, -2).sum(), 3]
    windowed = ModelShape(
        num_layers=2, hidden=8, ffn=8, num_heads=2, num_kv_heads=2, head_dim=4, vocab=9, window=3, window_layers=1
    )
    dense = training_flops(windowed, tokens=0, pairs=28, logit_rows=0, window_pairs=28)
    assert dense == 3 * 2 * 2 * 8 * 2 * 28
    assert training_flops(windowed, tokens=0, pairs=28, logit_rows=0, window_pairs=18) == dense * 46 // 56


def test_a_mixture_keeps_a_copy_of_the_input_per_expert() -> None:
    sizes = {"num_layers": 2, "hidden": 8, "ffn": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "vocab": 9}
    mixture = ModelShape(**sizes, num_experts=4, experts_per_token=2, expert_ffn=6, shared_ffn=5)
    inner = 3 * (2 * 6 + 5) + 2 * 8
    assert activation_bytes(mixture, 1, recompute=False) == 2 * 2 * (4 * 8 + 3 * 8 + inner)


def test_activations_are_the_published_34_h_without_the_two_dropout_masks() -> None:
    assert activation_bytes(GPT, 10, recompute=False) == 10 * GPT.num_layers * 32 * GPT.hidden
    assert activation_bytes(GPT, 10, recompute=True) == 10 * (GPT.num_layers * 2 + 32) * GPT.hidden
    logits = activation_bytes(GPT, 10, recompute=True, logit_rows=5) - activation_bytes(GPT, 10, recompute=True)
    assert logits == 5 * GPT.vocab * 10
