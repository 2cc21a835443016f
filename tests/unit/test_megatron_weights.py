"""Hugging Face weights in and out: exact round trip, and the same logits as transformers, per architecture."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from gyre_data.errors import ConfigError, CorruptError
from gyre_train.megatron import weights
from gyre_train.megatron.architecture import check_supported
from gyre_train.megatron.model import build_model, edge_logprobs, full_logits
from gyre_train.megatron.parallel import groups
from gyre_train.megatron.weights import load_hf, save_hf
from gyre_train.segment_table import SegmentTable

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EXPERTS = {
    "model_type": "qwen3_moe", "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
}  # fmt: skip
VARIANTS = {
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3-rope": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 24},
    "moe": EXPERTS | {"norm_topk_prob": True},
    "moe-plain": EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]},
}


@pytest.fixture(autouse=True, scope="module")
def _one_rank() -> Iterator[None]:
    with groups():
        yield


def one_row(num_tokens: int) -> SegmentTable:
    start = np.zeros(1, np.int32)
    return SegmentTable(start_S=start, end_S=start + np.int32(num_tokens), parent_S=start - np.int32(1))


def hf_model(folder: Path, variant: str = "qwen3", **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    settings |= VARIANTS[variant] | changes
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # no gain of exactly 1, no bias of exactly 0
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_and_the_round_trip_is_exact(variant: str, tmp_path: Path) -> None:
    reference = hf_model(tmp_path / "hf", variant)
    model = build_model(AutoConfig.from_pretrained(tmp_path / "hf"))
    load_hf(model, tmp_path / "hf")
    ids = np.random.default_rng(0).integers(0, 97, 40)
    logits = full_logits(model, ids, np.arange(40), one_row(40), backend="reference")
    with torch.no_grad():
        wanted = reference(torch.from_numpy(ids)[None]).logits[0]
    assert logits.shape == wanted.shape
    assert (logits - wanted).abs().max() < 1e-4
    save_hf(model, tmp_path / "out", tmp_path / "hf")
    before, after = load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert torch.equal(before[name], after[name]), name
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(torch.from_numpy(ids)[None]).logits[0], wanted)


def test_large_models_are_written_as_an_indexed_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = hf_model(tmp_path / "hf")
    model = build_model(AutoConfig.from_pretrained(tmp_path / "hf"), dtype=torch.bfloat16)
    load_hf(model, tmp_path / "hf")
    monkeypatch.setattr(weights, "_MAX_FILE_BYTES", 10_000)
    save_hf(model, tmp_path / "out", tmp_path / "hf")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for name, value in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16()), name
    load_hf(model, tmp_path / "out")


def test_edges_have_their_own_temperature_and_slices_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model(tmp_path / "hf")
    model = build_model(AutoConfig.from_pretrained(tmp_path / "hf"), dtype=torch.float64)
    load_hf(model, tmp_path / "hf")
    rng = np.random.default_rng(1)
    pack = SimpleNamespace(
        ids_T=rng.integers(0, 97, 20), position_T=np.arange(20), segments=one_row(20),
        source_row_E=np.array([3, 3, 9, 18]), target_id_E=np.array([96, 5, 0, 41]),
        temperature_E=np.array([1.0, 0.5, 2.0, 0.7], np.float32), routes_TLK=None,
    )  # fmt: skip
    logits = full_logits(model, pack.ids_T, pack.position_T, pack.segments, backend="reference")
    scaled = logits[pack.source_row_E] / torch.from_numpy(pack.temperature_E)[:, None]
    wanted = scaled.log_softmax(-1)[torch.arange(4), torch.from_numpy(pack.target_id_E)]
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    grads = []
    parameters = dict(model.named_parameters())
    for chunk, logp in ((None, wanted), (4096, None), (3, None)):
        if chunk:
            monkeypatch.setattr("gyre_train.megatron.model._EDGE_CHUNK", chunk)
            logp, _ = edge_logprobs(model, pack, backend="reference")
        assert (logp - wanted).abs().max() < 1e-12
        model.zero_grad()
        (logp * weight).sum().backward(retain_graph=True)
        grads.append({name: p.grad.clone() for name, p in parameters.items()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        for other in grads[1:]:
            assert (other[name] - grad).abs().max() <= 1e-12 * grad.abs().max(), name


def test_models_that_cannot_be_trained_exactly_are_refused(tmp_path: Path) -> None:
    hf_model(tmp_path / "hf", "qwen2", use_sliding_window=True)
    with pytest.raises(ConfigError, match=r"sliding windows.*use another"):
        build_model(AutoConfig.from_pretrained(tmp_path / "hf"))
    with pytest.raises(ConfigError, match=r"llama, qwen2, qwen3, qwen3_moe.*gpt2"):
        build_model(AutoConfig.for_model("gpt2"))


def test_layouts_that_do_not_divide_the_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.ep = 2 has no effect on qwen3, a dense model; remove it"):
        check_supported(AutoConfig.for_model("qwen3"), tp=2, pp=1, ep=2)
    for experts, columns in ((7, 16), (8, 15)):
        hf = AutoConfig.for_model("qwen3_moe", num_experts=experts, moe_intermediate_size=columns)
        with pytest.raises(ConfigError, match=rf"ep to divide {experts} experts and tp / ep their {columns} columns"):
            check_supported(hf, tp=4, pp=1, ep=2)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    hf_model(tmp_path / "hf", "llama", num_hidden_layers=1)
    model = build_model(AutoConfig.from_pretrained(tmp_path / "hf", num_hidden_layers=2))
    with pytest.raises(CorruptError, match=r"layers\.1.input_layernorm.weight is missing"):
        load_hf(model, tmp_path / "hf")
    wide = build_model(AutoConfig.from_pretrained(tmp_path / "hf", vocab_size=101))
    with pytest.raises(CorruptError, match=r"embed_tokens.weight: wanted shape \(101, 32\)"):
        load_hf(wide, tmp_path / "hf")
