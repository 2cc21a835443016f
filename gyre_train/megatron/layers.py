"""Megatron's transformer layer as trees need it: full recomputation, and experts that may replay recorded routes.

The package's own router and MoE layer work on CUDA only (they move weights there) and its router rounds to float32, so
both are subclassed; experts, permutation and combination are the package's. Tokens are the same on every
tensor-parallel rank, and experts are shared out over these ranks: each holds a slice of every expert, or, with expert
parallelism, some experts whole. So nothing is gathered; partial sums are added up.
Shapes: T rows of this rank, L layers of the model, K experts per token, X experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.utils.checkpoint import checkpoint

__all__ = ["TreeLayer", "TreeMoELayer", "TreeRouter", "ep_size", "layer_spec"]


class TreeLayer(TransformerLayer):
    """A transformer layer that hands its experts the pack's routes and, where wanted, recomputes itself in backward."""

    recompute = False
    """Keep only the layer's input for the backward pass and run the layer again there."""

    def forward(self, hidden_states: torch.Tensor, *, packed_seq_params: Any, **more: Any) -> Any:
        """As the stock layer. Routes are set here, so that a recomputation sees those of its own pack."""

        def run(hidden_states: torch.Tensor) -> Any:
            if isinstance(self.mlp, TreeMoELayer):
                self.mlp.router.routes_TK = self._own_routes(packed_seq_params.routes, len(hidden_states))
            return super(TreeLayer, self).forward(hidden_states, packed_seq_params=packed_seq_params, **more)

        if not (self.recompute and torch.is_grad_enabled()):
            return run(hidden_states)
        return checkpoint(run, hidden_states, use_reentrant=False, preserve_rng_state=False)

    def _own_routes(self, routes_TLK: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
        """This layer's, for the padded rows in hand: under sequence parallelism a rank's part of them."""
        if routes_TLK is None:
            return None
        routes_TK = routes_TLK[:, self.layer_number - 1].long()
        group = self.pg_collection.tp
        size, rank = (group.size(), group.rank()) if self.config.sequence_parallel else (1, 0)
        return F.pad(routes_TK, (0, 0, 0, num_rows * size - len(routes_TK)), value=-1).chunk(size)[rank]


class TreeRouter(TopKRouter):
    """Softmax over all experts, the K best (or the recorded K) of them, in at least float32.

    With probabilities s over all experts and the set S of a token's K experts, the weight of an expert in S is
    s_i, or s_i / sum_{j in S} s_j where the model normalises them. Replay changes S only: weights are the present
    router's, and gradients flow through them (R3, arXiv:2510.11370; megatron-core's RouterReplay gathers the same).
    """

    routes_TK: torch.Tensor | None = None
    """Recorded experts of the pack in hand; -1 where a token has none. None: nothing is replayed."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Router logits, wherever the weights are."""
        return F.linear(input, self.weight)

    def routing(self, logits: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, X], zero outside a token's experts, and their map [T, X]. No auxiliary loss."""
        del padding_mask
        logits_TX = logits.view(-1, self.config.num_moe_experts)
        wide_TX = logits_TX.to(torch.promote_types(logits.dtype, torch.float32))
        experts_TK = wide_TX.topk(self.topk, dim=-1).indices
        if self.routes_TK is not None:
            experts_TK = torch.where(self.routes_TK >= 0, self.routes_TK, experts_TK)
        if self.config.moe_router_pre_softmax:
            weight_TK = wide_TX.softmax(-1).gather(1, experts_TK)
        else:  # the same as normalising the softmax over all
            weight_TK = wide_TX.gather(1, experts_TK).softmax(-1)
        weight_TX = torch.zeros_like(logits_TX).scatter(1, experts_TK, weight_TK.to(logits_TX.dtype))
        return weight_TX, torch.zeros_like(logits_TX, dtype=torch.bool).scatter(1, experts_TK, True)


class _SharedOutDispatcher(MoEAllGatherTokenDispatcher):
    """Every rank has all tokens already, and gives its experts' part of each token's output."""

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.config.sequence_parallel:
            return super().token_dispatch(hidden_states, probs)
        return _SumGradient.apply(hidden_states, self.tp_ep_group), _SumGradient.apply(probs, self.tp_ep_group)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.config.sequence_parallel:
            return super().token_combine(hidden_states)
        return reduce_from_tensor_model_parallel_region(hidden_states, group=self.tp_ep_group)


class _SumGradient(torch.autograd.Function):
    """The same tensor on every rank; each sends back a part of its gradient.

    The package's function for this leaves a gradient that is not contiguous unsummed, which that of `probs` is.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.group.size() > 1:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class TreeMoELayer(MoELayer):
    """The stock stages with the router and dispatcher above, whose own `forward` is for sequence parallelism only."""

    def __init__(self, config: TransformerConfig) -> None:
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        experts = ModuleSpec(module=SequentialMLP, submodules=linear)
        groups = get_default_pg_collection()
        super().__init__(config, MoESubmodules(experts=experts, router=TreeRouter), pg_collection=groups)
        self.token_dispatcher = _SharedOutDispatcher(self.num_local_experts, self.local_expert_indices, config, groups)

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Return the experts' weighted sum for each token, and no bias."""
        probs, routing_map = self.route(hidden_states)
        hidden, probs = self.preprocess(hidden_states, probs, routing_map)
        hidden, probs = self.dispatch(hidden, probs)
        output, _bias = self.routed_experts_compute(hidden, probs)
        return self.postprocess(self.combine(output), None), None


def layer_spec(config: TransformerConfig, norm: type, attention: type, *, sparse: bool) -> ModuleSpec:
    """The package's local layer with our norm and core attention; `sparse`: experts instead of one MLP."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.module = TreeLayer
    parts, attn = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    attn.core_attention = attention
    if config.qk_layernorm:
        attn.q_layernorm = attn.k_layernorm = norm
    if sparse:
        parts.mlp = TreeMoELayer
    return layer


def ep_size() -> int:
    """Groups of tensor-parallel ranks that hold different experts whole."""
    return int(parallel_state.get_expert_model_parallel_world_size())
