"""A pack's loss edges as tensors: what the loss reads of each trained token, chosen by anchor and kind of ratio.

Shapes: E loss edges. Log-probabilities are those of the edge's target at the edge's temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from gyre_train.pack import Pack

__all__ = ["Anchor", "Edges", "Ratio", "edges_of"]


class Anchor(StrEnum):
    """Whose log-probabilities are logp_old."""

    BURST = "burst"
    """The weights at the start of the burst."""
    STEP = "step"
    """The weights at the start of the optimiser step."""
    BEHAVIOUR = "behaviour"
    """The recorded ones of the engine that sampled."""


class Ratio(StrEnum):
    """Over which tokens the policy ratio is averaged before it is clipped."""

    SEQUENCE = "sequence"
    """The owned tokens of a trajectory."""
    EXECUTION = "execution"
    """The owned tokens of the whole execution."""
    TOKEN = "token"
    """Each token by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edges:
    """A pack's loss edges on the device of the log-probs. NaN is a log-probability that nobody recorded."""

    sequence_E: Tensor
    """Number of the trajectory (or execution) whose tokens share a ratio."""
    sequence_tokens_E: Tensor
    """Owned tokens of that whole sequence, wherever they lie."""
    advantage_E: Tensor
    weight_E: Tensor
    """1 / N_e."""
    logp_behaviour_E: Tensor
    logp_old_E: Tensor | None
    """None: the weights of this forward are the anchor."""
    logp_teacher_E: Tensor
    logp_reference_E: Tensor | None
    """Under the weights that the KL penalty holds on to; None without a penalty."""
    role_E: Tensor
    """Index into `gyre_train.pack.ROLES` of the owner trajectory's agent role."""
    version_E: Tensor
    """Steps of this training run whose weights sampled the token; -1 unknown."""
    replayed_E: Tensor | None = None
    """Whether the row that predicts the token goes to recorded experts; None when nothing is replayed."""


def edges_of(
    pack: Pack,
    *,
    anchor: Anchor | str = Anchor.STEP,
    ratio: Ratio | str = Ratio.SEQUENCE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Edges:
    """Tensors of a pack's edges, with logp_old chosen by the anchor (which SFT does not read).

    For `burst` and `step` it is the pack's logp_old, or None when the pack has none: the first step under new anchor
    weights needs no extra forward, since its own log-probabilities are the anchor's.
    """
    old = pack.logp_behaviour_E if Anchor(anchor) is Anchor.BEHAVIOUR else pack.logp_old_E
    whole = Ratio(ratio) is Ratio.EXECUTION
    routes_TLK = pack.routes_TLK

    def tensor(array: Any, kind: torch.dtype = dtype) -> Tensor:
        return torch.as_tensor(array, dtype=kind, device=device)

    return Edges(
        sequence_E=tensor(pack.execution_E if whole else pack.trajectory_E, torch.int64),
        sequence_tokens_E=tensor(pack.execution_tokens_E if whole else pack.trajectory_tokens_E, torch.int64),
        advantage_E=tensor(pack.advantage_E),
        weight_E=tensor(pack.weight_E),
        logp_behaviour_E=tensor(pack.logp_behaviour_E),
        logp_old_E=None if old is None else tensor(old),
        logp_teacher_E=tensor(pack.logp_teacher_E),
        logp_reference_E=None,
        role_E=tensor(pack.role_E, torch.int64),
        version_E=tensor(pack.version_E, torch.int64),
        replayed_E=None if routes_TLK is None else tensor((routes_TLK[pack.source_row_E] >= 0).any((1, 2)), torch.bool),
    )
