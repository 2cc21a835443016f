"""The oracle: a dense mask and a plain softmax. Runs anywhere in any dtype; takes memory by the square of the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gyre_train.segment_table import SegmentTable, subtree_ends

__all__ = ["dense_attention", "dense_mask"]


def dense_mask(segments: SegmentTable, device: torch.device | str = "cpu") -> Tensor:
    """Bool [T, T], True where row q may see row k: k is not later, and q lies in the subtree of k's segment."""
    size_S = torch.as_tensor(segments.end_S - segments.start_S, device=device, dtype=torch.int64)
    end_T = torch.as_tensor(subtree_ends(segments), device=device).repeat_interleave(size_S)
    row_T = torch.arange(segments.num_rows, device=device)
    return (row_T[:, None] >= row_T[None, :]) & (row_T[:, None] < end_T[None, :])


def dense_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: SegmentTable, scale: float) -> Tensor:
    """Attention by its definition."""
    num_rows, num_heads, head_dim = q_THD.shape
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    num_kv_heads = k_TKD.shape[1]
    q_KGTD = q_THD.to(wide).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    k_K1TD, v_K1TD = (x.to(wide).permute(1, 0, 2)[:, None] for x in (k_TKD, v_TKD))
    scores_KGTT = (q_KGTD @ k_K1TD.transpose(-1, -2)) * scale
    scores_KGTT = scores_KGTT.masked_fill(~dense_mask(segments, q_THD.device), float("-inf"))
    out_KGTD = scores_KGTT.softmax(-1) @ v_K1TD
    return out_KGTD.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim).to(q_THD.dtype)
