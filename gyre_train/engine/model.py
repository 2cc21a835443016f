"""A Hugging Face causal LM that computes several sequences in one forward, each against its own KV buffer.

The model's own code runs unchanged; only its attention function is ours, set through transformers' attention
interface. The rows of all sequences stand one behind the other in a single batch row, so nothing is padded and a
sequence's numbers do not depend on how long its batch-mates are.

Shapes: T rows of all spans, H heads, K kv heads, D head dim, B spans, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from gyre_data.errors import ConfigError

from .kv import KvBuffer

__all__ = ["Model", "Span"]

_ATTENTION = "gyre_engine"
_RMS_NORMS = ("LlamaRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "Qwen3MoeRMSNorm")
_ROUTERS = ("Qwen3MoeTopKRouter",)
"""They give logits, weights and the experts chosen."""
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""What transformers holds of all experts of a layer in one tensor, by the names that a checkpoint gives the parts."""
_IDENTITY = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "num_experts",
    "num_experts_per_tok",
)
"""What new weights must share with the model they replace: KV buffers and the proxy's checks rest on these."""


class Span(NamedTuple):
    """The next tokens of one sequence; `buffer` holds everything before them."""

    ids: np.ndarray
    buffer: KvBuffer


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    scaling: float,
    gyre_spans: Sequence[Span],
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention of each span's rows over its own buffer; `query` is [1, H, T, D], the result [1, T, H, D]."""
    num_heads, num_rows, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    out = query.new_empty(1, num_rows, num_heads, head_dim)
    layer = cast(int, module.layer_idx)
    start = 0
    for ids, buffer in gyre_spans:
        end = start + len(ids)
        past = buffer.length
        keys, values = buffer.write(layer, past, key[0, :, start:end], value[0, :, start:end])
        if end - start == 1:
            # One row: the heads that share a kv head stand where query rows do, and nothing needs a mask.
            rows = query[:, :, start].reshape(1, num_kv_heads, group, head_dim)
            one = scaled_dot_product_attention(rows, keys[None], values[None], scale=scaling)
            out[0, start] = one.reshape(num_heads, head_dim)
        else:
            rows = query[0, :, start:end].reshape(num_kv_heads, group, end - start, head_dim)
            mask = None
            if past:
                mask = torch.ones(end - start, past + end - start, dtype=torch.bool).tril_(past)
            many = scaled_dot_product_attention(
                rows,
                keys[:, None].expand(-1, group, -1, -1),
                values[:, None].expand(-1, group, -1, -1),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
            out[0, start:end] = many.reshape(num_heads, end - start, head_dim).transpose(0, 1)
        start = end
    return out, None


class Model:
    """Weights, sizes and the batched forward of one checkpoint folder, in float32 on the CPU."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._model = _load(self.path)
        config = self._model.config
        self.vocab_size: int = config.vocab_size
        self.context_length: int = config.max_position_embeddings
        self.model_type: str = config.model_type
        self.architectures: list[str] = list(config.architectures or [type(self._model).__name__])
        self.num_layers: int = config.num_hidden_layers
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.eos_ids = _eos_ids(self.path, config)
        self._routed: dict[int, np.ndarray] = {}
        self.top_k: int = config.num_experts_per_tok if self._watch_routers() else 0
        """Experts per token of a mixture; 0 for a dense model."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that one token's keys and values take in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4

    def new_buffer(self, capacity: int) -> KvBuffer:
        """An empty buffer for one sequence of this model."""
        return KvBuffer(self.num_layers, self.num_kv_heads, self.head_dim, capacity, self.top_k)

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Compute all spans, append them to their buffers, and return the logits after each span's last row [B, V]."""
        position_T, last_B, ids_T = [], [], []
        num_rows = 0
        for ids, buffer in spans:
            buffer.reserve(buffer.length + len(ids))
            position_T.append(np.arange(buffer.length, buffer.length + len(ids)))
            ids_T.append(ids)
            num_rows += len(ids)
            last_B.append(num_rows - 1)
        with torch.inference_mode():
            logits = self._model(
                input_ids=torch.from_numpy(np.concatenate(ids_T).astype(np.int64))[None],
                position_ids=torch.from_numpy(np.concatenate(position_T))[None],
                use_cache=False,
                logits_to_keep=torch.tensor(last_B),
                gyre_spans=spans,
            ).logits[0]
        start = 0
        for ids, buffer in spans:
            first, end = buffer.length, start + len(ids)
            for layer, experts_TK in self._routed.items():
                buffer.routes[first : first + len(ids), layer] = experts_TK[start:end]
            buffer.length, start = first + len(ids), end
        return logits

    def _watch_routers(self) -> bool:
        """Have every router note in `_routed` which experts it chose in a forward; False when there is none."""
        routers = [(name, m) for name, m in self._model.named_modules() if type(m).__name__ in _ROUTERS]
        for name, router in routers:  # model.layers.3.mlp.gate
            router.register_forward_hook(partial(self._note, int(name.split(".")[2])))
        return bool(routers)

    def _note(self, layer: int, _router: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        self._routed[layer] = outputs[2].numpy()

    def replace(self, path: str | Path) -> None:
        """Take over the weights in `path`; on ConfigError nothing has changed and the old weights serve on."""
        fresh = _load(str(path))
        for name in _IDENTITY:
            old, new = getattr(self._model.config, name, None), getattr(fresh.config, name, None)
            if old != new:
                raise ConfigError(
                    f"new weights must fit the served model: {name} is {old!r}, {path} has {new!r}; "
                    "publish a checkpoint of the same model, or start another engine for this one"
                )
        self._model = fresh
        self._watch_routers()
        self.path = str(path)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Replace these tensors where they are; ConfigError names one that does not fit, and none has changed then."""
        own = _by_checkpoint_name(self._model)
        for name, tensor in tensors:
            if name not in own or own[name].shape != tensor.shape or not bool(torch.isfinite(tensor).all()):
                shape = tuple(own[name].shape) if name in own else None
                raise ConfigError(
                    f"wanted finite weights of the served model, {name} has shape {shape} here and "
                    f"{tuple(tensor.shape)} there; publish a checkpoint of the same model"
                )
        with torch.no_grad():
            for name, tensor in tensors:
                own[name].copy_(tensor)

    def checksums(self) -> dict[str, str]:
        """A digest of each tensor's bytes, by its name in a checkpoint: 16 hex digits of sha256, as SGLang gives."""
        return {
            name: hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in _by_checkpoint_name(self._model).items()
        }


def _by_checkpoint_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors; each expert of a stack is a view of it under the name that it has in a checkpoint."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        stem, of_experts, leaf = name.rpartition(".experts.")
        if not of_experts or leaf not in _STACKED:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = expert.chunk(len(_STACKED[leaf]))
            for part, view in zip(_STACKED[leaf], parts, strict=True):
                found[f"{stem}.experts.{number}.{part}.weight"] = view
    return found


def _load(path: str) -> Any:
    """The model in `path`, whole and finite; anything less is a ConfigError."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"a Hugging Face model folder with config.json was wanted, {path} is none: give its path")
    AttentionInterface.register(_ATTENTION, _attend)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            attn_implementation=_ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below with the rest
        )
    except Exception as error:
        raise ConfigError(
            f"the model in {path} cannot be loaded ({error}): check that the folder is complete"
        ) from error
    wrong = {name: found for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if (found := report[name])}
    if wrong:
        raise ConfigError(f"the weights in {path} do not fit its config.json: {wrong}; write the checkpoint again")
    if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or ()):
        raise ConfigError(f"only full attention is served by the embedded engine, {path} has other layers: use SGLang")
    broken = [name for name, tensor in model.state_dict().items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        raise ConfigError(f"weights must be finite, {path} has NaN or infinity in {', '.join(broken[:3])}")
    _fuse_norms(model)
    return model.eval().requires_grad_(False)


def _fuse_norms(model: torch.nn.Module) -> None:
    """Put torch's RMSNorm of one kernel in place of the model's own of eight: small models decode a fifth faster."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in _RMS_NORMS:
                norm: Any = child
                fused = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
                fused.weight = norm.weight
                setattr(parent, name, fused)


def _eos_ids(path: str, config: Any) -> frozenset[int]:
    found: set[int] = set()
    sources = [getattr(config, "eos_token_id", None)]
    if (Path(path) / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(path).eos_token_id)
    for source in sources:
        if source is not None:
            found.update(source if isinstance(source, list) else [source])
    return frozenset(found)
