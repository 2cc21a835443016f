"""PyTorch's FlexAttention under the tree mask, for GPUs without flash-attn and for dtypes that flash-attn lacks.

On a GPU it is compiled, once for all packs (`dynamic=True`). Unverified there: on CPU the forward pass runs uncompiled
(dense, slow) and is tested; the library has no backward pass for CPU.

Shapes: T rows, Q queries, I query tiles, J key tiles of `TILE` rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gyre_train.attn.blocks import RowRanges
from gyre_train.attn.memo import per_table
from gyre_train.attn.reference import row_ends, row_numbers
from gyre_train.segment_table import Array, SegmentTable

__all__ = ["TILE", "block_mask", "flex_tree_attention", "tiles_of"]

TILE = 128
"""Rows of a tile: the granularity at which dead cells are skipped."""


def tiles_of(segments: SegmentTable, rows: RowRanges | None = None) -> tuple[Array, Array]:
    """Bool [I, J] each: tiles with live and perhaps dead cells, and tiles in which every cell is live.

    From the mask `q >= k and q < end_k` by the extremes of each tile; memory is 1 / TILE ** 2 of the mask's.
    """
    row_Q, end_T = row_numbers(segments, rows), row_ends(segments)
    starts_I, starts_J = np.arange(0, len(row_Q), TILE), np.arange(0, len(end_T), TILE)
    if not len(starts_I):
        return (np.zeros((0, len(starts_J)), bool),) * 2
    first_I, last_I = row_Q[starts_I], row_Q[np.append(starts_I[1:], len(row_Q)) - 1]
    last_J = np.append(starts_J[1:], len(end_T)) - 1
    lowest_J, highest_J = np.minimum.reduceat(end_T, starts_J), np.maximum.reduceat(end_T, starts_J)
    live = (last_I[:, None] >= starts_J) & (first_I[:, None] < highest_J)
    full = (first_I[:, None] >= last_J) & (last_I[:, None] < lowest_J)
    return live & ~full, full


@per_table
def block_mask(segments: SegmentTable, rows: RowRanges | None, device: torch.device) -> BlockMask:
    """The tree mask in FlexAttention's form, without making it dense."""
    row_Q, end_T = (torch.from_numpy(x).to(device) for x in (row_numbers(segments, rows), row_ends(segments)))

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = row_Q[query]
        return (row >= key) & (row < end_T[key])

    def table(tiles_IJ: Array) -> tuple[Tensor, Tensor]:
        order_IJ = np.argsort(~tiles_IJ, axis=1, kind="stable")  # the tiles to visit first, in order
        num_I, order = (
            torch.from_numpy(x.astype(np.int32))[None, None].to(device) for x in (tiles_IJ.sum(1), order_IJ)
        )
        return num_I, order

    some_IJ, full_IJ = tiles_of(segments, rows)
    return BlockMask.from_kv_blocks(
        *table(some_IJ), *table(full_IJ), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(len(row_Q), len(end_T))
    )  # fmt: skip


def flex_tree_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    scale: float,
    rows: RowRanges | None = None,
) -> Tensor:
    """Attention of `rows` (default: all); without gradients on a CPU."""
    device = q_THD.device
    if not len(q_THD):
        return torch.zeros_like(q_THD)
    attend = flex_attention if device.type == "cpu" else _compiled()
    out: Tensor = attend(
        *(x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD)),
        block_mask=block_mask(segments, rows, device),
        scale=scale,
        enable_gqa=q_THD.shape[1] != k_TKD.shape[1],
    )
    return out[0].transpose(0, 1)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
