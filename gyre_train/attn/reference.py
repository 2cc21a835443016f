"""The oracle: a dense mask and a plain softmax. Runs anywhere in any dtype; takes memory by the square of the rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gyre_train.attn.blocks import RowRanges
from gyre_train.segment_table import Array, SegmentTable, subtree_ends

__all__ = ["dense_attention", "dense_mask", "row_ends", "row_numbers"]


def row_ends(segments: SegmentTable) -> Array:
    """Per row k the first row that no longer sees it; int64 [T]."""
    return np.repeat(subtree_ends(segments), segments.end_S - segments.start_S)


def row_numbers(segments: SegmentTable, rows: RowRanges | None) -> Array:
    """Per query its row in the pack, int64."""
    runs = ((0, segments.num_rows),) if rows is None else rows
    return np.concatenate([np.arange(start, end) for start, end in runs] or [np.zeros(0, np.int64)])


def dense_mask(segments: SegmentTable, device: torch.device | str = "cpu", rows: RowRanges | None = None) -> Tensor:
    """Bool [T, T], True where row q may see row k: k is not later, and q lies in the subtree of k's segment.

    With `rows` only these queries' rows of it.
    """
    end_T = torch.from_numpy(row_ends(segments)).to(device)
    key_T = torch.arange(segments.num_rows, device=device)
    query_Q = torch.from_numpy(row_numbers(segments, rows)).to(device)
    return (query_Q[:, None] >= key_T) & (query_Q[:, None] < end_T)


def dense_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    scale: float,
    rows: RowRanges | None = None,
) -> Tensor:
    """Attention by its definition."""
    num_rows, num_heads, head_dim = q_THD.shape
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    num_kv_heads = k_TKD.shape[1]
    q_KGTD = q_THD.to(wide).reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    k_K1TD, v_K1TD = (x.to(wide).permute(1, 0, 2)[:, None] for x in (k_TKD, v_TKD))
    scores_KGTT = (q_KGTD @ k_K1TD.transpose(-1, -2)) * scale
    scores_KGTT = scores_KGTT.masked_fill(~dense_mask(segments, q_THD.device, rows), float("-inf"))
    out_KGTD = scores_KGTT.softmax(-1) @ v_K1TD
    return out_KGTD.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim).to(q_THD.dtype)
