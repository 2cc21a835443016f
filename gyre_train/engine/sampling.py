"""Sampling parameters of one request, and drawing one token for each row of a batch.

A token's log-prob is taken in float32 after temperature and before top_k and top_p, as SGLang reports it. The draw
behind output token i depends on the request's seed and on i alone, so a batch-mate, a retraction or a restart of the
loop never changes what a seeded request draws.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gyre_data.errors import ConfigError

__all__ = ["SamplingParams", "draw", "parse_sampling", "sample_rows"]

_GREEDY_BELOW = 1e-6
_MASK_64 = (1 << 64) - 1

# Parameters that mean nothing here at these values; at another value the request is refused, never half-obeyed.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "custom_params": (None, {}),
}
_TEXT_ONLY = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What one request asks of the sampler."""

    max_new_tokens: int | None = 128
    """None means up to the context length."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary, 1 is greedy."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Ends at no token at all: neither the model's own stop tokens nor `stop_token_ids` (SGLang's rule)."""
    seed: int = 0


def parse_sampling(raw: Mapping[str, Any]) -> SamplingParams:
    """Read `sampling_params` of a request; ConfigError says which value cannot be obeyed."""
    own = {"max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "ignore_eos", "sampling_seed"}
    for name, value in raw.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise ConfigError(f"{name} is not supported by the embedded engine, got {value!r}: leave it out")
        elif name not in own and name not in _TEXT_ONLY:
            raise ConfigError(f"unknown sampling parameter {name!r}; known: {', '.join(sorted(own))}")
    temperature = _number(raw, "temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature must be a non-negative finite number, got {temperature}.")
    greedy = temperature < _GREEDY_BELOW
    top_p = _number(raw, "top_p", 1.0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be in (0, 1], got {top_p}.")
    top_k = _whole(raw, "top_k", -1)
    if top_k < 1 and top_k != -1 and not greedy:
        raise ConfigError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    max_new_tokens = _whole(raw, "max_new_tokens", 128) if raw.get("max_new_tokens", 128) is not None else None
    if max_new_tokens is not None and max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
    stop = raw.get("stop_token_ids") or []
    if not isinstance(stop, list) or not all(type(token) is int for token in stop):
        raise ConfigError(f"stop_token_ids must be a list of token ids, got {stop!r}")
    seed = raw.get("sampling_seed")
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"sampling_seed must be an integer in [-2**63, 2**63 - 1], got {seed!r}.")
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=1.0 if greedy else temperature,
        top_p=top_p,
        top_k=1 if greedy else max(top_k, 0),
        stop_token_ids=frozenset(stop),
        ignore_eos=bool(raw.get("ignore_eos")),
        seed=secrets.randbits(63) if seed is None else seed,
    )


def _number(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    return float(value)


def _whole(raw: Mapping[str, Any], name: str, default: int) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return value


def draw(seed: int, index: int) -> float:
    """A number in [0, 1) that is a function of the seed and the output position only (splitmix64)."""
    state = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK_64
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return (state >> 11) / float(1 << 53)


def sample_rows(
    logits_BV: torch.Tensor, params: Sequence[SamplingParams], draws: Sequence[float]
) -> list[tuple[int, float]]:
    """One (token id, log-prob) for each row of `logits_BV`, in row order."""
    logits_BV = logits_BV.float()
    if any(one.temperature != 1.0 for one in params):
        logits_BV = logits_BV / torch.tensor([[one.temperature] for one in params], dtype=torch.float32)
    logp_BV = torch.log_softmax(logits_BV, dim=-1).numpy()
    return [_pick(logp_BV[row], one, number) for row, (one, number) in enumerate(zip(params, draws, strict=True))]


def _pick(logp_V: np.ndarray, params: SamplingParams, number: float) -> tuple[int, float]:
    if params.top_k == 1:
        token = int(logp_V.argmax())
    elif params.top_k == 0 and params.top_p == 1.0:
        token = _invert(np.exp(logp_V, dtype=np.float64), number)
    else:
        order_V = np.argsort(-logp_V, kind="stable")
        if params.top_k:
            order_V = order_V[: params.top_k]
        weight_V = np.exp(logp_V[order_V], dtype=np.float64)
        before_V = np.cumsum(weight_V) - weight_V
        kept = max(1, int(np.count_nonzero(before_V <= params.top_p)))
        token = int(order_V[_invert(weight_V[:kept], number)])
    return token, float(logp_V[token])


def _invert(weight_V: np.ndarray, number: float) -> int:
    """The index whose share of the total weight covers `number`."""
    cumulative_V = np.cumsum(weight_V)
    return min(int(np.searchsorted(cumulative_V, number * cumulative_V[-1], side="right")), len(weight_V) - 1)
