"""Charts as plain SVG: series over a common size on logarithmic axes, and repeated series as bands on plain ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["bands", "chart"]

_W, _H, _LEFT, _TOP, _STEP = 360, 260, 52, 34, 420


def chart(sizes: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[float]]], unit: str) -> str:
    """Panels side by side, each with its lines by name; a grey line shows what linear growth would be."""
    return _side_by_side([_panel(sizes, title, lines, unit) for title, lines in panels.items()])


def bands(sizes: Sequence[float], panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], unit: str) -> str:
    """Panels side by side over shares of one; each line is a mean, in a band from the least to the most."""
    return _side_by_side([_band_panel(sizes, title, lines, unit) for title, lines in panels.items()])


def _side_by_side(panels: Sequence[str]) -> str:
    width, height = _STEP * len(panels) + 10, _H + 90
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    for number, panel in enumerate(panels):
        out.append(f'<g transform="translate({_LEFT + number * _STEP},{_TOP})">{panel}</g>')
    return "\n".join([*out, "</svg>", ""])


def _band_panel(sizes: Sequence[float], title: str, lines: Mapping[str, Sequence[Sequence[float]]], unit: str) -> str:
    low = math.floor(10 * min(value for repeats in lines.values() for line in repeats for value in line)) / 10

    def place(size: float, value: float) -> str:
        return f"{(size - sizes[0]) / (sizes[-1] - sizes[0]) * _W:.1f},{_H - (value - low) / (1 - low) * _H:.1f}"

    out = [f'<text x="0" y="-14" font-weight="bold">{title}</text>']
    for tenth in range(round(10 * low), 11):
        y = place(sizes[0], tenth / 10).partition(",")[2]
        out.append(f'<path d="M0,{y}H{_W}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{float(y) + 4:.1f}" text-anchor="end">{tenth / 10:g}</text>')
    for size in sizes:
        out.append(f'<text x="{place(size, low).partition(",")[0]}" y="{_H + 18}" text-anchor="middle">{size:g}</text>')
    out.append(f'<text x="{_W / 2}" y="{_H + 36}" text-anchor="middle">{unit} (band: least to most)</text>')
    for number, (name, repeats) in enumerate(lines.items()):
        colour, at = ("#1f6feb", "#d1495b", "#2e8b57")[number], list(zip(*repeats, strict=True))
        above = [place(size, max(values)) for size, values in zip(sizes, at, strict=True)]
        below = [place(size, min(values)) for size, values in zip(sizes, at, strict=True)]
        mean = [place(size, sum(values) / len(values)) for size, values in zip(sizes, at, strict=True)]
        out.append(f'<polygon points="{" ".join([*above, *reversed(below)])}" fill="{colour}" fill-opacity="0.15"/>')
        out.append(f'<polyline points="{" ".join(mean)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{130 * number}" y="{_H + 50}" fill="{colour}">{name}</text>')
    return "\n".join(out)


def _panel(sizes: Sequence[float], title: str, lines: Mapping[str, Sequence[float]], unit: str) -> str:
    values = [value for line in lines.values() for value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log10(sizes[0]), math.log10(sizes[-1])

    def place(size: float, value: float) -> str:
        x = (math.log10(size) - first) / (last - first) * _W
        y = _H - (math.log10(value) - low) / (high - low) * _H
        return f"{x:.1f},{y:.1f}"

    out = [f'<text x="0" y="-14" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        y = _H - (power - low) / (high - low) * _H
        out.append(f'<path d="M0,{y:.1f}H{_W}" stroke="#ddd"/>')
        out.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for size in sizes:
        x = (math.log10(size) - first) / (last - first) * _W
        out.append(f'<text x="{x:.1f}" y="{_H + 18}" text-anchor="middle">{size:g}</text>')
    out.append(f'<text x="{_W / 2}" y="{_H + 36}" text-anchor="middle">{unit} (dashed: linear)</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = ("#1f6feb", "#d1495b", "#2e8b57")[number]
        points = " ".join(place(size, value) for size, value in zip(sizes, line, strict=True))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (p.split(",") for p in points.split())]
        out.append(f'<text x="{130 * number}" y="{_H + 54}" fill="{colour}">{name}</text>')
    end = next(iter(lines.values()))[-1]
    start = max(sizes[0], sizes[-1] * 10**low / end)
    out.append(
        f'<path d="M{place(start, end * start / sizes[-1])}L{place(sizes[-1], end)}" stroke="#999" '
        'stroke-dasharray="4 4"/>'
    )
    return "\n".join(out)
