"""Tree attention from flash kernels: blocks merged by log-sum-exp, exact backward, memory linear in the rows.

A *chain* is a run of segments in which each follows its parent without a gap; inside a chain the mask is plain
causal. All rows below a fork see the forked chain from its first row to the fork, in full. So the mask is one causal
block per chain and one full block per fork, and the calls grow with the branch points, not with the depth. Backward
runs the kernels' own backward per block with the *merged* output and log-sum-exp, which makes each block's share of
the gradient exact.

Shapes: T rows, H query heads, K key-value heads, G = H / K, D head dimension. Blocks of rows are plain slices:
nothing is gathered or copied, and key-value heads are never expanded in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gyre_data.errors import ConfigError
from gyre_train.segment_table import SegmentTable, subtree_ends

__all__ = ["AtenFlash", "Block", "BlockKernel", "VarlenFlash", "blocks_of", "segment_attention"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Rows [q_start, q_end) against keys [k_start, k_end): causal against themselves, or all of an ancestor range."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool


def blocks_of(segments: SegmentTable) -> tuple[Block, ...]:
    """The mask as blocks: one causal per chain first, then the full ones; together they tile the live cells once."""
    ends_S = subtree_ends(segments)
    chain_start: list[int] = []  # per segment, the first row of its chain
    causal: dict[int, int] = {}  # first row of a chain -> its end
    full: list[Block] = []
    for segment, (start, end, parent) in enumerate(
        zip(segments.start_S, segments.end_S, segments.parent_S, strict=True)
    ):
        # Depth first, so the next segment is the first child if there is one, and goes on in this chain.
        first = chain_start[parent] if parent >= 0 and parent == segment - 1 else int(start)
        chain_start.append(first)
        causal[first] = int(end)
        if segment + 1 < len(ends_S) and segments.parent_S[segment + 1] == segment:
            others = int(ends_S[segment + 1]), int(ends_S[segment])  # the rows of all other children's subtrees
            if others[0] < others[1]:
                full.append(Block(q_start=others[0], q_end=others[1], k_start=first, k_end=int(end), causal=False))
    own = (Block(q_start=s, q_end=e, k_start=s, k_end=e, causal=True) for s, e in causal.items())
    return (*own, *full)


class BlockKernel(Protocol):
    """Dense attention of one block. Log-sum-exp is [T, H], float32 or better."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Output [T, H, D] and log-sum-exp [T, H]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v for this block, given the output and log-sum-exp merged over all blocks."""
        ...


class AtenFlash:
    """PyTorch's CPU flash kernels (private operators: torch is pinned and a test holds their contract)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        groups = q.shape[1] // k.shape[1]
        out_KGTD, lse_KGT = op(_queries(q, groups), _keys(k, groups), _keys(v, groups), 0.0, causal, scale=scale)
        return _rows(out_KGTD), lse_KGT.flatten(0, 1).T

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        groups = q.shape[1] // k.shape[1]
        lse_KGT = lse.T.unflatten(0, (k.shape[1], groups))
        dq_KGTD, dk_KGTD, dv_KGTD = op(
            _queries(grad, groups), _queries(q, groups), _keys(k, groups), _keys(v, groups), _queries(out, groups),
            lse_KGT, 0.0, causal, scale=scale,
        )  # fmt: skip
        wide = torch.promote_types(q.dtype, torch.float32)
        dk, dv = (x.sum(1, dtype=wide).permute(1, 0, 2) for x in (dk_KGTD, dv_KGTD))
        return _rows(dq_KGTD), dk, dv


def _queries(x_THD: Tensor, groups: int) -> Tensor:
    """[K, G, T, D]: key-value heads take the place of the batch."""
    return x_THD.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)


def _keys(x_TKD: Tensor, groups: int) -> Tensor:
    """[K, G, T, D] with stride 0 over G: grouped heads share the memory."""
    return x_TKD.permute(1, 0, 2)[:, None].expand(-1, groups, -1, -1)


def _rows(x_KGTD: Tensor) -> Tensor:
    return x_KGTD.permute(2, 0, 1, 3).flatten(1, 2)


class VarlenFlash:
    """flash-attn 2.8 varlen kernels, one sequence a call. Unverified on a GPU: only the call contract is tested."""

    def __init__(self, functions: Any = None) -> None:
        if functions is None:
            try:
                from flash_attn import flash_attn_interface

                functions = flash_attn_interface
            except ImportError as error:
                raise ConfigError(
                    "pack.attention = segments on a GPU: wanted flash-attn 2.8, found none; install gyre-rl[gpu], or "
                    "set pack.attention = reference"
                ) from error
        self._functions = functions

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        out, lse_HT, *_ = self._functions._flash_attn_varlen_forward(
            q, k, v, _bounds(q), _bounds(k), len(q), len(k), 0.0, scale, causal
        )
        return out, lse_HT.T

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._functions._flash_attn_varlen_backward(
            grad.contiguous(), q, k, v, out, lse.T.contiguous(), dq, dk, dv, _bounds(q), _bounds(k), len(q), len(k),
            0.0, scale, causal, -1, -1, 0.0, None, False,
        )  # fmt: skip
        return dq, dk, dv


def _bounds(x: Tensor) -> Tensor:
    return torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)


def _kernel(device: torch.device) -> BlockKernel:
    """The device switch."""
    return AtenFlash() if device.type == "cpu" else VarlenFlash()


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: tuple[Block, ...], kernel: BlockKernel, scale: float
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.empty_like(q, dtype=wide)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for block in blocks:
            rows, keys = slice(block.q_start, block.q_end), slice(block.k_start, block.k_end)
            part, part_lse = kernel.forward(q[rows], k[keys], v[keys], block.causal, scale)
            if block.causal:  # the causal blocks come first and tile the rows
                out[rows], lse[rows] = part.to(wide), part_lse.to(wide)
                continue
            total = torch.logaddexp(lse[rows], part_lse.to(wide))
            out[rows] = out[rows] * (lse[rows] - total).exp()[..., None] + part * (part_lse - total).exp()[..., None]
            lse[rows] = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.kernel, ctx.scale = blocks, kernel, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
        for block in ctx.blocks:
            rows, keys = slice(block.q_start, block.q_end), slice(block.k_start, block.k_end)
            part_q, part_k, part_v = ctx.kernel.backward(
                grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], block.causal, ctx.scale
            )
            dq[rows] += part_q
            dk[keys] += part_k
            dv[keys] += part_v
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def segment_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    scale: float,
    kernel: BlockKernel | None = None,
) -> Tensor:
    """Attention by blocks; `kernel` is chosen by device unless given."""
    kernel = _kernel(q_THD.device) if kernel is None else kernel
    contiguous = (x.contiguous() for x in (q_THD, k_TKD, v_TKD))
    return _SegmentAttention.apply(*contiguous, blocks_of(segments), kernel, scale)
