"""What the core does next, and what its ranks and its hub hand one another for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gyre_data.errors import EngineError
from gyre_train.figures import Figures
from gyre_train.pack import Pack

from .board import Key
from .carrier import Offer

__all__ = ["Act", "HandIn", "Task", "Weights", "check_place"]


class Task(StrEnum):
    """What the core does next."""

    RUN = "run"
    """Compute a micro-step."""
    ADD = "add"
    """Fetch a satellite's sum and add it."""
    OFFER = "offer"
    """Lay out the weights of the open step."""
    WAIT = "wait"
    """Nothing yet; ask again."""
    CLOSE = "close"
    """Everything is there: apply the step."""
    GIVE_UP = "give_up"
    """Training is to stop and the step is not whole: nothing of it is applied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Act:
    """One thing for all ranks of the core."""

    task: Task
    packs: tuple[Pack, ...] = ()
    offers: Mapping[str, Offer] = field(default_factory=dict)
    """Of a satellite's gradients, by place in the layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a satellite pulls before it claims: by place in the layout."""

    step: int
    weights: Mapping[str, Offer]
    anchor: Mapping[str, Offer] | None
    """Weights behind logp_old where these are others."""


@dataclass(kw_only=True, slots=True, eq=False)
class HandIn:
    """A satellite's sum on its way into the core's."""

    epoch: int
    keys: tuple[Key, ...]
    offers: Mapping[str, Offer]
    figures: Figures
    answer: dict[str, Any] | None = None


def check_place(offers: Mapping[str, Offer], place: str) -> Offer:
    """The offer for one place of the layout; EngineError when the other side is laid out otherwise."""
    if place not in offers:
        raise EngineError(f"wanted tensors for {place}, got {sorted(offers)}; core and satellites share tp, pp and cp")
    return offers[place]
