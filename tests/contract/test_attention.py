"""What every attention backend must do: `tree_attention` says it, `reference` is its definition.

FlexAttention has no backward pass on CPU, so only its output is compared. flash-attn is compared through an emulation
of its functions, which says nothing about its kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre_data.errors import AlignmentError, ConfigError
from gyre_train.attn.api import Backend, RowRanges, check_backend, tree_attention
from gyre_train.attn.flash import VarlenFlash
from gyre_train.attn.flex import TILE, flex_tree_attention, tiles_of
from gyre_train.attn.reference import dense_attention, dense_mask
from gyre_train.attn.segments import segment_attention
from gyre_train.segment_table import SegmentTable
from tests.support import flash_emulation
from tests.support.faults import ancestor_left_out
from tests.support.segment_tables import comb, ladder, row_ranges, segment_tables, table_of

torch.set_num_threads(1)

Attend = Callable[..., Tensor]


def through_flash(
    q: Tensor, k: Tensor, v: Tensor, table: SegmentTable, scale: float, rows: RowRanges | None = None
) -> Tensor:
    return segment_attention(q, k, v, table, scale, rows, VarlenFlash(flash_emulation))


BACKENDS: dict[str, Attend] = {"segments": segment_attention, "segments, flash-attn": through_flash}
every_backend = pytest.mark.parametrize("attend", BACKENDS.values(), ids=BACKENDS)


def inputs(
    num_rows: int, dtype: torch.dtype, heads: tuple[int, int] = (4, 2), head_dim: int = 8, queries: int | None = None
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    num_q = num_rows if queries is None else queries
    shapes = [(num_q, heads[0]), (num_rows, heads[1]), (num_rows, heads[1]), (num_q, heads[0])]
    return [torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def values(attend: Attend, table: SegmentTable, qkvg: list[Tensor], rows: RowRanges | None = None) -> list[Tensor]:
    """Output and gradients."""
    q, k, v = (x.clone().requires_grad_() for x in qkvg[:3])
    out = attend(q, k, v, table, 0.3, rows)
    out.backward(qkvg[3])
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def assert_close(came: list[Tensor], want: list[Tensor], bound: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv")[: len(want)], came, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert bool(a.isfinite().all())
        largest = max(float(b.double().abs().max()), 1e-2)  # dq is zero in a tree of single rows
        assert float((a.double() - b.double()).abs().max()) <= bound * largest, name


@every_backend
@settings(max_examples=25, deadline=None)
@given(
    table=segment_tables(),
    heads=st.sampled_from([(1, 1), (4, 2), (4, 1), (3, 3), (6, 2)]),
    dim=st.sampled_from([8, 16, 24]),
)
def test_equals_the_reference(attend: Attend, table: SegmentTable, heads: tuple[int, int], dim: int) -> None:
    qkvg = inputs(table.num_rows, torch.float64, heads, dim)
    assert_close(values(attend, table, qkvg), values(dense_attention, table, qkvg), 1e-12)


@every_backend
@settings(max_examples=25, deadline=None)
@given(data=st.data(), table=segment_tables())
def test_rows_of_one_rank_equal_the_references(attend: Attend, data: st.DataObject, table: SegmentTable) -> None:
    rows = data.draw(row_ranges(table))
    qkvg = inputs(table.num_rows, torch.float64, queries=sum(end - start for start, end in rows))
    assert_close(values(attend, table, qkvg, rows), values(dense_attention, table, qkvg, rows), 1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("attend", [*BACKENDS.values(), flex_tree_attention], ids=[*BACKENDS, "flex"])
@settings(max_examples=5, deadline=None)
@given(table=segment_tables().filter(lambda table: bool((table.parent_S >= 0).any())))
def test_an_ancestor_left_out_is_seen(attend: Attend, table: SegmentTable) -> None:
    """Of the whole mask, and of the rows of one rank."""
    wrong = ancestor_left_out(table, int(np.flatnonzero(table.parent_S >= 0)[-1]))
    for rows in (None, ((0, table.num_rows),)):
        q, k, v, _ = inputs(table.num_rows, torch.float64)
        wanted = dense_attention(q, k, v, table, 0.3, rows)
        assert_close([attend(q, k, v, table, 0.3, rows)], [wanted], 1e-12)
        with pytest.raises(AssertionError, match="out"):
            assert_close([attend(q, k, v, wrong, 0.3, rows)], [wanted], 1e-12)


@pytest.mark.parametrize("attend", [dense_attention, segment_attention, through_flash])
def test_ranks_add_up_to_the_whole(attend: Attend) -> None:
    """Each rank's rows are the whole's, and its gradients of the gathered keys and values are its share."""
    table = comb(7)
    q, k, v, grad = inputs(table.num_rows, torch.float64)
    whole = values(attend, table, [q, k, v, grad])
    cut = [table.num_rows * i // 4 for i in range(5)]
    ranks: list[RowRanges] = [((cut[0], cut[1]), (cut[3], cut[4])), ((cut[1], cut[2]), (cut[2], cut[3]))]
    shares = [torch.zeros_like(x) for x in (k, v)]
    for rows in ranks:
        mine = torch.cat([torch.arange(*run) for run in rows])
        out, dq, dk, dv = values(attend, table, [q[mine], k, v, grad[mine]], rows)
        assert_close([out, dq], [x[mine] for x in whole[:2]], 1e-13)
        shares[0] += dk
        shares[1] += dv
    assert_close([*whole[:2], *shares], whole, 1e-13)


def test_grouped_heads_with_more_threads_than_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the CPU kernels spread over the query heads; otherwise a group is one longer run of queries."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    table = comb(7)
    for heads in ((4, 2), (6, 3)):
        qkvg = inputs(table.num_rows, torch.float64, heads)
        assert_close(values(segment_attention, table, qkvg), values(dense_attention, table, qkvg), 1e-12)


@every_backend
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_narrow_dtypes_come_close(attend: Attend, dtype: torch.dtype, bound: float) -> None:
    table = comb(40)
    rounded = [x.to(dtype) for x in inputs(table.num_rows, torch.float64)]
    want = values(dense_attention, table, [x.double() for x in rounded])
    assert_close(values(attend, table, rounded), [x.to(dtype) for x in want], bound)


@pytest.mark.parametrize("table", [comb(40), ladder(60)], ids=["shares of a key", "shares of a query"])
def test_sums_over_blocks_are_kept_in_float32(table: SegmentTable) -> None:
    """Each block's share is rounded to 16 bits by the kernel; summed in 16 bits the error would double at least."""
    rounded = [x.bfloat16() for x in inputs(table.num_rows, torch.float64)]
    want = values(dense_attention, table, [x.double() for x in rounded])
    for a, b in zip(values(through_flash, table, rounded), want, strict=True):
        assert float((a.double() - b).norm()) <= 3.2e-3 * float(b.norm())


@every_backend
def test_twice_the_same_bits(attend: Attend) -> None:
    table = comb(9)
    first, second = (values(attend, table, inputs(table.num_rows, torch.float32)) for _ in range(2))
    assert all(bool((a == b).all()) for a, b in zip(first, second, strict=True))


@every_backend
def test_memory_is_linear_in_the_rows(attend: Attend) -> None:
    """Bytes kept for the backward pass at two lengths, and at two numbers of forks."""

    def kept(table: SegmentTable) -> float:
        saved: list[int] = []
        q, k, v, _ = (x.requires_grad_() for x in inputs(table.num_rows, torch.float32))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            attend(q, k, v, table, 0.3)
        return sum(saved) / table.num_rows

    per_row = 4 * (2 * 4 * 8 + 2 * 2 * 8 + 4)  # q, out, k, v, log-sum-exp
    for turns in (10, 40, 160):
        assert kept(comb(turns)) == per_row
    assert kept(table_of([500], [-1])) == per_row


def test_flash_gets_a_few_calls_whatever_the_number_of_forks() -> None:
    table = comb(100)
    flash_emulation.calls.clear()
    values(through_flash, table, inputs(table.num_rows, torch.float64))
    assert len(flash_emulation.calls) == 2 * (1 + 7)  # forward and backward: the causal call and log2(100) levels
    assert sum(flash_emulation.calls) == 2 * (101 + 100)


@pytest.mark.parametrize("backend", Backend)
def test_no_rows_give_no_rows(backend: Backend) -> None:
    q, k, v, _ = inputs(0, torch.float32)
    assert tree_attention(q, k, v, table_of([], []), backend=backend).shape == (0, 4, 8)


def test_no_rows_have_empty_gradients() -> None:
    table = table_of([], [])
    for attend in BACKENDS.values():
        assert [len(x) for x in values(attend, table, inputs(0, torch.float32))] == [0] * 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # slow, and here only tested
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
@settings(max_examples=3, deadline=None)
@given(data=st.data(), table=segment_tables())
def test_flex_gives_the_references_output(
    dtype: torch.dtype, bound: float, data: st.DataObject, table: SegmentTable
) -> None:
    rows = data.draw(st.sampled_from([None, data.draw(row_ranges(table))]))
    queries = table.num_rows if rows is None else sum(end - start for start, end in rows)
    q, k, v, _ = inputs(table.num_rows, dtype, queries=queries)
    came = tree_attention(q, k, v, table, rows=rows, backend="flex", scale=0.3)
    assert_close([came], [dense_attention(q, k, v, table, 0.3, rows)], bound)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), table=segment_tables(), stretch=st.sampled_from([1, 40, 130]))
def test_flex_visits_the_live_tiles(data: st.DataObject, table: SegmentTable, stretch: int) -> None:
    """Every live cell lies in a visited tile, and unmasked tiles hold live cells only; without ranges, exactly so."""
    table = SegmentTable(start_S=table.start_S * stretch, end_S=table.end_S * stretch, parent_S=table.parent_S)
    for rows in (None, data.draw(row_ranges(table))):
        partial, full = tiles_of(table, rows)
        mask = dense_mask(table, rows=rows).numpy()
        for i, j in np.ndindex(partial.shape):
            cells = mask[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert full[i, j] <= cells.all()
            assert (partial[i, j] or full[i, j]) >= cells.any()
            if rows is None:
                assert (full[i, j], partial[i, j]) == (cells.all(), cells.any() and not cells.all())


def test_a_gpu_without_flash_attn_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[gpu\]"):
        VarlenFlash()


def test_a_device_that_cannot_is_refused() -> None:
    table = comb(1)
    q, k, v, _ = inputs(table.num_rows, torch.float32, head_dim=12)
    with pytest.raises(ConfigError, match=r"flex: wanted a GPU .* set pack\.attention = segments"):
        tree_attention(q.requires_grad_(), k, v, table, backend="flex")
    with pytest.raises(ConfigError, match=r"wanted bfloat16 for flash-attn, .* float32; set model\.dtype"):
        check_backend("segments", device="cuda:0", dtype="float32")
    with pytest.raises(ConfigError, match=r"up to 256 in steps of 8, the model has 12; set pack\.attention = flex"):
        through_flash(q, k, v, table, 0.3)


def test_wrong_shapes_and_names_are_refused() -> None:
    table = comb(1)
    q, k, v, _ = inputs(table.num_rows, torch.float32)
    with pytest.raises(AlignmentError, match="as in the segment table, got"):
        tree_attention(q[1:], k[1:], v[1:], table)
    with pytest.raises(AlignmentError, match="wanted 5 queries and 65 keys"):
        tree_attention(q, k, v, table, rows=((1, 4), (6, 8)))
    for rows in (((0, 2), (1, 3)), ((2, 2),), ((60, 66),), ((-1, 3),)):
        with pytest.raises(AlignmentError, match="ascending"):
            tree_attention(q, k, v, table, rows=rows)
    with pytest.raises(AlignmentError, match="drop the batch axis"):
        tree_attention(q[None], k, v, table)
    with pytest.raises(AlignmentError, match="multiples of 2"):
        tree_attention(q[:, :3], k, v, table)
    with pytest.raises(AlignmentError, match="one dtype and device"):
        tree_attention(q, k.double(), v, table)
    with pytest.raises(ConfigError, match=r"pack\.attention: wanted one of reference, segments, flex, got 'flash'"):
        tree_attention(q, k, v, table, backend="flash")
