"""|trainer's log-prob - log-prob recorded at sampling| of the trained tokens: overall, by agent role, by age.

The age of a token is the number of optimiser steps between the weights that sampled it and those that train it. Tokens
without a recorded log-prob are in no figure, those of unknown age in no age's. Where recorded experts are replayed,
tokens with and without them are counted and told apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyre_train.edges import Edges
from gyre_train.figures import Figure, Max, Mean, Sum
from gyre_train.pack import ROLES

__all__ = ["mismatch"]

_OLDEST = 8
"""This age and all above it share one figure."""


@torch.no_grad()
def mismatch(edges: Edges, logp_E: Tensor, *, version: int) -> dict[str, Figure]:
    """Figures `mismatch_mean`, `mismatch_max`, `mismatch_ROLE`, `mismatch_age_N`; `version` is that of the weights.

    `age_mean` and `age_max` are the ages themselves, of tokens whose age is known.

    With replay also `tokens_with_routes`, `tokens_without_routes` and the mismatch of each.
    """
    known_E = edges.logp_behaviour_E.isfinite()
    gap_E = (logp_E - edges.logp_behaviour_E).abs()[known_E]
    if not len(gap_E):
        return {}
    out: dict[str, Figure] = {
        "mismatch_mean": Mean(amount=gap_E.sum(), count=len(gap_E)),
        "mismatch_max": Max(amount=gap_E.max()),
    }
    role_E, sampled_E = edges.role_E[known_E], edges.version_E[known_E]
    exact_E = (version - sampled_E).clamp(min=0)[sampled_E >= 0]
    if len(exact_E):
        out |= {"age_mean": Mean(amount=exact_E.sum(), count=len(exact_E)), "age_max": Max(amount=exact_E.max())}
    age_E = (version - sampled_E).clamp(0, _OLDEST).where(sampled_E >= 0, -1)
    for name, key_E, names in (("", role_E, ROLES), ("age_", age_E, [*map(str, range(_OLDEST)), f"{_OLDEST}_up"])):
        for key in key_E.unique():
            if key >= 0:
                here = gap_E[key_E == key]
                out[f"mismatch_{name}{names[int(key)]}"] = Mean(amount=here.sum(), count=len(here))
    if edges.replayed_E is not None:
        replayed_E = edges.replayed_E[known_E]
        for name, here_E in (("with_routes", replayed_E), ("without_routes", ~replayed_E)):
            gaps = gap_E[here_E]
            out[f"tokens_{name}"] = Sum(amount=len(gaps))
            if len(gaps):
                out[f"mismatch_{name}"] = Mean(amount=gaps.sum(), count=len(gaps))
    return out
