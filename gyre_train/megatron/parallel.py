"""Processes, groups and gradients of one training job: gloo on CPU (tested), nccl on GPU (written, not yet verified).

Guarantees: after `finish_gradients` every rank of a tensor-parallel group holds the same gradient of a replicated
parameter; `clip_gradients` uses the norm of the whole model, each parameter counted once whatever its slicing.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.multiprocessing.spawn import ProcessException

from gyre_data.errors import ConfigError, GyreError

__all__ = [
    "SimpleDataParallel",
    "clip_gradients",
    "finish_gradients",
    "from_first_rank",
    "gather_shards",
    "gradient_of",
    "groups",
    "is_first_rank",
    "run_ranks",
    "tp_rank",
    "tp_size",
    "wrap_model",
]

_TIMEOUT = timedelta(minutes=30)


@contextmanager
def groups(*, rank: int = 0, tp: int = 1, init_file: str | None = None, device: str = "cpu") -> Iterator[None]:
    """Hold the process groups of one rank of `tp` ranks; taken down on exit.

    One rank needs no rendezvous; several meet at `init_file`, a path that no earlier group has used.
    """
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # All ranks are on this host. Its own name may not resolve (laptops, containers), which costs seconds or fails.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    if tp == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    else:
        dist.init_process_group(backend, init_method=f"file://{init_file}", rank=rank, world_size=tp, timeout=_TIMEOUT)
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_ranks(body: Callable[..., None], tp: int, *args: Any, device: str = "cpu") -> None:
    """Call `body(*args)` in each of `tp` ranks with the groups up. One rank runs in this process, several are spawned.

    `body` must be importable by name. An exception in one rank ends all and is raised here, a GyreError as itself.
    """
    if tp < 1:
        raise ConfigError(f"parallel.tp: wanted at least 1, got {tp}; raise it")
    if device.startswith("cuda") and torch.cuda.device_count() < tp:
        raise ConfigError(
            f"model.device = {device}: wanted {tp} CUDA devices, this machine has {torch.cuda.device_count()}; "
            "set model.device = cpu, or a smaller parallel.tp"
        )
    if tp == 1:
        with groups(device=device):
            body(*args)
        return
    with tempfile.TemporaryDirectory(prefix="gyre-ranks-") as folder:
        init_file = str(Path(folder) / "rendezvous")
        try:
            root = logging.getLogger()
            level = root.level if root.handlers else None
            spawn_args = (tp, init_file, device, level, body, args)
            torch.multiprocessing.spawn(_rank_entry, args=spawn_args, nprocs=tp, join=True)
        except ProcessException as failure:
            for file in Path(folder).glob("*.error"):
                raise pickle.loads(file.read_bytes()) from failure  # written by our own ranks, in our own folder
            raise


def _rank_entry(
    rank: int,
    tp: int,
    init_file: str,
    device: str,
    log_level: int | None,
    body: Callable[..., None],
    args: Sequence[Any],
) -> None:
    if log_level is not None:  # the command that started us shows its log; this process starts without handlers
        logging.basicConfig(level=log_level if rank == 0 else logging.WARNING, format="%(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to a whole process group; the starting process handles them
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", (os.cpu_count() or 1) // tp or 1))))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it where tensor parallelism overlaps
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    try:
        with groups(rank=rank, tp=tp, init_file=init_file, device=device):
            body(*args)
    except GyreError as error:
        Path(f"{init_file}-{rank}.error").write_bytes(pickle.dumps(error))
        raise


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


def tp_size() -> int:
    """Ranks that share one copy of the model."""
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tp_rank() -> int:
    """This process's place among them."""
    return int(parallel_state.get_tensor_model_parallel_rank())


def is_first_rank() -> bool:
    """True in the one process that writes files and speaks to the world."""
    return dist.get_rank() == 0


def from_first_rank(value: Any) -> Any:
    """Return rank 0's value in every rank; every rank must call it."""
    if dist.get_world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return this tensor as held by every tensor-parallel rank, in rank order; every rank must call it."""
    if tp_size() == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(tp_size())]
    dist.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


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
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.register_post_accumulate_grad_hook(_move_to_main_grad)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum gradients over the data-parallel ranks."""
        del force_all_reduce
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
    parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


def wrap_model(model: nn.Module) -> _BaseDataParallel:
    """Wrap a built model for training: Megatron's own DDP on CUDA (unverified), SimpleDataParallel elsewhere."""
    if next(model.parameters()).is_cuda:
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        return DistributedDataParallel(model.config, ddp_config, model)
    return SimpleDataParallel(model.config, model)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the tensor that holds this parameter's accumulated gradient."""
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def finish_gradients(wrapped: _BaseDataParallel, scale: float) -> None:
    """Close a step: sum over ranks where a parameter is replicated, then multiply by `scale` (1/E)."""
    finalize_model_grads([wrapped])
    wrapped.scale_gradients(scale)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that the model's gradient norm is at most `max_norm` (0: only measure). Returns the norm.

    Sliced parameters add up over the tensor-parallel group; replicated ones (norm gains) count once.
    """
    sliced = replicated = 0.0
    grads = []
    for parameter in model.parameters():
        grad = gradient_of(parameter)
        if grad is None:
            continue
        grads.append(grad)
        square = grad.double().square().sum()
        if getattr(parameter, "tensor_model_parallel", False):
            sliced = sliced + square
        else:
            replicated = replicated + square
    total = torch.as_tensor(sliced, dtype=torch.float64, device=grads[0].device).reshape(1).clone()
    if tp_size() > 1:
        dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    norm = float((total + replicated).sqrt())
    if max_norm > 0 and norm > max_norm:
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm
