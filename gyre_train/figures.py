"""Figures of a step that add up over packs and ranks: each value knows how it is reduced.

    figures = total(figures_of_pack_1, figures_of_pack_2)      one figure may be in only some of them
    {"loss": 0.12, "mismatch_max": 0.4, ...} = values(figures)

Amounts may be numbers or tensors of one element; tensors stay where they are until `values` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Figure", "Figures", "Max", "Mean", "Sum", "plain", "total", "values"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sum:
    """Adds up."""

    amount: Any

    def __add__(self, other: Sum) -> Sum:
        return Sum(amount=self.amount + other.amount)

    def value(self) -> float | None:
        """The sum."""
        return float(self.amount)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """An average over items, whatever their split: the sums travel, the division comes last."""

    amount: Any
    count: Any

    def __add__(self, other: Mean) -> Mean:
        return Mean(amount=self.amount + other.amount, count=self.count + other.count)

    def value(self) -> float | None:
        """The average; None over no items, which is not zero."""
        count = float(self.count)
        return float(self.amount) / count if count else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Max:
    """The largest."""

    amount: Any

    def __add__(self, other: Max) -> Max:
        return Max(amount=max(float(self.amount), float(other.amount)))

    def value(self) -> float | None:
        """The largest."""
        return float(self.amount)


Figure = Sum | Mean | Max
Figures = Mapping[str, Figure]


def total(*parts: Figures) -> dict[str, Figure]:
    """All figures of all parts, those of one name reduced as they say."""
    out: dict[str, Figure] = {}
    for part in parts:
        for name, figure in part.items():
            out[name] = out[name] + figure if name in out else figure  # type: ignore[operator]
    return out


def plain(figures: Figures) -> dict[str, Figure]:
    """The same figures in plain numbers, to be sent to another rank."""
    return {
        name: type(figure)(**{f.name: float(getattr(figure, f.name)) for f in fields(figure)})
        for name, figure in figures.items()
    }


def values(figures: Figures) -> dict[str, float]:
    """Plain numbers by name; a mean over nothing is left out."""
    return {name: value for name, figure in figures.items() if (value := figure.value()) is not None}
