"""The forecast's activation bytes against what the trainer's model really keeps for its backward pass."""

from __future__ import annotations

import numpy as np
import torch
from transformers import AutoConfig

from gyre_data.forecast import activation_bytes
from gyre_data.model_shapes import ModelShape
from gyre_train.megatron.model import build_model, full_logits
from gyre_train.megatron.parallel import groups
from gyre_train.segment_table import SegmentTable

TOKENS = 64


def kept_bytes(num_layers: int) -> int:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=97, hidden_size=256, intermediate_size=768, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    model = build_model(config, dtype=torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    start = np.zeros(1, np.int32)
    row = SegmentTable(start_S=start, end_S=start + np.int32(TOKENS), parent_S=start - np.int32(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        full_logits(model, np.arange(TOKENS), np.arange(TOKENS), row, backend="segments")
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_unfused_layers_keep_about_twice_the_formula() -> None:
    """docs/stats.md says so: norms in float32, rotary and gating are not fused on CPU."""
    with groups():
        per_layer = (kept_bytes(3) - kept_bytes(1)) / 2
    shape = ModelShape(num_layers=1, hidden=256, ffn=768, num_heads=8, num_kv_heads=4, head_dim=32, vocab=97)
    assert 1.0 < per_layer / activation_bytes(shape, TOKENS, recompute=False) < 2.2
