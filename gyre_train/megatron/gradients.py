"""Gradients of one training job: summed over ranks when a step closes, scaled, and clipped by the whole model's norm.

Guarantees: after `finish_gradients` every copy of a parameter holds the same gradient, whoever saw which packs;
`clip_gradients` uses the norm of the whole model, each parameter counted once whatever its slicing and copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn

from .parallel import tp_rank

__all__ = [
    "SimpleDataParallel",
    "add_gradients",
    "clip_gradients",
    "finish_gradients",
    "gradient_of",
    "gradients_by_name",
]


class SimpleDataParallel(_BaseDataParallel):
    """Data parallelism on any device: one flat all-reduce when a step closes.

    Gradients of parameters below float32 are summed in float32 in `main_grad`, so that micro-steps lose nothing.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self._group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        for parameter in module.parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(_move_to_main_grad)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum gradients over the data-parallel and context-parallel ranks."""
        del force_all_reduce
        for parameter in self.module.parameters():  # a rank that got no pack adds zeros
            if gradient_of(parameter) is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._group.size() == 1:
            return
        grads = [g for p in self.module.parameters() if (g := gradient_of(p)) is not None]
        flat = torch._utils._flatten_dense_tensors(grads)
        dist.all_reduce(flat, group=self._group)
        for grad, summed in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(summed)

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply every gradient."""
        for parameter in self.module.parameters():
            if (grad := gradient_of(parameter)) is not None:
                grad.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.zero_()


def _move_to_main_grad(parameter: nn.Parameter) -> None:
    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
    parameter.grad = None


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the tensor that holds this parameter's accumulated gradient."""
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def gradients_by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's gradients as accumulated, un-normalised and not yet summed over ranks, copied to the host."""
    grads = {name: gradient_of(parameter) for name, parameter in model.named_parameters()}
    return {name: grad.detach().to("cpu", copy=True) for name, grad in grads.items() if grad is not None}


def add_gradients(model: nn.Module, more: Mapping[str, torch.Tensor]) -> None:
    """Add what `gradients_by_name` gave of a replica of the same layout."""
    for name, parameter in model.named_parameters():
        if name not in more:
            continue
        grad = gradient_of(parameter)
        if grad is None:
            parameter.grad = more[name].to(parameter.device, parameter.dtype, copy=True)
        else:
            grad.add_(more[name].to(grad.device))


def finish_gradients(wrapped: _BaseDataParallel, scale: float) -> None:
    """Close a step: sum over ranks where a parameter is replicated, then multiply by `scale` (1/E)."""
    finalize_model_grads([wrapped])
    wrapped.scale_gradients(scale)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that the model's gradient norm is at most `max_norm` (0: only measure). Returns the norm.

    Slices and stages add up over the model-parallel group; what several ranks hold alike (norm gains, the tied
    embedding of the last stage) counts once.
    """
    grads = [(p, grad) for p in model.parameters() if (grad := gradient_of(p)) is not None]
    total = torch.zeros(1, dtype=torch.float64, device=grads[0][1].device)
    for parameter, grad in grads:
        if _counts_here(parameter):
            total += grad.double().square().sum()
    group = parallel_state.get_model_parallel_group()
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    norm = float(total.sqrt())
    if max_norm > 0 and norm > max_norm:
        for _, grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm


def _counts_here(parameter: nn.Parameter) -> bool:
    if getattr(parameter, "shared", False):  # Megatron's mark of the last stage's copy of the embedding
        return False
    return bool(getattr(parameter, "tensor_model_parallel", False)) or tp_rank() == 0
