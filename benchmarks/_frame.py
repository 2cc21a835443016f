"""What the benchmarks share: flags, bounds, output. A figure is a number with a name that says its unit."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["Bounds", "Figures", "missed", "run"]

Bounds = Mapping[str, tuple[float | None, float | None]]
"""Figure: (least, most)."""
Figures = Mapping[str, float]


def run(name: str, about: str, bounds: Bounds, measure: Callable[[Path, bool], Figures]) -> int:
    """Measure in a temporary folder, quickly or in full, and print; 1 when a figure lies outside its bound."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes, for a look")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        figures = measure(Path(folder), options.quick)
    failed = missed(figures, bounds)
    if options.json:
        print(json.dumps({"benchmark": name, "quick": options.quick, "figures": figures, "missed": failed}, indent=1))
    else:
        for figure, value in figures.items():
            print(f"{figure:28} {value:14,.2f}")
        for text in failed:
            print(f"MISSED: {text}")
    return 1 if failed else 0


def missed(figures: Figures, bounds: Bounds) -> list[str]:
    """What lies outside its bound, in words; a bounded figure that was not measured is a miss too."""
    found = []
    for name, (least, most) in bounds.items():
        value = figures.get(name, float("nan"))
        if least is not None and not value >= least:
            found.append(f"{name} is {value:.3g}, wanted at least {least}")
        if most is not None and not value <= most:
            found.append(f"{name} is {value:.3g}, wanted at most {most}")
    return found
