"""Mixture of experts against transformers and against a dense reference: routing, its replay, recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from gyre_train.megatron.layers import TreeRouter
from gyre_train.megatron.model import build_model, edge_logprobs
from gyre_train.megatron.parallel import groups
from gyre_train.pack import Pack
from gyre_train.plan import plan
from gyre_train.tree_input import TreeInput
from tests.support.exactness import ExactnessError, assert_exact
from tests.support.megatron_folder import FolderModel, RankModel
from tests.support.tree_inputs import VOCAB, forests, make_tree

LAYERS, EXPERTS, TOP_K = 3, 5, 2
DENSE = 1
"""The layer without experts."""


@pytest.fixture(autouse=True, scope="module")
def _one_rank() -> Iterator[None]:
    with groups():
        yield


def hf_folder(root: Path, norm: bool) -> Path:
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=VOCAB, hidden_size=16, intermediate_size=24, moe_intermediate_size=12,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=norm, num_hidden_layers=LAYERS,
        mlp_only_layers=[DENSE], num_attention_heads=4, num_key_value_heads=2, head_dim=4, max_position_embeddings=64,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + ("norm" in name))
    model.save_pretrained(root / f"norm-{norm}")
    return root / f"norm-{norm}"


@pytest.fixture(scope="module", params=[True, False], ids=["norm", "plain"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("moe"), request.param)


def tree_of(seed: int = 5) -> TreeInput:
    parents, lengths = [-1, 0, 1, 2, 1, 4, 0, 6, -1, 8], [4, 3, 2, 3, 0, 2, 3, 4, 3, 2]
    return make_tree(parents, lengths, [node % 2 == 1 for node in range(10)], execution=3, seed=seed)


def routed(tree: TreeInput, seed: int = 0, share: float = 1.0) -> TreeInput:
    """Any experts for a share of the tokens of all nodes; what is recorded of the dense layer is noise."""
    rng = np.random.default_rng(seed)
    out = []
    for ids in tree.ids:
        experts = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int16), (len(ids), LAYERS, 1)), axis=-1)[..., :TOP_K]
        experts[rng.random(len(ids)) >= share] = -1
        experts[:, DENSE] = 99
        out.append(experts)
    return dataclasses.replace(tree, routes=tuple(out))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_logprobs_and_gradients_equal_transformers(folder: Path, dtype: torch.dtype) -> None:
    ours = FolderModel(folder, dtype, "segments")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    (pack,) = plan([make_tree([-1, 0, 1, 2], [4, 9, 5, 9], [False, True, False, True], execution=0)], tokens=99).packs
    logp_E = ours.edge_logprobs(pack)
    logits = theirs(torch.from_numpy(pack.ids_T)[None]).logits[0, pack.source_row_E]
    scaled = logits / torch.from_numpy(pack.temperature_E)[:, None].to(dtype)
    wanted_E = scaled.log_softmax(-1).gather(1, torch.from_numpy(pack.target_id_E)[:, None])[:, 0]
    # transformers rounds router probabilities and norms to float32 whatever the dtype
    assert (logp_E - wanted_E).abs().max() < 1e-5
    ours.zero_grad()
    logp_E.sum().backward()
    wanted_E.sum().backward()
    found = ours.gradients()
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        if "experts" in name:
            continue
        assert (found[name] - parameter.grad).abs().max() < 1e-4 * parameter.grad.abs().max(), name
    stem = "model.layers.0.mlp.experts."
    experts = theirs.get_parameter(stem + "gate_up_proj").grad, theirs.get_parameter(stem + "down_proj").grad
    for e, (gate_up, down) in enumerate(zip(*experts, strict=True)):
        assert down.abs().max() > 0
        mine = torch.cat([found[f"{stem}{e}.gate_proj.weight"], found[f"{stem}{e}.up_proj.weight"]])
        for got, wanted in ((mine, gate_up), (found[f"{stem}{e}.down_proj.weight"], down)):
            assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def packs_of(trees: list[TreeInput], tokens: int = 200) -> tuple[Pack, ...]:
    return plan(trees, tokens=tokens).packs


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees=forests(), slack=st.integers(0, 40), seed=st.integers(0, 99), share=st.sampled_from([1.0, 0.6]))
def test_replay_in_packed_trees_equals_rows(
    folder: Path, trees: list[TreeInput], slack: int, seed: int, share: float
) -> None:
    """Shared nodes carry one routing, whatever packs and replayed prefixes they land in."""
    model = FolderModel(folder, torch.float64, "segments")
    trees = [routed(tree, seed + number, share) for number, tree in enumerate(trees)]
    longest = max(int(t.num_tokens_N[t.needed_path(j)].sum()) for t in trees for j in range(len(t.trajectories)))
    assert_exact(model, trees, packs_of(trees, longest + slack), objective="sft", anchor="step")


def test_the_check_sees_routes_of_another_node(folder: Path) -> None:
    model, tree = FolderModel(folder, torch.float64, "segments"), routed(tree_of())
    (pack,) = packs_of([tree])
    assert pack.routes_TLK is not None
    assert_exact(model, [tree], [pack])
    with pytest.raises(ExactnessError):
        assert_exact(model, [tree], [dataclasses.replace(pack, routes_TLK=np.roll(pack.routes_TLK, 1, axis=0))])


def own_routes(model: RankModel, pack: Pack) -> np.ndarray:
    """What the model's own routers choose for the rows of a pack."""
    found = np.zeros((pack.num_tokens, LAYERS, TOP_K), np.int16)

    def keep(router: TreeRouter, _: object, out: tuple[torch.Tensor, torch.Tensor]) -> None:
        found[:, router.layer_number - 1] = out[1].nonzero()[:, 1].reshape(-1, TOP_K).numpy()

    routers = [m for m in model.model.modules() if isinstance(m, TreeRouter)]
    handles = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        model.edge_logprobs(pack)
    for handle in handles:
        handle.remove()
    return found


def test_replay_of_its_own_routes_changes_nothing_and_of_others_does(folder: Path) -> None:
    model = FolderModel(folder, torch.float64, "segments")
    (pack,) = packs_of([tree_of()])
    own = dataclasses.replace(pack, routes_TLK=own_routes(model, pack))
    other = dataclasses.replace(pack, routes_TLK=packs_of([routed(tree_of())])[0].routes_TLK)
    seen = []
    for one in (pack, own, other):
        model.zero_grad()
        logp_E = model.edge_logprobs(one)
        logp_E.sum().backward()
        seen.append(model.gradients() | {"logp": logp_E.detach()})
    for name, value in seen[0].items():
        assert (seen[1][name] - value).abs().max() <= 1e-12 * value.abs().max(), name
    assert (seen[2]["logp"] - seen[0]["logp"]).abs().max() > 1e-2


def test_replay_equals_a_reference_written_by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' model, its router given a choice: y = sum_{i in S} g_i E_i(x), g from its own logits."""
    ours = FolderModel(folder, torch.float64, "segments")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    tree = make_tree([-1, 0, 1, 2], [4, 9, 5, 9], [False, True, False, True], execution=0)
    (pack,) = packs_of([routed(tree)])
    assert pack.routes_TLK is not None
    place = {id(layer.mlp.gate): i for i, layer in enumerate(theirs.model.layers) if i != DENSE}
    norm = theirs.config.norm_topk_prob

    def forward(gate: Qwen3MoeTopKRouter, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = torch.from_numpy(pack.routes_TLK[:, place[id(gate)]].astype(np.int64))
        logits = x.reshape(-1, x.shape[-1]) @ gate.weight.T
        share = logits.exp() / logits.exp().sum(-1, keepdim=True)
        chosen = torch.stack([share[t, ids[t]] for t in range(len(ids))])
        return logits, chosen / chosen.sum(-1, keepdim=True) if norm else chosen, ids

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", forward)
    logits = theirs(torch.from_numpy(pack.ids_T)[None]).logits[0, pack.source_row_E]
    scaled = logits / torch.from_numpy(pack.temperature_E)[:, None]
    wanted_E = scaled.log_softmax(-1).gather(1, torch.from_numpy(pack.target_id_E)[:, None])[:, 0]
    logp_E = ours.edge_logprobs(pack)
    assert (logp_E - wanted_E).abs().max() < 1e-5  # transformers' norms are float32
    ours.zero_grad()
    logp_E.sum().backward()
    wanted_E.sum().backward()
    gates = ours.gradients()
    for i in (0, 2):
        name = f"model.layers.{i}.mlp.gate.weight"
        wanted = theirs.get_parameter(name).grad
        assert wanted is not None
        assert wanted.abs().max() > 1e-3
        assert (gates[name] - wanted).abs().max() < 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("replayed", [False, True], ids=["routed", "replayed"])
def test_recomputation_changes_nothing(folder: Path, replayed: bool) -> None:
    """Two packs in flight before the first backward, as in a pipeline: each is recomputed with its own routes."""
    hf = AutoConfig.from_pretrained(folder)
    stored = FolderModel(folder, torch.float64, "segments")
    again = RankModel(build_model(hf, dtype=torch.float64, recompute=True), torch.float64, "segments")
    again.model.load_state_dict(stored.model.state_dict())
    trees = [routed(tree_of(seed), seed) if replayed else tree_of(seed) for seed in (1, 2)]
    packs = [*packs_of(trees[:1]), *packs_of(trees[1:])]
    seen, kept = [], []
    for model in (stored, again):
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logp = [edge_logprobs(model.wrapped, pack)[0] for pack in packs]
        kept.append(sum(sizes.values()))
        for logp_E in logp:
            logp_E.square().sum().backward()
        seen.append(model.gradients() | {f"logp {i}": x.detach() for i, x in enumerate(logp)})
    for name, value in seen[0].items():
        assert torch.equal(seen[1][name], value), name
    assert kept[1] < kept[0] / 2


def test_bfloat16_sums_in_float32_and_recomputes_the_same(folder: Path) -> None:
    hf = AutoConfig.from_pretrained(folder)
    stored = FolderModel(folder, torch.bfloat16, "segments")
    again = RankModel(build_model(hf, dtype=torch.bfloat16, recompute=True), torch.bfloat16, "segments")
    again.model.load_state_dict(stored.model.state_dict())
    packs = packs_of([routed(tree_of())])

    def summed(model: RankModel, micro_steps: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for _ in range(micro_steps):
            model.edge_logprobs(packs[0]).sum().backward()
        return {name: value.clone() for name, value in model.gradients().items()}

    once, thrice, recomputed = summed(stored, 1), summed(stored, 3), summed(again, 3)
    for name, value in thrice.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, 3 * once[name]), name  # three times a bfloat16 seldom is one
        assert torch.equal(recomputed[name], value), name
    assert any((value != value.bfloat16()).any() for value in thrice.values())
