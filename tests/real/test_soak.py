"""The soak of benchmarks/soak.py for two minutes: a fleet at work, each of its kinds of processes killed once."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

SECONDS, GAP_S, SEED = 120.0, (15.0, 25.0), 3452


def test_two_minutes_of_kills_lose_and_double_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    soak = importlib.import_module("soak")
    folder = tmp_path / "soak"
    soak.soak(folder, SECONDS, SEED, GAP_S)
    told = soak.report(folder)
    print(soak.show(told))
    assert soak.wrong(told) == []
    assert sum(fault["pid"] is not None for fault in told["faults"]) >= 3
    assert told["counts"]["replies_acknowledged"] >= 1
