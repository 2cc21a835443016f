"""Sizes of decoder models that their cost depends on: a small table of common open ones, or any Hugging Face config.

The table holds the numbers of the published config.json files, so that a forecast needs neither a download nor torch;
tests hold its parameter counts against the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

from .errors import ConfigError

__all__ = ["MODELS", "Latent", "ModelShape", "named_shape", "shape_from_config", "shape_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Multi-head latent attention: low-rank queries, keys and values (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder, dense or mixture of experts."""

    num_layers: int
    hidden: int
    ffn: int
    """Of a dense layer."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys, without the rotary part of latent attention."""
    vocab: int
    gated: bool = True
    tied: bool = False
    """Embedding and output layer share their weights."""
    qk_norm: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    """Routed experts per sparse layer; 0 is a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Of the experts that every token passes, added up."""
    dense_layers: int = 0
    """Layers of a mixture that are dense all the same."""
    window: int | None = None
    """Tokens that a sliding-window layer sees."""
    window_layers: int = 0
    latent: Latent | None = None

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's projections: q, k, v and o."""
        h, a = self.hidden, self.num_heads
        if self.latent is None:
            return h * self.head_dim * 2 * (a + self.num_kv_heads)
        low, wide = self.latent, self.head_dim + self.latent.rope_dim
        q = h * a * wide if low.q_rank is None else low.q_rank * (h + a * wide)
        return q + h * (low.kv_rank + low.rope_dim) + low.kv_rank * a * (self.head_dim + low.v_dim) + a * low.v_dim * h

    def feed_forward_weights(self, *, active: bool) -> int:
        """Weights of all feed-forward layers; `active` takes only those that one token passes."""
        each = self.hidden * (3 if self.gated else 2)
        if not self.num_experts:
            return self.num_layers * each * self.ffn
        experts = self.experts_per_token if active else self.num_experts
        sparse = each * (experts * self.expert_ffn + self.shared_ffn) + self.hidden * self.num_experts
        return self.dense_layers * each * self.ffn + (self.num_layers - self.dense_layers) * sparse

    def linear_weights(self) -> int:
        """Weights that every token is multiplied with, the output layer left out."""
        return self.num_layers * self.attention_weights + self.feed_forward_weights(active=True)

    def num_parameters(self, *, active: bool = False) -> int:
        """All parameters; `active` leaves out the experts that a token does not pass."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.qkv_bias:
            norms += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        if self.latent is not None:
            norms += self.latent.kv_rank + (self.latent.q_rank or 0)
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        layers = self.num_layers * (self.attention_weights + norms) + self.feed_forward_weights(active=active)
        return layers + embeddings + self.hidden


def _dense(layers: int, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> ModelShape:
    given = {"head_dim": 128, "vocab": 151936, "qk_norm": True} | more
    return ModelShape(num_layers=layers, hidden=hidden, ffn=ffn, num_heads=heads, num_kv_heads=kv, **given)


def _llama(layers: int, hidden: int, ffn: int, heads: int, **more: Any) -> ModelShape:
    return _dense(layers, hidden, ffn, heads, 8, **({"vocab": 128256, "qk_norm": False} | more))


def _qwen3_moe(layers: int, hidden: int, heads: int, kv: int, expert_ffn: int, experts: int) -> ModelShape:
    return _dense(
        layers, hidden, 3 * hidden, heads, kv, num_experts=experts, experts_per_token=8, expert_ffn=expert_ffn
    )


def _qwen25(layers: int, hidden: int, ffn: int, heads: int, kv: int, **more: Any) -> ModelShape:
    return _dense(layers, hidden, ffn, heads, kv, **({"vocab": 152064, "qk_norm": False, "qkv_bias": True} | more))


def _gpt_oss(layers: int, experts: int) -> ModelShape:
    return _dense(
        layers, 2880, 2880, 64, 8, head_dim=64, vocab=201088, qk_norm=False, qkv_bias=True, num_experts=experts,
        experts_per_token=4, expert_ffn=2880, window=128, window_layers=layers // 2,
    )  # fmt: skip


_QWEN3_30B = _qwen3_moe(48, 2048, 32, 4, 768, 128)

MODELS: dict[str, ModelShape] = {
    "Qwen/Qwen3-0.6B": _dense(28, 1024, 3072, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _dense(28, 2048, 6144, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _dense(36, 2560, 9728, 32, 8, tied=True),
    "Qwen/Qwen3-8B": _dense(36, 4096, 12288, 32, 8),
    "Qwen/Qwen3-14B": _dense(40, 5120, 17408, 40, 8),
    "Qwen/Qwen3-32B": _dense(64, 5120, 25600, 64, 8),
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 4, 1536, 128),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _QWEN3_30B,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _qwen3_moe(62, 6144, 96, 8, 2560, 160),
    "Qwen/Qwen2.5-7B-Instruct": _qwen25(28, 3584, 18944, 28, 4),
    "Qwen/Qwen2.5-Coder-32B-Instruct": _qwen25(64, 5120, 27648, 40, 8),
    "meta-llama/Llama-3.2-1B": _llama(16, 2048, 8192, 32, head_dim=64, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(28, 3072, 8192, 24, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 14336, 32),
    "meta-llama/Llama-3.3-70B-Instruct": _llama(80, 8192, 28672, 64),
    "openai/gpt-oss-20b": _gpt_oss(24, 32),
    "openai/gpt-oss-120b": _gpt_oss(36, 128),
    "zai-org/GLM-4.5-Air": _dense(
        46, 4096, 10944, 96, 8, vocab=151552, qk_norm=False, qkv_bias=True, num_experts=128, experts_per_token=8,
        expert_ffn=1408, shared_ffn=1408, dense_layers=1,
    ),
    "zai-org/GLM-4.5": _dense(
        92, 5120, 12288, 96, 8, vocab=151552, qkv_bias=True, num_experts=160, experts_per_token=8, expert_ffn=1536,
        shared_ffn=1536, dense_layers=3,
    ),
    "deepseek-ai/DeepSeek-V3": _dense(
        61, 7168, 18432, 128, 128, vocab=129280, qk_norm=False, num_experts=256, experts_per_token=8, expert_ffn=2048,
        shared_ffn=2048, dense_layers=3, latent=Latent(q_rank=1536, kv_rank=512, rope_dim=64, v_dim=128),
    ),
}  # fmt: skip
"""By the name of the repository on the hub."""


def shape_of(model: str | Path) -> ModelShape:
    """Sizes of a model of the table, by its name or the last part of it, or of a folder with config.json, or that file.

    Raises ConfigError that names the nearest known models.
    """
    return named_shape(model)[1]


def named_shape(model: str | Path) -> tuple[str, ModelShape]:
    """The model's full name, or the path of its folder or file, with its sizes; else as `shape_of`."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(
                f"{file}: wanted the JSON of a Hugging Face config, got {error}; mend the file"
            ) from error
        return str(path), shape_from_config(config, where=str(file))
    short = {name.rsplit("/", 1)[-1].lower(): name for name in MODELS}
    wanted = str(model).lower()
    name = next((name for name in MODELS if name.lower() == wanted), None) or short.get(wanted.rsplit("/", 1)[-1])
    if name is None:
        near = get_close_matches(wanted.rsplit("/", 1)[-1], short, n=3, cutoff=0.3)
        nearest = f"nearest: {', '.join(short[one] for one in near)}; " if near else ""
        raise ConfigError(
            f"wanted a model of the table or a folder with config.json, got {str(model)!r}; {nearest}"
            f"all of them:\n{_listed()}"
        )
    return name, MODELS[name]


def _listed() -> str:
    """The names of the table, a line for each maker."""
    by_maker = (", ".join(names) for _, names in groupby(MODELS, lambda name: name.partition("/")[0]))
    form = {"initial_indent": "  ", "subsequent_indent": "    ", "break_on_hyphens": False}
    return "\n".join(fill(names, 78, **form) for names in by_maker)  # type: ignore[arg-type]


def shape_from_config(config: Mapping[str, Any], *, where: str = "config.json") -> ModelShape:
    """Sizes from the values of a Hugging Face config.json; ConfigError for a model whose cost is not known."""
    hf = config.get("text_config") or config
    kinds = set(hf.get("layer_types") or ())
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"{where}: wanted attention layers, got {', '.join(strange)}: a forecast of these is not known, and a tree "
            "cannot be packed through a recurrent layer; choose another model"
        )
    try:
        heads, layers, hidden = hf["num_attention_heads"], hf["num_hidden_layers"], hf["hidden_size"]
        return ModelShape(
            num_layers=layers,
            hidden=hidden,
            ffn=hf["intermediate_size"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=_head_dim(hf, hidden // heads),
            vocab=hf["vocab_size"],
            tied=bool(hf.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            qk_norm=hf.get("use_qk_norm", hf.get("model_type") in ("qwen3", "qwen3_moe")),
            qkv_bias=bool(hf.get("attention_bias")) or hf.get("model_type") in ("qwen2", "qwen2_moe"),
            window=hf.get("sliding_window") if "sliding_attention" in kinds else None,
            window_layers=list(hf.get("layer_types") or ()).count("sliding_attention"),
            latent=_latent(hf),
            **_experts(hf, layers),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: wanted the config of a decoder, {error} is missing or no number; give a causal model's folder"
        ) from error


def _head_dim(hf: Mapping[str, Any], default: int) -> int:
    if hf.get("kv_lora_rank"):
        return int(hf["qk_nope_head_dim"])
    return int(hf.get("head_dim") or default)


def _latent(hf: Mapping[str, Any]) -> Latent | None:
    if not hf.get("kv_lora_rank"):
        return None
    return Latent(
        q_rank=hf.get("q_lora_rank"), kv_rank=hf["kv_lora_rank"], rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
    )  # fmt: skip


def _experts(hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    num_experts = next((int(hf[name]) for name in names if hf.get(name)), 0)
    if not num_experts:
        return {}
    expert_ffn = hf.get("moe_intermediate_size") or hf["intermediate_size"]
    shared = hf.get("shared_expert_intermediate_size") or expert_ffn * (hf.get("n_shared_experts") or 0)
    every = hf.get("decoder_sparse_step") or hf.get("moe_layer_freq") or 1
    dense = set(hf.get("mlp_only_layers") or ()) | set(range(hf.get("first_k_dense_replace") or 0))
    dense |= {layer for layer in range(layers) if (layer + 1) % every} if isinstance(every, int) else set()
    return {
        "num_experts": num_experts,
        "experts_per_token": hf.get("num_experts_per_tok") or hf["experts_per_token"],
        "expert_ffn": expert_ffn,
        "shared_ffn": shared,
        "dense_layers": len(dense),
    }
