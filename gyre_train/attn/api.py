"""Attention over a packed tree: each row sees itself, earlier rows of its segment and all rows of its ancestors.

Shapes: T rows, H query heads, K key-value heads (H a multiple of K), D head dimension.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from gyre_data.errors import AlignmentError, ConfigError
from gyre_train.segment_table import SegmentTable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Backend", "tree_attention"]


class Backend(StrEnum):
    """Implementations that give the same values."""

    REFERENCE = "reference"
    """A dense mask, any device and dtype; memory grows with the square of the rows."""
    SEGMENTS = "segments"
    """Flash kernels on blocks merged by log-sum-exp; memory grows with the rows."""


def tree_attention(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    *,
    backend: Backend | str = Backend.SEGMENTS,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention under the tree mask, [T, H, D], differentiable once in q, k and v.

    `scale` defaults to D ** -0.5. Sums over keys are kept in float32 or better, whatever the dtype of the inputs.
    """
    num_rows, num_heads, head_dim = _check_shapes(q_THD, k_TKD, v_TKD)
    if num_rows != segments.num_rows:
        raise AlignmentError(
            f"attention: wanted {segments.num_rows} rows as in the segment table, got {num_rows}; pass the same pack's"
        )
    if num_heads % k_TKD.shape[1]:
        raise AlignmentError(
            f"attention: wanted query heads in multiples of {k_TKD.shape[1]} key-value heads, got {num_heads}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    try:
        chosen = Backend(backend)
    except ValueError:
        raise ConfigError(
            f"pack.attention: wanted one of {', '.join(Backend)}, got {backend!r}; choose one of these"
        ) from None
    if chosen is Backend.REFERENCE:
        from gyre_train.attn.reference import dense_attention

        return dense_attention(q_THD, k_TKD, v_TKD, segments, scale)
    from gyre_train.attn.segments import segment_attention

    return segment_attention(q_THD, k_TKD, v_TKD, segments, scale)


def _check_shapes(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[int, int, int]:
    shapes = [tuple(x.shape) for x in (q_THD, k_TKD, v_TKD)]
    if any(len(shape) != 3 for shape in shapes) or shapes[1] != shapes[2] or shapes[0][::2] != shapes[1][::2]:
        raise AlignmentError(f"attention: wanted q [T, H, D] with k and v [T, K, D], got {shapes}; drop the batch axis")
    if len({(x.dtype, x.device) for x in (q_THD, k_TKD, v_TKD)}) > 1:
        came = [f"{x.dtype} on {x.device}" for x in (q_THD, k_TKD, v_TKD)]
        raise AlignmentError(f"attention: wanted one dtype and device, got {came}; cast before the call")
    num_rows, num_heads, head_dim = shapes[0]
    return num_rows, num_heads, head_dim
