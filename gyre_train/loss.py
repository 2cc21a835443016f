"""The losses on edges, as sums that do not depend on how the step was cut.

    L   = 1/E sum_e 1/N_e sum_{t owned by e} (w_t l_t + kl k_t)
    l_t = -min(s_t A_t, clip(s_t, low, high) A_t)         A_t = advantage A_e + teacher (logp_teacher,t - logp_old,t)
    w_t = min(exp(logp_old,t - logp_behaviour,t), cap)    no gradient flows through w_t or A_t
    k_t = exp(logp_ref,t - logp_t) - (logp_ref,t - logp_t) - 1

    s_t = sg(s) exp(logp_t - sg(logp_t)),  s = exp(mean of (logp - logp_old)) over the tokens that `ratio` names:
    `sequence`   the owned tokens of the owner trajectory (design default; GSPO, arXiv 2507.18071, on trajectories)
    `execution`  all owned tokens of the execution (GSPO with sequence = execution)
    `token`      the token alone: s_t = exp(logp_t - logp_old,t), PPO's clip (arXiv 1707.06347) as GRPO uses it

w_t is truncated importance sampling for the distance between the anchor and the engine that sampled. k_t is the
low-variance estimate of KL(policy || reference) (J. Schulman, "Approximating KL divergence"). The teacher term is the
policy gradient of minus the reverse KL to the teacher (on-policy distillation).

The functions return the un-normalised sums over the edges they are given (1/N_e is in `weight_E`, 1/E is not): add
the sums or gradients of all micro-steps, then multiply by `step_scale(E)` when the step closes. Shapes: E loss edges,
J sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gyre_data.errors import AlignmentError, DataError
from gyre_train.config import LossConfig
from gyre_train.edges import Anchor, Edges
from gyre_train.figures import Figure, Figures, Mean

__all__ = [
    "LossSum",
    "SequenceRatios",
    "SequenceSums",
    "inert_settings",
    "policy_loss",
    "sequence_ratios",
    "sequence_sums",
    "sft_loss",
    "step_scale",
]

_DEFAULT = LossConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceSums:
    """Per sequence, the sum of log-ratios over the owned tokens seen so far; parts of one sequence can be added."""

    sequence_J: Tensor
    sum_J: Tensor
    count_J: Tensor
    total_J: Tensor
    """Owned tokens of the whole sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRatios:
    """s per sequence, complete and detached; `sequence_J` ascends."""

    sequence_J: Tensor
    ratio_J: Tensor


def sequence_sums(edges: Edges, logp_E: Tensor) -> SequenceSums:
    """First phase: this pack's share of every sequence's log-ratio (no gradient)."""
    logp_E = logp_E.detach()
    _check_edges(edges, logp_E)
    log_ratio_E = logp_E - _old(edges, logp_E)
    sequence_J, index_E = edges.sequence_E.unique(return_inverse=True)
    zeros_J = log_ratio_E.new_zeros(len(sequence_J))
    return SequenceSums(
        sequence_J=sequence_J,
        sum_J=zeros_J.index_add(0, index_E, log_ratio_E),
        count_J=torch.zeros_like(sequence_J).index_add(0, index_E, torch.ones_like(index_E)),
        total_J=torch.zeros_like(sequence_J).index_copy(0, index_E, edges.sequence_tokens_E),
    )


def sequence_ratios(parts: Sequence[SequenceSums]) -> SequenceRatios:
    """s = exp(mean log-ratio over the owned tokens), from the sums of all packs that hold some of them.

    Raises DataError when a sequence's tokens are not all there: its s would silently be another number.
    """
    if not parts:
        return SequenceRatios(sequence_J=torch.zeros(0, dtype=torch.int64), ratio_J=torch.zeros(0))
    sequence_J, index = torch.cat([part.sequence_J for part in parts]).unique(return_inverse=True)
    sums = torch.cat([part.sum_J for part in parts])
    sum_J = sums.new_zeros(len(sequence_J)).index_add(0, index, sums)
    count_J = torch.zeros_like(sequence_J).index_add(0, index, torch.cat([part.count_J for part in parts]))
    total_J = torch.zeros_like(sequence_J).index_copy(0, index, torch.cat([part.total_J for part in parts]))
    if not torch.equal(count_J, total_J):
        bad = int((count_J != total_J).nonzero()[0])
        raise DataError(
            f"wanted all {int(total_J[bad])} owned tokens of sequence {int(sequence_J[bad])}, got "
            f"{int(count_J[bad])}; sum sequence_sums over every pack that holds it before the loss"
        )
    return SequenceRatios(sequence_J=sequence_J, ratio_J=(sum_J / count_J).exp())


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSum:
    """sum_e 1/N_e sum_t over the edges given, before 1/E, with its figures. Zero edges give a zero with a gradient."""

    loss: Tensor
    figures: Figures


def policy_loss(
    edges: Edges, logp_E: Tensor, ratios: SequenceRatios | None = None, *, settings: LossConfig = _DEFAULT
) -> LossSum:
    """Second phase: the sum of (w_t l_t + kl k_t) / N_e.

    `ratios` may be left out when every sequence lies whole in these edges, and always for the ratio of tokens.
    """
    _check_edges(edges, logp_E)
    now_E = logp_E.detach()
    old_E = _old(edges, now_E)
    behaviour_E = _recorded(edges.logp_behaviour_E, now_E, "log-probability", "exclude those calls")
    ratio_E = _ratio(edges, now_E, old_E, ratios, settings)
    advantage_E = settings.advantage * edges.advantage_E.to(now_E.dtype)
    weight_E = edges.weight_E.to(now_E.dtype)
    figures: dict[str, Figure] = {}
    if settings.teacher:
        mend = "compute them with the teacher, or set loss.teacher = 0"
        gap_E = _recorded(edges.logp_teacher_E, now_E, "teacher log-probability", mend) - old_E
        advantage_E = advantage_E + settings.teacher * gap_E
        figures["teacher_gap"] = _mean(gap_E)

    low, high = settings.clip
    clipped_E = ((advantage_E > 0) & (ratio_E > high)) | ((advantage_E < 0) & (ratio_E < low))
    straight_E = ratio_E * (logp_E - now_E).exp()
    bounded_E = torch.where(clipped_E, ratio_E.clamp(low, high), straight_E)
    importance_E = (old_E - behaviour_E).exp()
    used_E = importance_E.clamp(max=settings.cap) if settings.cap else torch.ones_like(importance_E)
    loss = -(weight_E * used_E * bounded_E * advantage_E).sum()
    if settings.kl:
        if edges.logp_reference_E is None:
            raise AlignmentError("policy loss: wanted logp_reference for the KL penalty, got none; run the reference")
        ahead_E = edges.logp_reference_E.to(now_E.dtype) - logp_E
        kl_E = ahead_E.exp() - ahead_E - 1
        loss = loss + settings.kl * (weight_E * kl_E).sum()
        figures["kl"] = _mean(kl_E.detach())
    figures |= {
        "clip_fraction": _mean(clipped_E),
        "cap_fraction": _mean(importance_E > settings.cap if settings.cap else torch.zeros_like(clipped_E)),
        "ratio": _mean(ratio_E),
        "importance": _mean(used_E),
        "drift": _mean(old_E - now_E),
    }
    return LossSum(loss=loss, figures=figures)


def _ratio(edges: Edges, now_E: Tensor, old_E: Tensor, ratios: SequenceRatios | None, settings: LossConfig) -> Tensor:
    """s of each edge, detached."""
    if settings.kind == "token":
        return (now_E - old_E).exp()
    if ratios is None:
        ratios = sequence_ratios([sequence_sums(edges, now_E)])
    at_E = torch.searchsorted(ratios.sequence_J, edges.sequence_E)
    if not bool(torch.isin(edges.sequence_E, ratios.sequence_J).all()):
        raise AlignmentError("policy loss: wanted a ratio for every sequence; pass the ratios of these packs")
    return ratios.ratio_J[at_E].to(now_E.dtype)


def sft_loss(edges: Edges, logp_E: Tensor) -> LossSum:
    """Negative log-likelihood of the targets, weighted by 1/N_e; rewards and recorded values do not matter."""
    _check_length(edges, logp_E)
    return LossSum(loss=-(edges.weight_E.to(logp_E.dtype) * logp_E).sum(), figures={})


def step_scale(num_executions: int) -> float:
    """1/E, the factor for the summed gradients when a step closes; 0 for an empty step, so nothing turns into NaN."""
    return 1.0 / num_executions if num_executions else 0.0


def inert_settings(anchor: Anchor | str, updates_per_anchor: int, settings: LossConfig = _DEFAULT) -> tuple[str, ...]:
    """What of clip and cap can have no effect, in words for a warning at start; empty when both act.

    `updates_per_anchor` is K, the optimiser steps taken before the anchor is renewed.
    """
    anchor = Anchor(anchor)
    if anchor is Anchor.BEHAVIOUR and settings.cap:
        return (
            "train.anchor = behaviour: the importance weight is 1 everywhere, so its cap is inert; "
            "choose burst or step if the cap should act",
        )
    if anchor is Anchor.STEP or (anchor is Anchor.BURST and updates_per_anchor <= 1):
        return (
            f"train.anchor = {anchor} with one update per anchor: the policy ratio is 1, so the clip is inert; take "
            "several steps per burst, or anchor = behaviour, if the clip should act",
        )
    return ()


def _mean(value_E: Tensor) -> Mean:
    return Mean(amount=value_E.sum(), count=len(value_E))


def _old(edges: Edges, now_E: Tensor) -> Tensor:
    return now_E if edges.logp_old_E is None else edges.logp_old_E.to(now_E.dtype)


def _recorded(value_E: Tensor, now_E: Tensor, what: str, mend: str) -> Tensor:
    if not bool(torch.isfinite(value_E).all()):
        raise DataError(
            f"policy loss: wanted a recorded {what} for every owned token, {int((~value_E.isfinite()).sum())} are "
            f"missing or not finite; {mend}, or set loss.kind = sft"
        )
    return value_E.to(now_E.dtype)


def _check_length(edges: Edges, logp_E: Tensor) -> None:
    if logp_E.shape != edges.weight_E.shape:
        raise AlignmentError(
            f"loss: wanted {tuple(edges.weight_E.shape)} log-probabilities, one per edge, got {tuple(logp_E.shape)}; "
            "compute them from the same pack"
        )


def _check_edges(edges: Edges, logp_E: Tensor) -> None:
    _check_length(edges, logp_E)
    if edges.logp_old_E is not None and not bool(torch.isfinite(edges.logp_old_E).all()):
        raise DataError(
            f"loss: wanted logp_old for every edge, {int((~edges.logp_old_E.isfinite()).sum())} are missing or not "
            "finite; fill them for all nodes of the step, or exclude the calls"
        )
