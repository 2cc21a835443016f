"""flash-attn 2.8 behind the block kernel: one varlen call per level of blocks. The only file that imports flash_attn.

Unverified on a GPU: on CPU the call contract is tested against an emulation of the two functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gyre_data.errors import ConfigError
from gyre_data.installing import pip_install
from gyre_train.attn.segments import Call

__all__ = ["VarlenFlash"]


class VarlenFlash:
    """The library's functions below its autograd layer, since backward must get the merged output and log-sum-exp.

    They are private: flash-attn is pinned. Grouped heads are native; gradients come in the inputs' dtype and are
    summed by the caller in float32. The backward kernel adds up dq in no fixed order unless PyTorch's deterministic
    algorithms are switched on (`torch.use_deterministic_algorithms`).
    """

    takes_levels = True

    def __init__(self, functions: Any = None) -> None:
        if functions is None:
            try:
                from flash_attn import flash_attn_interface

                functions = flash_attn_interface
            except ImportError as error:
                raise ConfigError(
                    f"pack.attention = segments on a GPU: wanted flash-attn 2.8, found none; {pip_install('gpu')}, or "
                    "set pack.attention = flex"
                ) from error
        self._functions = functions

    def forward(self, call: Call, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """See BlockKernel."""
        head_dim = q.shape[3]
        if head_dim % 8 or head_dim > 256:
            raise ConfigError(
                "pack.attention = segments on a GPU: wanted a head dimension of up to 256 in steps of 8, the model has "
                f"{head_dim}; set pack.attention = flex"
            )
        out, lse_HT, *_ = self._functions._flash_attn_varlen_forward(
            q.flatten(1, 2), k, v, call.bounds_q, call.bounds_k, call.longest_q, call.longest_k, 0.0, scale, call.causal
        )
        return out.view_as(q), lse_HT.T.unflatten(1, q.shape[1:3])

    def backward(
        self, call: Call, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grad, query, out, dq_THD = (x.flatten(1, 2) for x in (grad, q, out, dq))  # views
        self._functions._flash_attn_varlen_backward(
            grad, query, k, v, out, lse.flatten(1, 2).T.contiguous(), dq_THD, dk, dv, call.bounds_q, call.bounds_k,
            call.longest_q, call.longest_k, 0.0, scale, call.causal, -1, -1, 0.0, None,
            torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv
