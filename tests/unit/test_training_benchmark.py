"""The training benchmark on a tiny model: it runs, and its two sides compute the same."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_trees_and_rows_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows attend by PyTorch's own causal attention, so this is also a check from outside."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    training = importlib.import_module("training")
    size = training.Size(width=training.Width(hidden=128, layers=1), lengths=0.02)
    with training.opened(size.width, "cpu") as bench:
        for trees in size.cases().values():
            figures = training.steps(bench, trees, 2)
            assert max(figures["loss_difference"], figures["gradient_difference"]) < 1e-5
            assert figures["rows_tokens"] >= figures["tree_tokens"]
