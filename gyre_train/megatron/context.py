"""Context parallelism: the rows of a pack over ranks, keys and values gathered whole for each layer's attention.

Each rank takes one run of rows from the front of the pack and one from its end, since later rows see more keys. A rank
computes the log-probs of the edges that leave its rows; every rank then has those of all edges and the same loss.
Shapes: T rows of the pack, R rows of this rank, E loss edges.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gyre_train.attn.api import RowRanges

from .parallel import tp_size

__all__ = ["cp_rank", "cp_size", "gather_rows", "merge_edges", "own_rows", "padded", "rows_of"]


def cp_size() -> int:
    """Ranks that share the rows of a pack."""
    return int(parallel_state.get_context_parallel_world_size())


def cp_rank() -> int:
    """This process's place among them."""
    return int(parallel_state.get_context_parallel_rank())


def rows_of(num_rows: int, rank: int, size: int) -> RowRanges:
    """The runs of rows of one rank, ascending and none empty; a pack of fewer rows than ranks leaves some without."""
    places = (rank, 2 * size - 1 - rank)
    runs = tuple((num_rows * place // (2 * size), num_rows * (place + 1) // (2 * size)) for place in places)
    return tuple(run for run in runs if run[0] < run[1])


def own_rows(num_rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """This rank's rows [R] of a pack of so many."""
    return _index(rows_of(num_rows, cp_rank(), cp_size()), device)


def padded(num_rows: int, *, sequence_parallel: bool) -> int:
    """Rows that a rank computes for its own ones: at least one, and under sequence parallelism an equal part for each
    tensor-parallel rank. What is over stands at the end, attends to nothing and has no loss.
    """
    parts = tp_size() if sequence_parallel else 1
    return max(1, -(-num_rows // parts)) * parts


def gather_rows(local: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return all [T, ...] of what each rank holds for its own rows [R, ...]; gradients are summed back to them."""
    whole: torch.Tensor = _GatherRows.apply(local, num_rows)
    return whole


def merge_edges(local: torch.Tensor, index: torch.Tensor, num_edges: int) -> torch.Tensor:
    """Return values [2, E] of all edges from this rank's, which stand at `index`.

    Every rank goes on to the same loss, so each gets back the gradient of its own edges and nothing is summed.
    """
    whole: torch.Tensor = _MergeEdges.apply(local, index, num_edges)
    return whole


def _index(rows: RowRanges, device: torch.device | str) -> torch.Tensor:
    parts = [torch.arange(start, end, device=device) for start, end in rows]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        size = cp_size()
        rows = [_index(rows_of(num_rows, rank, size), local.device) for rank in range(size)]
        longest = max(len(index) for index in rows)
        padded = local.new_zeros(longest, *local.shape[1:])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=parallel_state.get_context_parallel_group())
        whole = local.new_empty(num_rows, *local.shape[1:])
        for index, part in zip(rows, parts, strict=True):
            whole[index] = part[: len(index)]
        ctx.own = rows[cp_rank()]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=parallel_state.get_context_parallel_group())
        return grad[ctx.own], None


class _MergeEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, index: torch.Tensor, num_edges: int) -> torch.Tensor:
        whole = local.new_zeros(2, num_edges)
        whole[:, index] = local
        dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        ctx.index = index
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad[:, ctx.index], None, None
