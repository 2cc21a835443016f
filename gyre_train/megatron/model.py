"""A megatron-core GPTModel that runs on trajectory trees: positions and attention follow the tree, not the row number.

Three hooks into the stock model and no patching: the rotary module takes positions (Megatron's 'mrope' branch passes
them), `TreeSeqParams` carries the segment table untouched through every layer to `TreeAttention`, and `_postprocess`
sends only loss-edge rows through the output layer. Shapes: T tokens, E edges, V vocabulary columns of this rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.utils.checkpoint import checkpoint

from gyre_train.attn.api import RowRanges, tree_attention

from .architecture import check_supported, expert_settings, head_dim, inverse_frequencies, is_sparse
from .context import cp_rank, cp_size, gather_rows, merge_edges, own_rows, padded, rows_of
from .layers import ep_size, layer_spec
from .logprobs import vocab_parallel_logprobs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from gyre_train.pack import Pack
    from gyre_train.segment_table import SegmentTable

__all__ = [
    "TreeGPTModel",
    "TreeSeqParams",
    "build_model",
    "edge_logprobs",
    "full_logits",
    "stage_forward",
]

# Loss edges per slice of the output layer: the logits of one slice are alive at a time, recomputed in backward.
_EDGE_CHUNK = 4096


@dataclass(kw_only=True)
class TreeSeqParams(PackedSeqParams):
    """What a packed tree adds to a forward pass; Megatron hands it to every core attention as it is."""

    segments: SegmentTable
    rows: RowRanges | None = None
    """The rows of this context-parallel rank; None: all."""
    backend: str = "segments"
    edges: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Source row, target id and temperature of each loss edge; None: logits of every row."""
    routes: torch.Tensor | None = None
    """Recorded experts [R, L, K] of this rank's rows, -1 where there are none; None: the router decides."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in at least float32, gains in the model's dtype (torch's ignores `params_dtype`)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class PositionRotary(RotaryEmbedding):
    """Rotary angles for the given positions, so that siblings of a tree share them."""

    def forward(self, position_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return angles [T, 1, 1, dim] for one packed sequence, laid out for rotate-half as Hugging Face does it."""
        inv_freq = self.inv_freq.to(position_ids.device)
        angles = torch.outer(position_ids.reshape(-1).to(inv_freq.dtype), inv_freq)
        return torch.cat((angles, angles), -1)[:, None, None, :]


class TreeAttention(nn.Module):
    """Megatron core attention over the segment table of `TreeSeqParams`; heads are this rank's."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: TreeSeqParams,
        **__: Any,
    ) -> torch.Tensor:
        """Attend within each path of the tree; [T, 1, heads, dim] in, [T, 1, heads * dim] out."""
        num_rows = num_own = packed_seq_params.segments.num_rows
        if packed_seq_params.rows is not None:
            num_own = sum(end - start for start, end in packed_seq_params.rows)
        key, value = key[:num_own, 0], value[:num_own, 0]
        if packed_seq_params.rows is not None:
            key, value = gather_rows(torch.stack((key, value), 1), num_rows).unbind(1)
        out = tree_attention(
            query[:num_own, 0], key, value, packed_seq_params.segments, rows=packed_seq_params.rows,
            backend=packed_seq_params.backend, scale=self.scale,
        )  # fmt: skip
        return F.pad(out.flatten(1)[:, None], (0, 0, 0, 0, 0, len(query) - num_own))


class TreeGPTModel(GPTModel):
    """GPTModel on one packed tree: gives log-probs and entropies [2, E] of its loss edges, or this rank's logits."""

    def __init__(
        self,
        config: TransformerConfig,
        spec: Any,
        *,
        inv_freq: torch.Tensor,
        real_vocab: int,
        sparse_layers: tuple[bool, ...],
        **kw: Any,
    ):
        super().__init__(config, spec, position_embedding_type="rope", **kw)
        self.rotary_pos_emb = PositionRotary(
            config.kv_channels, 1.0, use_cpu_initialization=True, cp_group=self.pg_collection.cp
        )
        self.rotary_pos_emb.inv_freq = inv_freq
        # The 'mrope' branch of the stock forward is the one that hands position ids to the rotary module.
        self.position_embedding_type, self.mrope_section = "mrope", None
        self.real_vocab = real_vocab
        self.sparse_layers = sparse_layers
        """Which layers of the whole model have experts."""
        if config.sequence_parallel and self.post_process:  # rows are chosen before this layer, so they come whole
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True

    def setup_embeddings_and_output_layer(self) -> None:
        """Mark embedding and output weights; those of a tied pair in two stages are both filled by `load_hf`.

        The stock method makes the pair equal by sending it over the devices of a GPU.
        """
        if self.pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        if self.post_process and self.output_layer.weight is not None:
            self.output_layer.weight.is_embedding_or_output_parameter = True
        if not self.share_embeddings_and_output_weights or self.pre_process is self.post_process:
            return
        weight = self.shared_embedding_or_output_weight()
        weight.shared_embedding = True
        weight.shared = self.post_process

    def _postprocess(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: TreeSeqParams, **__: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        hidden_TH = hidden_states[:, 0]
        if packed_seq_params.edges is None:
            return self._logits(hidden_TH[: packed_seq_params.segments.num_rows])
        rows_E, *edges = packed_seq_params.edges
        if packed_seq_params.rows is None:
            return self._all_edges(hidden_TH, rows_E, *edges)
        place_T = torch.full((packed_seq_params.segments.num_rows,), -1, device=rows_E.device)
        own_R = own_rows(len(place_T), rows_E.device)
        place_T[own_R] = torch.arange(len(own_R), device=rows_E.device)
        own = (place_T[rows_E] >= 0).nonzero()[:, 0]
        values = self._all_edges(hidden_TH, place_T[rows_E[own]], *(x[own] for x in edges))
        return merge_edges(values, own, len(rows_E))

    def _all_edges(self, hidden_TH: torch.Tensor, rows_E: torch.Tensor, *edges: torch.Tensor) -> torch.Tensor:
        if rows_E.numel() <= _EDGE_CHUNK:
            return self._edges(hidden_TH.index_select(0, rows_E), *edges)
        parts = [
            checkpoint(self._edges, hidden_TH.index_select(0, rows), ids, temperature,
                       use_reentrant=False, preserve_rng_state=False)
            for rows, ids, temperature in zip(*(x.split(_EDGE_CHUNK) for x in (rows_E, *edges)), strict=True)
        ]  # fmt: skip
        return torch.cat(parts, 1)

    def _logits(self, hidden_EH: torch.Tensor) -> torch.Tensor:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden_EH[:, None], weight=weight)
        logits = logits.squeeze(1)
        real = self.real_vocab - self._first_id(logits.shape[-1])
        # Padding rows of the vocabulary take no part. A slice of everything would still cost a copy in backward.
        return logits if real >= logits.shape[-1] else logits[:, : max(0, real)]

    def _first_id(self, width: int) -> int:
        return int(parallel_state.get_tensor_model_parallel_rank()) * width

    def _edges(self, hidden_EH: torch.Tensor, target_id_E: torch.Tensor, temperature_E: torch.Tensor) -> torch.Tensor:
        width = self.vocab_size // int(parallel_state.get_tensor_model_parallel_world_size())
        values = vocab_parallel_logprobs(
            self._logits(hidden_EH),
            target_id_E,
            temperature_E,
            first_id=self._first_id(width),
            group=parallel_state.get_tensor_model_parallel_group(),
        )
        return torch.stack(values)


def build_model(
    hf: PretrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    initialize: bool = False,
    recompute: bool = False,
) -> TreeGPTModel:
    """Build this rank's slice of the model that `hf` describes; groups must be up.

    Weights are left unset for `load_hf` unless `initialize`. `recompute` keeps only layers' inputs for the backward
    pass. Raises ConfigError for a model that cannot be trained exactly here: another architecture, sliding windows,
    biases that Megatron has no place for, indivisible layouts.
    """
    tp = int(parallel_state.get_tensor_model_parallel_world_size())
    pp = int(parallel_state.get_pipeline_model_parallel_world_size())
    check_supported(hf, tp=tp, pp=pp, ep=ep_size())
    if tp > 1 and device.startswith("cuda"):  # sequence parallelism keeps a random state for dropout, which is 0
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about settings of Megatron's own that we do not make
        config = _transformer_config(hf, tp, pp, dtype, device, initialize)
        model = TreeGPTModel(
            config,
            _spec(hf, config),
            inv_freq=inverse_frequencies(hf),
            real_vocab=hf.vocab_size,
            sparse_layers=tuple(is_sparse(hf, index) for index in range(hf.num_hidden_layers)),
            vocab_size=-(-hf.vocab_size // tp) * tp,
            max_sequence_length=hf.max_position_embeddings,
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    for name, parameter in model.named_parameters():  # Megatron marks slices only where it also initialises them
        parameter.tensor_model_parallel = "layernorm" not in name and "router" not in name
    for layer in model.decoder.layers:
        layer.recompute = recompute
    return model.to(device)


def _transformer_config(
    hf: PretrainedConfig, tp: int, pp: int, dtype: torch.dtype, device: str, initialize: bool
) -> TransformerConfig:
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        add_qkv_bias=hf.model_type == "qwen2",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp_size(),
        sequence_parallel=tp > 1 and device.startswith("cuda"),
        use_cpu_initialization=device == "cpu",
        perform_initialization=initialize,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cuda_graph_scope=[],
        **expert_settings(hf),
        expert_model_parallel_size=ep_size(),
        expert_tensor_parallel_size=tp // ep_size(),
    )


def _spec(hf: PretrainedConfig, config: TransformerConfig) -> TransformerBlockSubmodules:
    per_stage = config.num_layers // config.pipeline_model_parallel_size
    first = per_stage * int(parallel_state.get_pipeline_model_parallel_rank())
    sparse = [is_sparse(hf, index) for index in range(first, first + per_stage)]
    specs = {kind: layer_spec(config, RMSNorm, TreeAttention, sparse=kind) for kind in set(sparse)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in sparse], layer_norm=RMSNorm)


def edge_logprobs(model: nn.Module, pack: Pack, *, backend: str = "segments") -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of the pack's loss edges, each [E], at each edge's temperature.

    The same on every tensor-parallel rank. No gradient flows through the entropy. The model must be in one stage;
    `schedule.forward_packs` and `train_packs` know more of them.
    """
    logp_E, entropy_E = stage_forward(model, pack, None, backend=backend)
    return logp_E, entropy_E.detach()


def stage_forward(
    model: nn.Module, pack: Pack, hidden: torch.Tensor | None, *, backend: str = "segments"
) -> torch.Tensor:
    """This pipeline stage's output for a pack: hidden states [T, 1, H], in the last stage log-probs, entropies [2, E].

    `hidden` is the stage before's output, None in the first one.
    """
    device = next(model.parameters()).device
    ids_T, position_T, routes_TLK, rows = pack.ids_T, pack.position_T, pack.routes_TLK, None
    if cp_size() > 1:
        rows = rows_of(pack.num_tokens, cp_rank(), cp_size())
        own_R = own_rows(pack.num_tokens).numpy()
        ids_T, position_T = ids_T[own_R], position_T[own_R]
        routes_TLK = None if routes_TLK is None else routes_TLK[own_R]
    extra = TreeSeqParams(
        qkv_format="sbhd",
        segments=pack.segments,
        rows=rows,
        backend=backend,
        edges=(
            _to_device(pack.source_row_E, device).long(),
            _to_device(pack.target_id_E, device).long(),
            _to_device(pack.temperature_E, device),
        ),
        routes=None if routes_TLK is None else _to_device(routes_TLK, device),
    )
    if hidden is not None:
        core: Any = getattr(model, "module", model)
        core.set_input_tensor(hidden)
    return _forward(model, ids_T, position_T, extra, device)


def full_logits(
    model: nn.Module, ids_T: np.ndarray, position_T: np.ndarray, segments: SegmentTable, *, backend: str = "segments"
) -> torch.Tensor:
    """Return this rank's logits_TV of every row: for comparison with other implementations, not for training."""
    device = next(model.parameters()).device
    return _forward(
        model, ids_T, position_T, TreeSeqParams(qkv_format="sbhd", segments=segments, backend=backend), device
    )


def _forward(
    model: nn.Module, ids_T: np.ndarray, position_T: np.ndarray, extra: TreeSeqParams, device: torch.device
) -> torch.Tensor:
    config: Any = getattr(model, "module", model).config
    over = padded(len(ids_T), sequence_parallel=config.sequence_parallel) - len(ids_T)
    ids, positions = (F.pad(_to_device(x, device).long(), (0, over))[None] for x in (ids_T, position_T))
    result: torch.Tensor = model(ids, positions, None, packed_seq_params=extra)
    return result


def _to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
