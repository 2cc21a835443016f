"""Both attention backends give the same values and gradients on random forests."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gyre_data.errors import AlignmentError, ConfigError
from gyre_train.attn.api import tree_attention
from gyre_train.attn.reference import dense_attention
from gyre_train.attn.segments import VarlenFlash, segment_attention
from gyre_train.pack import SegmentTable, TreeInput
from gyre_train.plan import plan
from tests.support.tree_inputs import forests, make_tree

torch.set_num_threads(1)


def tensors(num_rows: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, heads, 8), (num_rows, kv_heads, 8), (num_rows, kv_heads, 8), (num_rows, heads, 8)]
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(attend: object, table: SegmentTable, qkvg: list[Tensor], scale: float = 0.3) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in qkvg[:3])
    out = attend(q, k, v, table, scale)  # type: ignore[operator]
    out.backward(qkvg[3])
    return [out.detach(), q.grad, k.grad, v.grad]  # type: ignore[list-item]


def assert_close(came: list[Tensor], want: list[Tensor], bound: float) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), came, want, strict=True):
        assert a.dtype == b.dtype
        assert bool(a.isfinite().all())
        assert float((a.double() - b.double()).abs().max()) <= bound * float(b.double().abs().max()), name


@settings(max_examples=60, deadline=None)
@given(
    trees=forests(), heads=st.sampled_from([(1, 1), (4, 2), (4, 1), (3, 3)]), sharing=st.sampled_from(["tree", "rows"])
)
def test_segments_equal_the_dense_mask(trees: list[TreeInput], heads: tuple[int, int], sharing: str) -> None:
    (pack,) = plan(trees, tokens=10**6, sharing=sharing).packs
    qkvg = tensors(pack.num_tokens, torch.float64, *heads)
    want = with_gradients(dense_attention, pack.segments, qkvg)
    assert_close(with_gradients(segment_attention, pack.segments, qkvg), want, 1e-13)


def comb(turns: int) -> SegmentTable:
    """A trunk from which a side branch leaves at every turn."""
    parents, lengths, outputs, trunk = [-1], [40], [False], 0
    for _ in range(turns):
        parents += [trunk, trunk]
        lengths += [5, 20]
        outputs += [True, True]
        trunk = len(parents) - 1
    (pack,) = plan([make_tree(parents, lengths, outputs, keep=99)], tokens=10**6).packs
    return pack.segments


def test_float32_and_bfloat16_accumulate_in_float32() -> None:
    table = comb(30)
    exact = tensors(table.num_rows, torch.float64)
    for dtype, bound in ((torch.float32, 5e-6), (torch.bfloat16, 2e-2)):
        rounded = [x.to(dtype) for x in exact]
        want = with_gradients(dense_attention, table, [x.double() for x in rounded])
        assert_close(with_gradients(segment_attention, table, rounded), [x.to(dtype) for x in want], bound)


def test_memory_is_linear_in_the_rows() -> None:
    """Nothing of the size of the mask is saved for the backward pass."""
    table = comb(100)
    saved: list[int] = []
    q, k, v, _ = (x.requires_grad_() for x in tensors(table.num_rows, torch.float32))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        segment_attention(q, k, v, table, 0.3)
    assert sum(saved) <= table.num_rows * (4 * 8 * 2 + 2 * 8 * 2 + 4)


class FlashStandIn:
    """The two private functions of flash-attn 2.8.3 with their signatures, computed densely."""

    def _flash_attn_varlen_forward(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p)
        scores_HQK = self.scores(q, k, softmax_scale, causal)
        out = torch.einsum("hqk,khd->qhd", scores_HQK.softmax(-1), self.wide(v, q)).to(q.dtype)
        return out, scores_HQK.logsumexp(-1), None, None

    def _flash_attn_varlen_backward(
        self, dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        self.check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p)
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        assert softmax_lse.shape == (q.shape[1], len(q))
        assert softmax_lse.is_contiguous()
        groups = q.shape[1] // k.shape[1]
        p_HQK = (self.scores(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp()
        delta_HQ = (dout * out).sum(-1).T
        ds_HQK = p_HQK * (torch.einsum("qhd,khd->hqk", dout, self.wide(v, q)) - delta_HQ[..., None]) * softmax_scale
        dq.copy_(torch.einsum("hqk,khd->qhd", ds_HQK, self.wide(k, q)))
        dk.copy_(torch.einsum("hqk,qhd->khd", ds_HQK, q).unflatten(1, (-1, groups)).sum(2))
        dv.copy_(torch.einsum("hqk,qhd->khd", p_HQK, dout).unflatten(1, (-1, groups)).sum(2))
        return delta_HQ

    def check(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p) -> None:
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert [int(x) for x in cu_q] == [0, len(q)] == [0, max_q]
        assert [int(x) for x in cu_k] == [0, len(k)] == [0, max_k] == [0, len(v)]
        assert dropout_p == 0.0
        assert all(x.stride(-1) == 1 for x in (q, k, v))

    def wide(self, x: Tensor, q: Tensor) -> Tensor:
        return x.repeat_interleave(q.shape[1] // x.shape[1], 1)

    def scores(self, q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
        scores_HQK = torch.einsum("qhd,khd->hqk", q, self.wide(k, q)) * scale
        if causal:
            scores_HQK = scores_HQK.masked_fill(torch.ones(len(q), len(k)).triu(1).bool(), float("-inf"))
        return scores_HQK


def test_the_gpu_path_keeps_the_call_contract() -> None:
    kernel = VarlenFlash(FlashStandIn())
    table = comb(6)
    qkvg = tensors(table.num_rows, torch.float64)
    want = with_gradients(dense_attention, table, qkvg)
    came = with_gradients(lambda *args: segment_attention(*args, kernel=kernel), table, qkvg)
    assert_close(came, want, 1e-13)


def test_a_gpu_without_flash_attn_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flash_attn", None)
    with pytest.raises(ConfigError, match=r"install gyre-rl\[gpu\]"):
        VarlenFlash()


def test_wrong_shapes_and_names_are_refused() -> None:
    table = comb(1)
    q, k, v, _ = tensors(table.num_rows, torch.float32)
    with pytest.raises(AlignmentError, match="rows as in the segment table, got"):
        tree_attention(q[1:], k[1:], v[1:], table)
    with pytest.raises(AlignmentError, match="drop the batch axis"):
        tree_attention(q[None], k, v, table)
    with pytest.raises(AlignmentError, match="multiples of 2"):
        tree_attention(q[:, :3], k, v, table)
    with pytest.raises(AlignmentError, match="one dtype and device"):
        tree_attention(q, k.double(), v, table)
    with pytest.raises(ConfigError, match=r"pack\.attention: wanted one of reference, segments, got 'flash'"):
        tree_attention(q, k, v, table, backend="flash")


def test_no_rows_give_no_rows() -> None:
    none = np.zeros(0, np.int32)
    table = SegmentTable(start_S=none, end_S=none, parent_S=none)
    for backend in ("reference", "segments"):
        q, k, v, _ = tensors(0, torch.float32)
        assert tree_attention(q, k, v, table, backend=backend).shape == (0, 4, 8)
