"""The elastic benchmark, quickly: real SGLang and real training in two cells, live harnesses, two steps.

The core leaves while long replies run on it, twice.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.engines import ROOT, sglang_venv

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def test_replies_move_from_a_leaving_engine_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    elastic = importlib.import_module("elastic")
    found = elastic.compare(tmp_path, "quick", "sglang", sglang_venv(), "mooncake")
    run = found["runs"]["waterlevel"]
    assert run["wrong"] == []
    assert (run["steps"], run["executions"], run["replies"]) == (2, 18, 18)
    assert run["tokens_by_version"] == {"base:0": 3 * 48 + 6 * 400, "rl:1": 3 * 48 + 6 * 400}
    assert run["replies_moved"] >= 1
    assert run["tokens_prefilled_again"] > run["tokens_kept_by_moves"] > 0
    for to, phases in (
        ("train", {"drain", "replies", "engine_stop", "trainer_start"}),
        ("rollout", {"hand_over", "engine_start", "admit"}),
    ):
        assert set(run["switches"][to]["phases"]) >= {*phases, "told"}
    assert "replies that moved" in elastic.table(found)
