"""Training on a GPU: Megatron's DistributedDataParallel and DistributedOptimizer, in the place of ours.

The one switch is `model.device`: on a GPU `gradient_wrapper` and `open_optimizer` give these two, elsewhere our own;
`build_model` turns sequence parallelism on with tensor parallelism by the same setting. Both optimisers have the same
methods and the same sharded state, so either resumes what the other saved. No GPU has run this: tests drive it
on CPU with a stand-in for the device, which shows that calls fit and numbers agree, and nothing about streams, overlap
or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from gyre_data.errors import ConfigError
from gyre_train.config import ModelConfig, TrainConfig

from .gradients import SimpleDataParallel
from .model import TreeGPTModel
from .optimizer import Optimizer

__all__ = ["AnyOptimizer", "StockOptimizer", "gradient_wrapper", "open_optimizer"]

_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathers on the first data-parallel rank, in host memory, instead of on all of them.
    "distrib_optim_fully_reshardable_mem_efficient": True,
}


def gradient_wrapper(model: TreeGPTModel, at: ModelConfig) -> _BaseDataParallel:
    """Return the wrapper that sums a built model's gradients."""
    if not at.on_gpu:
        return SimpleDataParallel(model.config, model)
    if at.dtype == "float64":
        raise ConfigError(
            f"model.dtype = float64 with model.device = {at.device}: Megatron's distributed optimiser has float32 at "
            "most; set model.dtype = float32, or model.device = cpu"
        )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model.config, ddp_config, model)


def open_optimizer(
    wrapped: _BaseDataParallel, model: TreeGPTModel, settings: TrainConfig, at: ModelConfig
) -> AnyOptimizer:
    """Return the optimiser of a wrapped model that has its weights."""
    if isinstance(wrapped, DistributedDataParallel):
        return StockOptimizer(wrapped, settings, at)
    return Optimizer(
        model, weight_decay=settings.weight_decay, betas=(settings.beta1, settings.beta2), eps=settings.eps
    )


class StockOptimizer:
    """Megatron's distributed AdamW behind the methods of `Optimizer`: each data-parallel rank steps its own part."""

    def __init__(self, wrapped: DistributedDataParallel, settings: TrainConfig, at: ModelConfig) -> None:
        self._wrapped, self._weight_decay = wrapped, settings.weight_decay
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            bf16=at.dtype == "bfloat16",
            params_dtype=getattr(torch, at.dtype),
            use_distributed_optimizer=True,
        )
        self._all = get_megatron_optimizer(config, [wrapped])
        self._parts: list[Any] = self._all.chained_optimizers  # experts that ranks hold apart have one of their own

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that the model's gradient norm is at most `max_norm` (0: only measure). Returns it."""
        self._all.prepare_grads()
        norm = float(self._all.get_grad_norm())
        if max_norm > 0:
            for part in self._parts:
                clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
        return norm

    def step(self, lr: float) -> None:
        """Apply one step at this learning rate to the gradients of `clip`, and gather the weights."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = lr * group["lr_mult"]
                group["weight_decay"] = self._weight_decay * group["wd_mult"]  # 0 for norm gains and biases
        self._all.step_with_ready_grads()

    def sharded_state(self, shards: Mapping[str, Any], *, loading: bool) -> dict[str, Any]:
        """Return this rank's parts of the state under the keys of `Optimizer.sharded_state`."""
        out: dict[str, Any] = {}
        for number, part in enumerate(self._parts):
            if loading and not part.optimizer.state:
                _allocate(part, 0)
            found = part.sharded_state_dict(shards, is_loading=loading, metadata=_FORMAT)["param_state"]
            out[str(number)] = found or {}  # what other ranks save for this one
        return out

    def load(self, tensors: Mapping[str, Any], num_steps: int) -> None:
        """Take back what `sharded_state` gave after `num_steps` steps."""
        for number, part in enumerate(self._parts):
            _allocate(part, num_steps)
            # torch's AdamW, where Megatron finds no other, counts steps beside its moments: one count for each
            # parameter, which the stock method shares among all and then misses in the file.
            states = part.optimizer.state.values()
            counted = [state for state in states if state.pop("step", None) is not None]
            part.load_parameter_state_from_fully_reshardable(tensors[str(number)])
            for state in counted:
                state["step"] = torch.tensor(float(num_steps))
        self._wrapped.start_param_sync(force_sync=True)


def _allocate(part: Any, num_steps: int) -> None:
    """Make room for the moments, and set the count of steps."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in part.optimizer.param_groups]
    part.load_state_dict({"optimizer": {"param_groups": [group | {"step": float(num_steps)} for group in groups]}})


AnyOptimizer = Optimizer | StockOptimizer
"""What a step and a checkpoint need: `clip`, `step`, `sharded_state`, `load`."""
