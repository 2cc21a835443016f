"""Processes and groups of one training job: gloo on CPU (tested), nccl on GPU (written, not yet verified).

Ranks are numbered as Megatron does: tensor-parallel neighbours first, then context, data, pipeline stages last.
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
from torch.multiprocessing.spawn import ProcessException, _prctl_pr_set_pdeathsig

from gyre_data.errors import ConfigError, GyreError
from gyre_train.config import ParallelConfig
from gyre_train.memory import keep_memory

__all__ = [
    "counts_figures",
    "dp_rank",
    "from_all_ranks",
    "from_data_parallel",
    "from_first_rank",
    "from_stage",
    "gather_shards",
    "groups",
    "is_first_rank",
    "model_parallel",
    "place",
    "pp_rank",
    "pp_size",
    "run_ranks",
    "tp_rank",
    "tp_size",
]

_ONE = ParallelConfig()
_TIMEOUT = timedelta(minutes=30)


@contextmanager
def groups(
    *, rank: int = 0, parallel: ParallelConfig = _ONE, init_file: str | None = None, device: str = "cpu"
) -> Iterator[None]:
    """Hold the process groups of one rank of `parallel`; taken down on exit.

    One rank needs no rendezvous; several meet at `init_file`, a path that no earlier group has used.
    """
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # All ranks are on this host. Its own name may not resolve (laptops, containers), which costs seconds or fails.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    size = parallel.ranks
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    else:
        dist.init_process_group(
            backend, init_method=f"file://{init_file}", rank=rank, world_size=size, timeout=_TIMEOUT
        )
    try:
        with model_parallel(parallel):
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def model_parallel(parallel: ParallelConfig) -> Iterator[None]:
    """Hold Megatron's groups over processes that have found each other; there must be `parallel.ranks` of them."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.tp // parallel.ep,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def run_ranks(body: Callable[..., None], parallel: ParallelConfig, *args: Any, device: str = "cpu") -> None:
    """Call `body(*args)` in each rank of `parallel` with the groups up; one runs in this process, several are spawned.

    `body` must be importable by name. An exception in one rank ends all and is raised here, a GyreError as itself.
    """
    size = parallel.ranks
    if device.startswith("cuda") and torch.cuda.device_count() < size:
        raise ConfigError(
            f"model.device = {device}: wanted {size} CUDA devices, this machine has {torch.cuda.device_count()}; "
            "set model.device = cpu, or fewer ranks in [parallel]"
        )
    if size == 1:
        with groups(device=device):
            body(*args)
        return
    with tempfile.TemporaryDirectory(prefix="gyre-ranks-") as folder:
        init_file = str(Path(folder) / "rendezvous")
        try:
            root = logging.getLogger()
            level = root.level if root.handlers else None
            spawn_args = (parallel, init_file, device, level, body, args)
            torch.multiprocessing.spawn(_rank_entry, args=spawn_args, nprocs=size, join=True)
        except ProcessException as failure:
            for file in Path(folder).glob("*.error"):
                raise pickle.loads(file.read_bytes()) from failure  # written by our own ranks, in our own folder
            raise


def _rank_entry(
    rank: int,
    parallel: ParallelConfig,
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
    _prctl_pr_set_pdeathsig(signal.SIGKILL)  # torch has asked for SIGINT when the starting process dies
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", (os.cpu_count() or 1) // parallel.ranks or 1))))
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asks for it where tensor parallelism overlaps
    if device.startswith("cuda"):
        torch.cuda.set_device(rank)
    else:
        keep_memory()
    try:
        with groups(rank=rank, parallel=parallel, init_file=init_file, device=device):
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


def pp_size() -> int:
    """Pipeline stages of one copy of the model."""
    return int(parallel_state.get_pipeline_model_parallel_world_size())


def pp_rank() -> int:
    """This process's stage."""
    return int(parallel_state.get_pipeline_model_parallel_rank())


def dp_rank() -> int:
    """Which copy of the model this process holds a part of."""
    return int(parallel_state.get_data_parallel_rank())


def place() -> str:
    """The part of the model that this process holds, as all replicas of one layout name it."""
    return f"t{tp_rank()}c{int(parallel_state.get_context_parallel_rank())}p{pp_rank()}"


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


def from_all_ranks(value: Any) -> list[Any]:
    """Return every rank's value in every rank; every rank must call it."""
    return _gathered(value, None)


def from_data_parallel(value: Any) -> list[Any]:
    """Return the value of each data-parallel rank that holds this rank's part of the model, in rank order."""
    return _gathered(value, parallel_state.get_data_parallel_group())


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    out = [value] * dist.get_world_size(group)
    if len(out) > 1:
        dist.all_gather_object(out, value, group=group)
    return out


def from_stage(stage: int, tensors: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """Return one pipeline stage's tensors in every stage; every rank must call it."""
    if pp_size() == 1:
        return tensors
    group = parallel_state.get_pipeline_model_parallel_group()
    source = dist.get_global_rank(group, stage)
    box: list[Any] = [[(tuple(t.shape), t.dtype) for t in tensors]]
    dist.broadcast_object_list(box, source, group=group)
    if stage != pp_rank():
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in box[0]]
    tensors = [t.contiguous() for t in tensors]
    for tensor in tensors:
        dist.broadcast(tensor, source, group=group)
    return tensors


def counts_figures() -> bool:
    """True in the one rank of each model copy that speaks for it: the first slice of the last stage."""
    first = tp_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return first and bool(parallel_state.is_pipeline_last_stage())


def gather_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return this tensor as held by every tensor-parallel rank, in rank order; every rank must call it."""
    if tp_size() == 1:
        return [tensor]
    shards = [torch.empty_like(tensor) for _ in range(tp_size())]
    dist.all_gather(shards, tensor.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards
