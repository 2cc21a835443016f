"""The forecast of `gyre stats --model` as text: whether sharing prefixes pays, and a line per cap on trajectories."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from gyre_data.forecast import CapForecast, Forecast

from .layout import flow
from .numbers import amount, count, file_size, plural, power, ratio, share

__all__ = ["forecast_lines"]

_LABEL = 12
_HEADS = ("J_max", "paths", "trained", "rows tok", "tree tok", "tree FLOPs", "fewer", "of all", "memory")


def forecast_lines(found: Forecast, *, j_max: int | None, width: int = 80) -> Iterator[Text]:
    """What the model is, the verdict for this `j_max`, and the table."""
    head = Text(f"{'forecast':<{_LABEL}}").append_text(Text(found.model, style="bold"))
    yield from flow([head, *map(Text, _about(found))], width, indent=_LABEL)
    cap = found.cap(j_max)
    if cap.flops_ratio is None:
        yield Text(f"{'':<{_LABEL}}nothing to train: no eligible output")
        return
    parts = _verdict(found, cap)
    yield from flow([Text(" " * _LABEL).append_text(parts[0]), *parts[1:]], width, indent=_LABEL)
    rows = [_HEADS, *(_row(one, found.caps[-1]) for one in found.caps)]
    sizes = [max(len(row[k]) for row in rows) for k in range(len(_HEADS))]
    for place, row in enumerate(rows):
        line = "  ".join(f"{cell:>{size}}" for cell, size in zip(row, sizes, strict=True))
        yield Text(line.rstrip(), style="bold" if not place else "" if found.caps[place - 1] is not cap else "green")
    yield Text("memory: activations and logits of the largest tree, layers recomputed", style="dim")


def _about(found: Forecast) -> Iterator[str]:
    active = "" if found.active_parameters == found.parameters else f" ({_billions(found.active_parameters)} active)"
    yield f"{_billions(found.parameters)} parameters{active}"
    yield f"state {file_size(found.state_bytes)} before sharding"
    yield f"{plural(found.executions, 'execution')}, one pass"
    if found.basis == "eligible":
        yield "nothing trainable here: as if a policy of yours had sampled it"


def _verdict(found: Forecast, cap: CapForecast) -> list[Text]:
    flops, tokens = cap.tree_flops / cap.rows_flops, cap.tree_tokens / cap.rows_tokens
    saved = f"{ratio(cap.flops_ratio)} fewer FLOPs"
    word, style = ("worth packing", "bold green") if cap.worth_packing else ("hardly worth packing", "bold")
    return [
        Text(f"packed/rows at J_max {_cap(cap)}: FLOPs {flops:.2f}"),
        Text(f"tokens {tokens:.2f}"),
        Text(f"memory {file_size(cap.tree_bytes)} / {file_size(cap.rows_together_bytes)}"),
        Text(f"(longest row alone {file_size(cap.rows_alone_bytes)})"),
        Text("-> ").append(word, style=style).append(f": {saved} (limit {found.limit}x, a rule of thumb)"),
    ]


def _billions(parameters: int) -> str:
    return amount(parameters).replace("G", "B")


def _cap(cap: CapForecast) -> str:
    return "none" if cap.j_max is None else str(cap.j_max)


def _row(cap: CapForecast, uncapped: CapForecast) -> tuple[str, ...]:
    return (
        _cap(cap),
        count(cap.trajectories),
        amount(cap.trained_tokens),
        amount(cap.rows_tokens),
        amount(cap.tree_tokens),
        power(cap.tree_flops),
        ratio(cap.flops_ratio),
        share(cap.tree_flops, uncapped.tree_flops),
        file_size(cap.tree_bytes),
    )
