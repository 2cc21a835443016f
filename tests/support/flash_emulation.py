"""The two private functions of flash-attn 2.8.3 that `VarlenFlash` calls, in plain torch with their signatures.

One departure: for float64 inputs, which the library refuses, log-sum-exp is float64, so that equality can be tested
to float64's accuracy. Outputs and gradients come in the inputs' dtype, as in the library.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

calls: list[int] = []
"""Sequences of each call so far; a test clears it."""


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p)
    assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
    assert (return_softmax, block_table, leftpad_k, seqused_k, zero_tensors) == (False, None, None, None, False)
    out, lse_HT = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=_wide(q))
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        scores_HQK = _scores(q[rows], k[keys], softmax_scale, causal)
        out[rows] = torch.einsum("hqk,khd->qhd", scores_HQK.softmax(-1), _grouped(v[keys], q)).to(q.dtype)
        lse_HT[:, rows] = scores_HQK.logsumexp(-1)
    return out, lse_HT, torch.empty(0, dtype=q.dtype), torch.empty(2, dtype=torch.int64)


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
    rng_state=None, zero_tensors=False,
):  # fmt: skip
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p)
    assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
    assert isinstance(deterministic, bool)
    assert rng_state is None
    assert not zero_tensors
    assert softmax_lse.shape == (q.shape[1], len(q))
    assert softmax_lse.dtype == _wide(q)
    assert softmax_lse.is_contiguous()
    for given, like in ((dout, q), (out, q), (dq, q), (dk, k), (dv, v)):
        assert given.shape == like.shape
        assert given.dtype == q.dtype
        assert given.stride(-1) == 1
    groups, wide = q.shape[1] // k.shape[1], _wide(q)
    dout, out = dout.to(wide), out.to(wide)
    delta_HT = (dout * out).sum(-1).T.contiguous()
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        p_HQK = (_scores(q[rows], k[keys], softmax_scale, causal) - softmax_lse[:, rows, None]).exp()
        dp_HQK = torch.einsum("qhd,khd->hqk", dout[rows], _grouped(v[keys], q))
        ds_HQK = p_HQK * (dp_HQK - delta_HT[:, rows, None]) * softmax_scale
        dq[rows] = torch.einsum("hqk,khd->qhd", ds_HQK, _grouped(k[keys], q)).to(q.dtype)
        dk[keys] = torch.einsum("hqk,qhd->khd", ds_HQK, q[rows].to(wide)).unflatten(1, (-1, groups)).sum(2).to(q.dtype)
        dv[keys] = torch.einsum("hqk,qhd->khd", p_HQK, dout[rows]).unflatten(1, (-1, groups)).sum(2).to(q.dtype)
    return delta_HT


def _check(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p) -> None:
    assert q.ndim == k.ndim == v.ndim == 3
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0
    assert q.dtype == k.dtype == v.dtype
    for bounds, longest, x in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        assert isinstance(longest, int)
        assert int(bounds[0]) == 0
        assert int(bounds[-1]) == len(x)
        assert int(bounds.diff().min()) > 0  # the library leaves rows without keys at a log-sum-exp of infinity
        assert int(bounds.diff().max()) == longest
        assert x.stride(-1) == 1
    assert len(cu_q) == len(cu_k)
    assert dropout_p == 0.0
    calls.append(len(cu_q) - 1)


def _sequences(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for i in range(len(cu_q) - 1):
        yield slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _grouped(x: Tensor, q: Tensor) -> Tensor:
    return x.to(_wide(x)).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Float32 or better; a causal mask is aligned at the last row and key, as in the library since 2.1."""
    scores_HQK = torch.einsum("qhd,khd->hqk", q.to(_wide(q)), _grouped(k, q)) * scale
    if causal:
        dead = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
        scores_HQK = scores_HQK.masked_fill(dead, float("-inf"))
    return scores_HQK
