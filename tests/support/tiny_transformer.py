"""A small decoder in plain torch (RoPE, grouped heads, qk-norm, SwiGLU) that runs packs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre_train.attn.api import tree_attention
from gyre_train.pack import Pack


@dataclass(frozen=True, kw_only=True)
class TinyTransformer:
    """Weights by name; small numbers, but every part a real decoder has."""

    vocab: int = 13
    hidden: int = 12
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    dtype: torch.dtype = torch.float64
    backend: str = "segments"
    seed: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        q, kv, h = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        shapes = {"embedding": (self.vocab, h), "head": (self.vocab, h), "norm": (h,)}
        for i in range(self.layers):
            shapes |= {f"{i}.q": (q, h), f"{i}.k": (kv, h), f"{i}.v": (kv, h), f"{i}.o": (h, q)}
            shapes |= {f"{i}.q_norm": (self.head_dim,), f"{i}.k_norm": (self.head_dim,)}
            shapes |= {f"{i}.gate": (2 * h, h), f"{i}.up": (2 * h, h), f"{i}.down": (h, 2 * h)}
            shapes |= {f"{i}.norm1": (h,), f"{i}.norm2": (h,)}
        for name, shape in shapes.items():
            value = torch.randn(*shape, generator=generator, dtype=torch.float64)
            value = 1 + 0.1 * value if "norm" in name else value * (1.0 if name == "embedding" else shape[-1] ** -0.5)
            self.weights[name] = value.to(self.dtype).requires_grad_()

    def logits(self, pack: Pack) -> Tensor:
        """Logits of the rows that have edges, [U, V]."""
        w = self.weights
        x = w["embedding"][torch.as_tensor(pack.ids_T)]
        for i in range(self.layers):
            x = x + self._attend(i, _norm(x, w[f"{i}.norm1"]), pack)
            y = _norm(x, w[f"{i}.norm2"])
            x = x + (F.silu(y @ w[f"{i}.gate"].T) * (y @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
        return _norm(x, w["norm"])[torch.as_tensor(pack.logit_row_U)] @ w["head"].T

    def _attend(self, i: int, x: Tensor, pack: Pack) -> Tensor:
        w = self.weights
        q, k, v = ((x @ w[f"{i}.{n}"].T).unflatten(-1, (-1, self.head_dim)) for n in "qkv")
        position_T = torch.as_tensor(pack.position_T)
        q, k = (_rope(_norm(y, w[f"{i}.{n}_norm"]), position_T) for n, y in (("q", q), ("k", k)))
        return tree_attention(q, k, v, pack.segments, backend=self.backend).flatten(1) @ w[f"{i}.o"].T

    def edge_logprobs(self, pack: Pack) -> Tensor:
        """Log-probability per loss edge."""
        return edge_logprobs(self.logits(pack), pack)

    def zero_grad(self) -> None:
        for weight in self.weights.values():
            weight.grad = None

    def gradients(self) -> dict[str, Tensor]:
        return {n: torch.zeros_like(w) if w.grad is None else w.grad.clone() for n, w in self.weights.items()}


def edge_logprobs(logits_UV: Tensor, pack: Pack) -> Tensor:
    """Log-probability of each edge's target at its temperature, from the logits of the rows that have edges."""
    scaled_EV = logits_UV[torch.as_tensor(pack.edge_logit_E)] / torch.as_tensor(pack.temperature_E)[:, None]
    scaled_EV = scaled_EV.to(logits_UV.dtype)
    return scaled_EV.log_softmax(-1).gather(1, torch.as_tensor(pack.target_id_E)[:, None])[:, 0]


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def _rope(x_THD: Tensor, position_T: Tensor) -> Tensor:
    half = x_THD.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.outer(position_T.to(torch.float64), frequency)[:, None, :]
    cos, sin = angle.cos().to(x_THD.dtype), angle.sin().to(x_THD.dtype)
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
