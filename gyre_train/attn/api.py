"""Attention over a packed tree: each row sees itself, earlier rows of its segment and all rows of its ancestors.

Shapes: T rows, Q query rows, H query heads, K key-value heads (H a multiple of K), D head dimension.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from gyre_data.errors import AlignmentError, ConfigError
from gyre_train.attn.blocks import RowRanges, check_ranges
from gyre_train.segment_table import SegmentTable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Backend", "RowRanges", "check_backend", "tree_attention"]


class Backend(StrEnum):
    """Implementations that give the same values."""

    REFERENCE = "reference"
    """A dense mask, any device and dtype; memory grows with the square of the rows."""
    SEGMENTS = "segments"
    """Flash kernels on blocks merged by log-sum-exp; memory grows with the rows. A GPU takes 16-bit dtypes only."""
    FLEX = "flex"
    """FlexAttention, compiled; a GPU's, since the library has no backward pass for CPU."""


def check_backend(backend: Backend | str, *, device: str, dtype: str, training: bool = True) -> Backend:
    """Refuse what the device cannot do: ConfigError. `device` and `dtype` as PyTorch spells them."""
    try:
        chosen = Backend(backend)
    except ValueError:
        raise ConfigError(
            f"pack.attention: wanted one of {', '.join(Backend)}, got {backend!r}; choose one of these"
        ) from None
    on_cpu = device.startswith("cpu")
    if chosen is Backend.FLEX and on_cpu and training:
        raise ConfigError(
            "pack.attention = flex: wanted a GPU for its backward pass, the device is cpu; set "
            "pack.attention = segments"
        )
    if chosen is Backend.SEGMENTS and not on_cpu and dtype not in ("bfloat16", "float16"):
        raise ConfigError(
            f"pack.attention = segments on a GPU: wanted bfloat16 for flash-attn, the model runs in {dtype}; set "
            "model.dtype = bfloat16 or pack.attention = flex"
        )
    return chosen


def tree_attention(
    q_QHD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    segments: SegmentTable,
    *,
    rows: RowRanges | None = None,
    backend: Backend | str = Backend.SEGMENTS,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention under the tree mask, [Q, H, D], differentiable once in q, k and v.

    Q = T unless `rows` names the runs of the pack's rows that q holds, one after the other: then k and v are still
    whole, and their gradients are these queries' shares, to be summed over the ranks that hold the others.
    `scale` defaults to D ** -0.5. Sums over keys are kept in float32 or better, whatever the dtype of the inputs.
    Raises AlignmentError for shapes that do not fit, ConfigError for a backend that cannot run here.
    """
    _check_shapes(q_QHD, k_TKD, v_TKD, segments, rows)
    scale = q_QHD.shape[2] ** -0.5 if scale is None else scale
    chosen = check_backend(
        backend,
        device=q_QHD.device.type,
        dtype=str(q_QHD.dtype).removeprefix("torch."),
        training=any(x.requires_grad for x in (q_QHD, k_TKD, v_TKD)),
    )
    if chosen is Backend.REFERENCE:
        from gyre_train.attn.reference import dense_attention as attend
    elif chosen is Backend.FLEX:
        from gyre_train.attn.flex import flex_tree_attention as attend
    else:
        from gyre_train.attn.segments import segment_attention as attend
    return attend(q_QHD, k_TKD, v_TKD, segments, scale, rows)


def _check_shapes(q_QHD: Tensor, k_TKD: Tensor, v_TKD: Tensor, segments: SegmentTable, rows: RowRanges | None) -> None:
    shapes = [tuple(x.shape) for x in (q_QHD, k_TKD, v_TKD)]
    if any(len(shape) != 3 for shape in shapes) or shapes[1] != shapes[2] or shapes[0][2] != shapes[1][2]:
        raise AlignmentError(f"attention: wanted q [Q, H, D] with k and v [T, K, D], got {shapes}; drop the batch axis")
    if len({(x.dtype, x.device) for x in (q_QHD, k_TKD, v_TKD)}) > 1:
        came = [f"{x.dtype} on {x.device}" for x in (q_QHD, k_TKD, v_TKD)]
        raise AlignmentError(f"attention: wanted one dtype and device, got {came}; cast before the call")
    if rows is not None:
        check_ranges(segments, rows)
    num_queries = segments.num_rows if rows is None else sum(end - start for start, end in rows)
    if len(q_QHD) != num_queries or len(k_TKD) != segments.num_rows:
        raise AlignmentError(
            f"attention: wanted {num_queries} queries and {segments.num_rows} keys as in the segment table, got "
            f"{len(q_QHD)} and {len(k_TKD)}; pass the same pack's"
        )
    if shapes[0][1] % shapes[1][1]:
        raise AlignmentError(
            f"attention: wanted query heads in multiples of {shapes[1][1]} key-value heads, got {shapes[0][1]}"
        )
