"""What a Hugging Face config says of the model that Megatron is asked to build, and what cannot be trained exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gyre_data.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ARCHITECTURES", "check_supported", "expert_settings", "head_dim", "inverse_frequencies", "is_sparse"]

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def head_dim(hf: PretrainedConfig) -> int:
    """Width of one attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def inverse_frequencies(hf: PretrainedConfig) -> torch.Tensor:
    """Rotary inverse frequencies [head_dim / 2] in float32."""
    rope, dim = hf.rope_parameters, head_dim(hf)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"rope_type: wanted default, linear or llama3, the model has {kind}; train another model")
    inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](hf, None)
    return inv_freq.float()


def is_sparse(hf: PretrainedConfig, layer: int) -> bool:
    """Whether this layer, numbered from 0 in the whole model, has experts; the rule of transformers' Qwen3-MoE."""
    if hf.model_type != "qwen3_moe" or not hf.num_experts or layer in (hf.mlp_only_layers or ()):
        return False
    return bool((layer + 1) % hf.decoder_sparse_step == 0)


def expert_settings(hf: PretrainedConfig) -> dict[str, Any]:
    """Megatron's settings of a mixture of experts; none for a dense model."""
    if hf.model_type != "qwen3_moe":
        return {}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }


def check_supported(hf: PretrainedConfig, *, tp: int, pp: int, ep: int) -> None:
    """Refuse another architecture, what Megatron has no place for, and layouts that do not divide the model."""
    if hf.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"model architecture: wanted one of {', '.join(ARCHITECTURES)}, the folder holds {hf.model_type}; "
            "use a model of one of these families"
        )
    unsupported = [
        name
        for name, present in {
            "sliding windows": getattr(hf, "use_sliding_window", False),
            "attention_bias": hf.model_type != "qwen2" and getattr(hf, "attention_bias", False),
            "mlp_bias": getattr(hf, "mlp_bias", False),
            f"hidden_act {hf.hidden_act}": hf.hidden_act != "silu",
        }.items()
        if present
    ]
    if unsupported:
        raise ConfigError(f"this model uses {', '.join(unsupported)}, which is not trained exactly here; use another")
    if hf.num_hidden_layers % pp:
        raise ConfigError(
            f"parallel.pp = {pp}: wanted a divisor of {hf.num_hidden_layers} layers; set another parallel.pp"
        )
    if hf.num_key_value_heads % tp or hf.num_attention_heads % tp or hf.intermediate_size % tp:
        raise ConfigError(
            f"parallel.tp = {tp}: wanted a divisor of {hf.num_key_value_heads} key-value heads, "
            f"{hf.num_attention_heads} heads and {hf.intermediate_size} MLP columns; set a smaller parallel.tp"
        )
    _check_experts(hf, tp, ep)


def _check_experts(hf: PretrainedConfig, tp: int, ep: int) -> None:
    if hf.model_type != "qwen3_moe":
        if ep > 1:
            raise ConfigError(f"parallel.ep = {ep} has no effect on {hf.model_type}, a dense model; remove it")
        return
    if hf.num_experts % ep or hf.moe_intermediate_size % (tp // ep):
        raise ConfigError(
            f"parallel.tp = {tp}, parallel.ep = {ep}: wanted ep to divide {hf.num_experts} experts and tp / ep their "
            f"{hf.moe_intermediate_size} columns; set another parallel.ep"
        )
