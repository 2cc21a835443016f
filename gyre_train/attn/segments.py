"""Tree attention from flash kernels: blocks merged by log-sum-exp, exact backward, memory linear in the rows.

`blocks.py` cuts the mask into dense blocks. Each row's outputs over its blocks are merged by their log-sum-exp, in
float32 or better. Backward runs the kernels' own backward per block with the *merged* output and log-sum-exp, which
makes each block's share of the gradient exact; shares are summed in float32 or better.

A kernel call takes one block (CPU, plain slices) or one level of blocks as many sequences (GPU, `flash.py`).

Shapes: T rows, H query heads, K key-value heads, G = H / K query heads of a group, D head dimension. Kernels see
queries as [T, K, G, D]: the same memory as [T, H, D], and a CPU kernel's result needs no copy to be added to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_train.attn.blocks import Block, RowRanges, blocks_of
from gyre_train.attn.memo import per_table
from gyre_train.segment_table import SegmentTable

__all__ = ["AtenFlash", "BlockKernel", "Call", "calls_of", "segment_attention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One kernel call: blocks that share neither queries nor keys, all causal or all full."""

    rows: slice | Tensor
    """Of the query tensor: a run, or the row numbers."""
    keys: slice | Tensor
    causal: bool
    bounds_q: Tensor
    """[number of blocks + 1], int32, on the tensors' device: where each block begins among `rows`."""
    bounds_k: Tensor
    longest_q: int
    longest_k: int


class BlockKernel(Protocol):
    """Dense attention of a call's blocks, given its rows and keys only. Log-sum-exp is [T, K, G], float32 or better."""

    takes_levels: bool
    """Whether a call may hold several blocks."""

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [T, K, G, D] and log-sum-exp [T, K, G]."""
        ...

    def backward(
        self, call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v for this call, given the output and log-sum-exp merged over all calls."""
        ...


class AtenFlash:
    """PyTorch's CPU flash kernels (private operators: torch is pinned and a test holds their contract).

    Key-value heads take the place of the batch. In a full block the query heads of a group are one longer run of
    queries, so that keys are read, and their gradients written, once per group; in a causal block they share the keys'
    memory by a stride of 0. Keys and values are never expanded.
    """

    takes_levels = False

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        fold, groups = self._folds(call, q), q.shape[2]
        out, lse = op(_queries(q, fold), *_keys(k, v, groups, fold), 0.0, call.causal, scale=scale)
        return _rows(out, groups, fold), _rows(lse, groups, fold)

    def backward(
        self, call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        fold, groups = self._folds(call, q), q.shape[2]
        grad_q, q_q, out_q, lse_q = (_queries(x, fold) for x in (grad, q, out, lse))
        dq, dk, dv = op(grad_q, q_q, *_keys(k, v, groups, fold), out_q, lse_q, 0.0, call.causal, scale=scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (x[:, 0] if x.shape[1] == 1 else x.sum(1, dtype=wide) for x in (dk, dv))
        return _rows(dq, groups, fold), dk.transpose(0, 1), dv.transpose(0, 1)

    def _folds(self, call: Call, q: Tensor) -> bool:
        # The backward kernel spreads over heads only: fold where key-value heads are enough for all threads.
        _, num_kv_heads, groups, _ = q.shape
        return not call.causal and groups > 1 and num_kv_heads >= torch.get_num_threads()


def _queries(x: Tensor, fold: bool) -> Tensor:
    """[K, G, T, ...], or [K, 1, T * G, ...]."""
    x = x.transpose(0, 1)
    return x.flatten(1, 2)[:, None] if fold else x.transpose(1, 2)


def _keys(k_TKD: Tensor, v_TKD: Tensor, groups: int, fold: bool) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1)[:, None].expand(-1, 1 if fold else groups, -1, -1) for x in (k_TKD, v_TKD))


def _rows(x: Tensor, groups: int, fold: bool) -> Tensor:
    """Back to [T, K, G, ...]."""
    x = x[:, 0].unflatten(1, (-1, groups)) if fold else x.transpose(1, 2)
    return x.transpose(0, 1)


@per_table
def calls_of(segments: SegmentTable, rows: RowRanges | None, device: torch.device, by_level: bool) -> tuple[Call, ...]:
    """The kernel calls of a pack: a level of blocks each, or a block each."""
    blocks = blocks_of(segments, rows)
    shifts = _shifts(rows)
    groups: Iterator[tuple[Block, ...]] = ((block,) for block in blocks)
    if by_level:
        groups = (tuple(group) for _, group in itertools.groupby(blocks, lambda block: block.level))
    return tuple(_call(group, shifts, device) for group in groups)


def _shifts(rows: RowRanges | None) -> list[tuple[int, int]]:
    """Per range its end and what lies between a row's number in the pack and in the query tensor."""
    if rows is None:
        return []
    shifts, seen = [], 0
    for start, end in rows:
        shifts.append((end, start - seen))
        seen += end - start
    return shifts


def _call(blocks: Sequence[Block], shifts: list[tuple[int, int]], device: torch.device) -> Call:
    runs_q = []
    for block in blocks:
        shift = next((by for end, by in shifts if block.q_end <= end), 0)
        runs_q.append((block.q_start - shift, block.q_end - shift))
    runs_k = [(block.k_start, block.k_end) for block in blocks]
    rows, bounds_q, longest_q = _selection(runs_q, device)
    keys, bounds_k, longest_k = _selection(runs_k, device)
    return Call(
        rows=rows, keys=keys, causal=blocks[0].causal, bounds_q=bounds_q, bounds_k=bounds_k,
        longest_q=longest_q, longest_k=longest_k,
    )  # fmt: skip


def _selection(runs: list[tuple[int, int]], device: torch.device) -> tuple[slice | Tensor, Tensor, int]:
    lengths = [end - start for start, end in runs]
    bounds = torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)
    if all(before[1] == after[0] for before, after in itertools.pairwise(runs)):
        return slice(runs[0][0], runs[-1][1]), bounds, max(lengths)
    numbers = np.concatenate([np.arange(start, end) for start, end in runs])
    return torch.from_numpy(numbers).to(device), bounds, max(lengths)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: tuple[Call, ...], kernel: BlockKernel, scale: float
    ) -> Tensor:
        ctx.calls, ctx.kernel, ctx.scale = calls, kernel, scale
        if len(calls) == 1:  # nothing to merge
            out, lse = kernel.forward(calls[0], q, k[calls[0].keys], v[calls[0].keys], scale)
            out = out.contiguous()
            ctx.save_for_backward(q, k, v, out, lse)
            return out
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=wide)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        for call in calls:
            part, part_lse = kernel.forward(call, q[call.rows], k[call.keys], v[call.keys], scale)
            if call.causal:  # these come first and tile the rows
                out[call.rows], lse[call.rows] = part, part_lse
            else:
                _merge(out, lse, call.rows, part, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        if len(ctx.calls) == 1 and len(q) == len(k):
            parts = ctx.kernel.backward(ctx.calls[0], grad, q, k, v, out, lse, ctx.scale)
            return *(part.to(x.dtype) for part, x in zip(parts, (q, k, v), strict=True)), None, None, None
        # The causal calls come first and write every query row, and every key row too unless other ranks hold queries.
        fresh = torch.empty_like if len(q) == len(k) else torch.zeros_like
        dq = torch.empty_like(q, dtype=lse.dtype)
        dk, dv = (fresh(x, dtype=lse.dtype) for x in (k, v))
        for call in ctx.calls:
            rows, keys = call.rows, call.keys
            part_q, part_k, part_v = ctx.kernel.backward(
                call, grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], ctx.scale
            )
            if call.causal:
                dq[rows], dk[keys], dv[keys] = part_q, part_k, part_v
            else:  # no row or key is named twice in a call: plain sums, in a fixed order
                dq[rows] += part_q
                dk[keys] += part_k
                dv[keys] += part_v
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _merge(out: Tensor, lse: Tensor, rows: slice | Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Weigh the output so far and a block's by their shares of the softmax's denominator."""
    so_far, so_far_lse = out[rows], lse[rows]
    total = torch.logaddexp(so_far_lse, part_lse)
    so_far.mul_((so_far_lse - total).exp()[..., None]).addcmul_(part.to(out.dtype), (part_lse - total).exp()[..., None])
    lse[rows] = total
    if not isinstance(rows, slice):
        out[rows] = so_far


def segment_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    scale: float,
    rows: RowRanges | None = None,
    kernel: BlockKernel | None = None,
) -> Tensor:
    """Attention of `rows` (default: all) by blocks; `kernel` is chosen by device unless given."""
    kernel = _kernel(q_THD) if kernel is None else kernel
    calls = calls_of(segments, rows, q_THD.device, kernel.takes_levels)
    q_TKGD = q_THD.contiguous().unflatten(1, (k_TKD.shape[1], -1))
    out_TKGD: Tensor = _SegmentAttention.apply(q_TKGD, k_TKD.contiguous(), v_TKD.contiguous(), calls, kernel, scale)
    return out_TKGD.flatten(1, 2)


def _kernel(like: Tensor) -> BlockKernel:
    """The device switch."""
    if like.device.type == "cpu":
        return AtenFlash()
    from gyre_train.attn.flash import VarlenFlash

    return VarlenFlash()
