"""The loss on edges: sequence-clipped policy loss and plain SFT, as sums that do not depend on how the step was cut.

    L = 1/E sum_e 1/N_e sum_{t owned by e} w_t l_t

The functions return the un-normalised sums over the edges they are given (1/N_e is in `weight_E`, 1/E is not): add
the sums or gradients of all micro-steps, then multiply by `step_scale(E)` when the step closes. Shapes: E loss edges,
U rows with logits, V vocabulary, J trajectories. Log-probabilities are those of the edge's target at the edge's
temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from gyre_data.errors import AlignmentError, DataError
from gyre_train.pack import Pack

__all__ = [
    "CAP",
    "CLIP_HIGH",
    "CLIP_LOW",
    "Anchor",
    "Edges",
    "LossMetrics",
    "LossSum",
    "SequenceRatios",
    "SequenceSums",
    "edge_logprobs",
    "edges_of",
    "entropy_of",
    "inert_settings",
    "policy_loss",
    "sequence_ratios",
    "sequence_sums",
    "sft_loss",
    "step_scale",
]

CLIP_LOW, CLIP_HIGH = 0.995, 1.005
CAP = 5.0


class Anchor(StrEnum):
    """Whose log-probabilities are logp_old."""

    BURST = "burst"
    """The weights at the start of the burst."""
    STEP = "step"
    """The weights at the start of the optimiser step."""
    BEHAVIOUR = "behaviour"
    """The recorded ones of the engine that sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """A pack's loss edges as tensors on the device of the logits."""

    logit_E: Tensor
    """Index of the edge's row among the rows with logits."""
    target_E: Tensor
    trajectory_E: Tensor
    trajectory_tokens_E: Tensor
    temperature_E: Tensor
    advantage_E: Tensor
    logp_behaviour_E: Tensor
    logp_old_E: Tensor | None
    """None: the weights of this forward are the anchor."""
    weight_E: Tensor


def edges_of(
    pack: Pack,
    *,
    anchor: Anchor | str = Anchor.STEP,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Edges:
    """Tensors of a pack's edges, with logp_old chosen by the anchor (which SFT does not read).

    For `burst` and `step` it is the pack's logp_old, or None when the pack has none: the first step under new anchor
    weights needs no extra forward, since its own log-probabilities are the anchor's.
    """
    old = pack.logp_behaviour_E if Anchor(anchor) is Anchor.BEHAVIOUR else pack.logp_old_E

    def tensor(array: Any, kind: torch.dtype = dtype) -> Tensor:
        return torch.as_tensor(array, dtype=kind, device=device)

    return Edges(
        logit_E=tensor(pack.edge_logit_E, torch.int64),
        target_E=tensor(pack.target_id_E, torch.int64),
        trajectory_E=tensor(pack.trajectory_E, torch.int64),
        trajectory_tokens_E=tensor(pack.trajectory_tokens_E, torch.int64),
        temperature_E=tensor(pack.temperature_E),
        advantage_E=tensor(pack.advantage_E),
        logp_behaviour_E=tensor(pack.logp_behaviour_E),
        logp_old_E=None if old is None else tensor(old),
        weight_E=tensor(pack.weight_E),
    )


def edge_logprobs(logits_UV: Tensor, edges: Edges) -> Tensor:
    """Log-probability of each edge's target at its temperature, in the logits' dtype and at least float32."""
    wide = torch.promote_types(logits_UV.dtype, torch.float32)
    scaled_EV = logits_UV.to(wide)[edges.logit_E] / edges.temperature_E.to(wide)[:, None]
    target_E1 = edges.target_E[:, None]
    return scaled_EV.gather(1, target_E1)[:, 0] - scaled_EV.logsumexp(1)


@torch.no_grad()
def entropy_of(logits_UV: Tensor, edges: Edges) -> Tensor:
    """Entropy of the distribution each edge's target was drawn from; a metric, without gradient."""
    wide = torch.promote_types(logits_UV.dtype, torch.float32)
    logp_EV = (logits_UV.to(wide)[edges.logit_E] / edges.temperature_E.to(wide)[:, None]).log_softmax(1)
    return -(logp_EV.exp() * logp_EV).sum(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSums:
    """Per trajectory, the sum of log-ratios over the owned tokens seen so far; parts of one trajectory can be added."""

    trajectory_J: Tensor
    sum_J: Tensor
    count_J: Tensor
    total_J: Tensor
    """Owned tokens of the whole trajectory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRatios:
    """s per trajectory, complete and detached; `trajectory_J` ascends."""

    trajectory_J: Tensor
    ratio_J: Tensor


def sequence_sums(edges: Edges, logp_E: Tensor) -> SequenceSums:
    """First phase: this pack's share of every trajectory's log-ratio (no gradient)."""
    logp_E = logp_E.detach()
    _check_edges(edges, logp_E)
    log_ratio_E = logp_E - _old(edges, logp_E)
    trajectory_J, index_E = edges.trajectory_E.unique(return_inverse=True)
    zeros_J = log_ratio_E.new_zeros(len(trajectory_J))
    return SequenceSums(
        trajectory_J=trajectory_J,
        sum_J=zeros_J.index_add(0, index_E, log_ratio_E),
        count_J=torch.zeros_like(trajectory_J).index_add(0, index_E, torch.ones_like(index_E)),
        total_J=torch.zeros_like(trajectory_J).index_copy(0, index_E, edges.trajectory_tokens_E),
    )


def sequence_ratios(parts: Sequence[SequenceSums]) -> SequenceRatios:
    """s = exp(mean log-ratio over the owned tokens), from the sums of all packs that hold some of them.

    Raises DataError when a trajectory's tokens are not all there: its s would silently be another number.
    """
    if not parts:
        return SequenceRatios(trajectory_J=torch.zeros(0, dtype=torch.int64), ratio_J=torch.zeros(0))
    trajectory_J, index = torch.cat([part.trajectory_J for part in parts]).unique(return_inverse=True)
    sums = torch.cat([part.sum_J for part in parts])
    sum_J = sums.new_zeros(len(trajectory_J)).index_add(0, index, sums)
    count_J = torch.zeros_like(trajectory_J).index_add(0, index, torch.cat([part.count_J for part in parts]))
    total_J = torch.zeros_like(trajectory_J).index_copy(0, index, torch.cat([part.total_J for part in parts]))
    if not torch.equal(count_J, total_J):
        bad = int((count_J != total_J).nonzero()[0])
        raise DataError(
            f"wanted all {int(total_J[bad])} owned tokens of trajectory {int(trajectory_J[bad])}, got "
            f"{int(count_J[bad])}; sum sequence_sums over every pack that holds it before the loss"
        )
    return SequenceRatios(trajectory_J=trajectory_J, ratio_J=(sum_J / count_J).exp())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossMetrics:
    """Sums over edges, so that micro-steps and ranks add up; `means()` gives what is logged."""

    num_edges: Any = 0
    num_clipped: Any = 0
    """Edges whose sequence ratio is replaced by its bound (they give no gradient)."""
    num_capped: Any = 0
    """Edges whose importance weight is cut to the cap."""
    sum_ratio: Any = 0.0
    sum_weight: Any = 0.0
    sum_mismatch: Any = 0.0
    """|logp_old - logp_behaviour|: how far the anchor is from the engine that sampled."""
    sum_drift: Any = 0.0
    """logp_old - logp_new: a sample of the divergence from the anchor."""
    sum_entropy: Any = 0.0
    num_entropy: Any = 0

    def __add__(self, other: LossMetrics) -> LossMetrics:
        return LossMetrics(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def means(self) -> dict[str, float]:
        """Figures by name; entropy only where it was given."""
        n = max(float(self.num_edges), 1.0)
        out = {
            "clip_fraction": float(self.num_clipped) / n,
            "cap_fraction": float(self.num_capped) / n,
            "ratio": float(self.sum_ratio) / n,
            "importance": float(self.sum_weight) / n,
            "mismatch": float(self.sum_mismatch) / n,
            "drift": float(self.sum_drift) / n,
        }
        if float(self.num_entropy):
            out["entropy"] = float(self.sum_entropy) / float(self.num_entropy)
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSum:
    """sum_e 1/N_e sum_t over the edges given, before 1/E, with its metrics. Zero edges give a zero with a gradient."""

    loss: Tensor
    metrics: LossMetrics


def policy_loss(
    edges: Edges, logp_E: Tensor, ratios: SequenceRatios | None = None, *, entropy_E: Tensor | None = None
) -> LossSum:
    """Second phase: l_t = -min(s_t A, clip(s_t) A) with s_t = sg(s) exp(logp - sg(logp)), weighted by w_t / N_e.

    `ratios` may be left out when every trajectory lies whole in these edges (the planner's packs).
    """
    if ratios is None:
        ratios = sequence_ratios([sequence_sums(edges, logp_E)])
    else:
        _check_edges(edges, logp_E)
    now_E = logp_E.detach()
    old_E, behaviour_E = _old(edges, now_E), edges.logp_behaviour_E.to(now_E.dtype)
    if not bool(torch.isfinite(behaviour_E).all()):
        raise DataError(
            "policy loss: wanted a recorded log-probability for every owned token, "
            f"{int((~behaviour_E.isfinite()).sum())} are missing or not finite; exclude those calls, or set "
            "train.loss = sft"
        )
    at_E = torch.searchsorted(ratios.trajectory_J, edges.trajectory_E)
    if not bool(torch.isin(edges.trajectory_E, ratios.trajectory_J).all()):
        raise AlignmentError(
            "policy loss: wanted a sequence ratio for every trajectory; pass the ratios of these packs"
        )
    ratio_E = ratios.ratio_J[at_E].to(now_E.dtype)
    advantage_E = edges.advantage_E.to(now_E.dtype)

    high_E, low_E = ratio_E > CLIP_HIGH, ratio_E < CLIP_LOW
    clipped_E = ((advantage_E > 0) & high_E) | ((advantage_E < 0) & low_E)
    straight_E = ratio_E * (logp_E - now_E).exp()
    bounded_E = torch.where(clipped_E, ratio_E.clamp(CLIP_LOW, CLIP_HIGH), straight_E)
    importance_E = (old_E - behaviour_E).exp()
    weight_E = importance_E.clamp(max=CAP)
    loss = -(edges.weight_E.to(now_E.dtype) * weight_E * bounded_E * advantage_E).sum()
    metrics = LossMetrics(
        num_edges=len(now_E),
        num_clipped=clipped_E.sum(),
        num_capped=(importance_E > CAP).sum(),
        sum_ratio=ratio_E.sum(),
        sum_weight=weight_E.sum(),
        sum_mismatch=(old_E - behaviour_E).abs().sum(),
        sum_drift=(old_E - now_E).sum(),
        sum_entropy=0.0 if entropy_E is None else entropy_E.sum(),
        num_entropy=0 if entropy_E is None else len(entropy_E),
    )
    return LossSum(loss=loss, metrics=metrics)


def sft_loss(edges: Edges, logp_E: Tensor) -> LossSum:
    """Negative log-likelihood of the targets, weighted by 1/N_e; rewards and recorded values do not matter."""
    _check_length(edges, logp_E)
    loss = -(edges.weight_E.to(logp_E.dtype) * logp_E).sum()
    return LossSum(loss=loss, metrics=LossMetrics(num_edges=len(logp_E)))


def step_scale(num_executions: int) -> float:
    """1/E, the factor for the summed gradients when a step closes; 0 for an empty step, so nothing turns into NaN."""
    return 1.0 / num_executions if num_executions else 0.0


def inert_settings(anchor: Anchor | str, updates_per_anchor: int) -> tuple[str, ...]:
    """What of clip and cap can have no effect, in words for a warning at start; empty when both act.

    `updates_per_anchor` is K, the optimiser steps taken before the anchor is renewed.
    """
    anchor = Anchor(anchor)
    if anchor is Anchor.BEHAVIOUR:
        return (
            "train.anchor = behaviour: the importance weight is 1 everywhere, so its cap is inert; "
            "choose burst or step if the cap should act",
        )
    if anchor is Anchor.STEP or updates_per_anchor <= 1:
        return (
            f"train.anchor = {anchor} with one update per anchor: the sequence ratio is 1, so the clip is inert; take "
            "several steps per burst, or anchor = behaviour, if the clip should act",
        )
    return ()


def _old(edges: Edges, now_E: Tensor) -> Tensor:
    return now_E if edges.logp_old_E is None else edges.logp_old_E.to(now_E.dtype)


def _check_length(edges: Edges, logp_E: Tensor) -> None:
    if logp_E.shape != edges.target_E.shape:
        raise AlignmentError(
            f"loss: wanted {tuple(edges.target_E.shape)} log-probabilities, one per edge, got {tuple(logp_E.shape)}; "
            "compute them from the same pack"
        )


def _check_edges(edges: Edges, logp_E: Tensor) -> None:
    _check_length(edges, logp_E)
    if edges.logp_old_E is not None and not bool(torch.isfinite(edges.logp_old_E).all()):
        raise DataError(
            f"loss: wanted logp_old for every edge, {int((~edges.logp_old_E.isfinite()).sum())} are missing or not "
            "finite; fill them for all nodes of the step, or exclude the calls"
        )
