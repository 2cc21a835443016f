"""Real cells under Waterlevel and under Colocate: six steps of live executions, with real SGLang and real training.

Run: python benchmarks/elastic.py [--quick] [--engine sglang|embedded] [--sglang-venv DIR] [--json] [--out docs].
Two cells of this machine serve an eight-layer Qwen3 of random weights or train it (`gyre train`, and a satellite that
gets weights by Mooncake over TCP). A proxy records, `gyre run` runs what the controller dispatches: bursts of two
steps of two groups of three, tasks of 1 to 6 replies. Everything said afterwards is read from the files of the run.
--quick: two steps, Waterlevel alone. SGLang's environment is the one that `make sglang` makes. --out writes
elastic.json there. Nothing is bounded but what must not happen: anything lost, doubled or damaged is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _elastic_report import report
from _elastic_run import SIZES, endless_model, live

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3000.0
"""Longest of one run."""


def engine_command(engine: str, venv: Path) -> list[str]:
    """How a cell serves; four replies at a time, so that some of them last."""
    if engine == "embedded":
        words = [sys.executable, "-m", "gyre_data", "engine", "{weights}", "--port", "{port}", "--threads", "1"]
        return [*words, "--weight-version", "{label}"]
    serve = [sys.executable, str(ROOT / "tools" / "sglang" / "serve.py"), str(venv), "{weights}", "{port}"]
    return ["env", "PYTHONPATH=", *serve, "--weight-version", "{label}", "--max-running-requests", "4"]


def compare(folder: Path, size: str, engine: str, venv: Path, carrier: str) -> dict[str, Any]:
    """Live every policy through and report."""
    model = endless_model(folder / "model")
    policies = ("waterlevel",) if size == "quick" else ("waterlevel", "colocate")
    runs = {}
    for policy in policies:
        before = os.getloadavg()[0]
        live(
            folder / policy, model, SIZES[size], policy, engine_command(engine, venv), carrier=carrier, limit_s=LIMIT_S
        )
        loads = {"load_before": round(before, 1), "load_after": round(os.getloadavg()[0], 1)}
        runs[policy] = report(folder / policy) | loads
    return {
        "benchmark": "elastic", "size": size, "engine": engine, "carrier": carrier, "cores": os.cpu_count(),
        "machine": platform.machine(), "python": platform.python_version(), "runs": runs,
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """The runs side by side, as Markdown."""
    runs: Mapping[str, Mapping[str, Any]] = found["runs"]
    rows: list[tuple[str, list[Any]]] = []

    def row(name: str, value: Any) -> None:
        rows.append((name, [value(one) for one in runs.values()]))

    row("seconds, first dispatch to last step", lambda one: f"{one['seconds']:.0f}")
    row("share of the cells' time spent switching", lambda one: f"{one['switching_share']:.2f}")
    for to in ("train", "rollout"):
        row(f"switches to {to}: number, mean, longest", lambda one, to=to: _took(one["switches"][to]))
        names = dict.fromkeys(name for one in runs.values() for name in one["switches"][to]["phases"])
        for name in names:
            row(f"- {name}", lambda one, to=to, name=name: _took(one["switches"][to]["phases"].get(name)))
    row("satellites turned back, too late for the burst", lambda one: one["switches"]["train"]["turned_back"])
    row("micro-steps computed", lambda one: ", ".join(f"{cell} {n}" for cell, n in sorted(one["micro_steps"].items())))
    row("replies / executions", lambda one: f"{one['replies']} / {one['executions']}")
    row("replies that moved in mid-stream", lambda one: one["replies_moved"])
    row("tokens that they took along", lambda one: one["tokens_kept_by_moves"])
    row("tokens prefilled again for them, at most", lambda one: one["tokens_prefilled_again"])
    row("sampled tokens, by version", lambda one: ", ".join(f"{k} {v}" for k, v in one["tokens_by_version"].items()))
    row("cells lost", lambda one: one["cells_lost"])
    row("lost, doubled or damaged", lambda one: len(one["wrong"]) or "nothing")
    row("load before / after", lambda one: f"{one['load_before']} / {one['load_after']}")
    lines = [f"| | {' | '.join(runs)} |", f"|---|{'---|' * len(runs)}"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(map(str, values))} |" for name, values in rows)])


def _took(spread: Mapping[str, Any] | None) -> str:
    return f"{spread['count']}, {spread['mean_s']:.1f} s, {spread['max_s']:.1f} s" if spread else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps, Waterlevel alone")
    parser.add_argument("--engine", choices=("sglang", "embedded"), default="sglang")
    venv = Path(os.environ.get("GYRE_TEST_SGLANG_VENV", ROOT / ".venv-sglang"))
    parser.add_argument("--sglang-venv", type=Path, default=venv, help="SGLang's environment (%(default)s)")
    parser.add_argument("--carrier", choices=("mooncake", "files"), default="mooncake", help="weights to satellites")
    parser.add_argument("--keep", type=Path, help="an empty or new folder for all files of the runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="folder for elastic.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-elastic-") as made:
        folder = options.keep or Path(made)
        found = compare(
            folder, "quick" if options.quick else "full", options.engine, options.sglang_venv, options.carrier
        )
    if options.out:
        (options.out / "elastic.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1) if options.json else table(found))
    wrong = [f"{policy}: {text}" for policy, one in found["runs"].items() for text in one["wrong"]]
    for text in wrong:
        print(f"WRONG: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
