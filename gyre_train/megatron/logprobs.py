"""Log-probs of loss edges from a vocabulary that is sliced over tensor-parallel ranks.

Computed in the model's dtype, at least float32 (Megatron's own cross entropy works in float32 only, which sets a floor
near 5e-8 under every gradient). Shapes: E edges, V columns of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["vocab_parallel_logprobs"]

_ROWS = 256


def vocab_parallel_logprobs(
    logits_EV: torch.Tensor,
    target_id_E: torch.Tensor,
    temperature_E: torch.Tensor,
    *,
    first_id: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits / temperature) at each target, differentiable in the logits, and the distributions'
    entropies, which are not.

    `logits_EV` holds the columns of ids [first_id, first_id + V) on this rank; the slices of `group` make up the
    vocabulary. Every rank gets the same result, and its backward pass yields the gradient of its own columns.
    """
    logp_E, entropy_E = _VocabParallelLogprob.apply(logits_EV, target_id_E, temperature_E, first_id, group)
    return logp_E, entropy_E


def _reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_EV: torch.Tensor,
        target_id_E: torch.Tensor,
        temperature_E: torch.Tensor,
        first_id: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits_EV.dtype, torch.float32)
        inverse_E = temperature_E.to(dtype).reciprocal()
        scaled_EV = logits_EV.to(dtype) * inverse_E[:, None]
        peak_E = _reduce(scaled_EV.amax(-1), dist.ReduceOp.MAX, group)
        scaled_EV -= peak_E[:, None]
        column_E = target_id_E - first_id
        here_E = (column_E >= 0) & (column_E < logits_EV.shape[1])
        column_E = torch.where(here_E, column_E, 0)
        picked_E = scaled_EV.gather(1, column_E[:, None])[:, 0]
        picked_E = _reduce(torch.where(here_E, picked_E, 0), dist.ReduceOp.SUM, group)
        # In slices, so that no second table of E x V is alive: each x becomes exp x, summed alone and weighted by x.
        sums = []
        for part in scaled_EV.split(_ROWS):
            exp = part.exp()
            sums.append(torch.stack((exp.sum(-1), part.mul_(exp).sum(-1))))
            part.copy_(exp)
        total_E, weighted_E = _reduce(torch.cat(sums, 1), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(scaled_EV, column_E, here_E, inverse_E, total_E)
        ctx.logits_dtype = logits_EV.dtype
        entropy_E = total_E.log() - weighted_E / total_E
        ctx.mark_non_differentiable(entropy_E)
        return picked_E - total_E.log(), entropy_E

    @staticmethod
    def backward(ctx: Any, grad_E: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        exp_EV, column_E, here_E, inverse_E, total_E = ctx.saved_tensors
        scale_E = grad_E * inverse_E
        grad_EV = exp_EV * (-scale_E / total_E)[:, None]
        grad_EV.scatter_add_(1, column_E[:, None], torch.where(here_E, scale_E, 0)[:, None])
        return grad_EV.to(ctx.logits_dtype), None, None, None, None
