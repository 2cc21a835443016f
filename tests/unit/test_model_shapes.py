"""The table of models against the sizes their makers publish, and configs read from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_data.errors import ConfigError
from gyre_data.model_shapes import MODELS, ModelShape, named_shape, shape_from_config, shape_of

# Parameter counts as the hub states them for the published weights.
EXACT = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480_154_875_392,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Coder-32B-Instruct": 32_763_876_352,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
}
# Total and active, in thousand millions, as their makers name them.
ROUNDED = {
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen/Qwen3-235B-A22B": (235, 22),
    "openai/gpt-oss-20b": (20.9, 3.6),
    "openai/gpt-oss-120b": (116.8, 5.1),
    "zai-org/GLM-4.5-Air": (106, 12),
    "zai-org/GLM-4.5": (355, 32),
    "deepseek-ai/DeepSeek-V3": (671, 37),
}


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert MODELS[name].num_parameters() == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_mixtures_have_their_published_size(name: str) -> None:
    total, active = ROUNDED[name]
    shape = MODELS[name]
    assert shape.num_parameters() / 1e9 == pytest.approx(total, rel=0.02)
    # Some makers leave the embedding, or embedding and output layer, out of what is active.
    without = shape.num_parameters(active=True) - 2 * shape.vocab * shape.hidden
    assert without / 1e9 * 0.97 <= active <= shape.num_parameters(active=True) / 1e9 * 1.05


def test_a_model_is_found_by_name_folder_or_file(tmp_path: Path) -> None:
    assert shape_of("qwen3-8b") == shape_of("Qwen/Qwen3-8B") == MODELS["Qwen/Qwen3-8B"]
    config = {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    assert named_shape("qwen3-8b")[0] == "Qwen/Qwen3-8B"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(tmp_path) == shape_of(tmp_path / "config.json") == MODELS["Qwen/Qwen3-8B"]
    with pytest.raises(ConfigError, match="nearest: Qwen/Qwen3-8B"):
        shape_of("Qwen/Qwen3-9B")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"'num_attention_heads' is missing.*give a causal model's folder"):
        shape_of(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="mend the file"):
        shape_of(tmp_path)


def test_configs_of_mixtures() -> None:
    base = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 100}
    qwen = base | {"model_type": "qwen3_moe", "intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}
    found = shape_from_config(qwen | {"moe_intermediate_size": 32, "mlp_only_layers": [0], "decoder_sparse_step": 1})
    assert (found.num_experts, found.experts_per_token, found.expert_ffn, found.dense_layers) == (8, 2, 32, 1)
    glm = base | {"intermediate_size": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    found = shape_from_config(glm | {"n_shared_experts": 2, "first_k_dense_replace": 3})
    assert (found.shared_ffn, found.dense_layers) == (64, 3)
    kinds = ["sliding_attention", "full_attention"] * 2
    oss = base | {"intermediate_size": 48, "num_local_experts": 8, "experts_per_token": 2, "layer_types": kinds}
    found = shape_from_config({"text_config": oss | {"sliding_window": 16}})
    assert (found.expert_ffn, found.window, found.window_layers, found.head_dim) == (48, 16, 2, 16)
    with pytest.raises(ConfigError, match="wanted attention layers, got linear_attention"):
        shape_from_config(qwen | {"layer_types": ["linear_attention", "full_attention"]})


def test_latent_attention_reads_its_own_dimensions() -> None:
    config = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280}
    config |= {"intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= {"qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8}
    config |= {"moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3}
    assert shape_from_config(config) == MODELS["deepseek-ai/DeepSeek-V3"]


def test_a_dense_layer_by_hand() -> None:
    shape = ModelShape(num_layers=2, hidden=8, ffn=16, num_heads=4, num_kv_heads=2, head_dim=2, vocab=11)
    assert shape.linear_weights() == 2 * (8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 16)
    assert shape.num_parameters() == shape.linear_weights() + 2 * 11 * 8 + 2 * 2 * 8 + 8
