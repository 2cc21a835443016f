"""Does training on recorded groups raise the expected score, and does it take more than the main trajectory?

Run: python benchmarks/learning.py [--quick] [--out docs]. Each seed draws untrained weights and records groups of the
toy task (_toy.py) with them; `gyre_train.train` then takes 30 steps from that recording, once with the main trajectory
of each execution alone (J_max = 1) and once with up to five (J_max = 5), for a score that counts all answers and for
one that counts the main agent's. --out writes learning.json (all figures) and learning.svg there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from _plot import bands
from _toy import Judged, expected_score, make_policy, record
from transformers.utils import logging as hf_logging

from gyre_train import train
from gyre_train.metrics import read_metrics

__all__ = ["learn"]

J_MAX = (1, 5)
SETTINGS = {"train.anchor": "step", "train.lr": 1e-3, "train.executions_per_step": 16, "output.keep": 99}
"""Beside the defaults. `step`: the weights move far from those that sampled, where the clip would stop them."""


def learn(folder: Path, *, judged: Judged, j_max: int, steps: int, every: int, **more: Any) -> dict[str, Any]:
    """Train on `folder/run` from `folder/policy`; the expected score before and after every `every` steps."""
    out = folder / f"{judged}-{j_max}"
    settings = SETTINGS | {
        "model.path": folder / "policy", "data.runs": f'["{folder / "run"}"]', f"data.evaluators.{judged}": 1,
        "data.j_max": j_max, "train.steps": steps, "output.dir": out, "output.save_every": every,
    } | more  # fmt: skip
    started = time.process_time()
    done = train(None, [f"--{name}={value}" for name, value in settings.items()])
    seconds = time.process_time() - started
    places = {0: folder / "policy"} | {n: out / f"checkpoints/step-{n:08d}" for n in range(every, steps + 1, every)}
    rows = read_metrics(out / "metrics.jsonl")
    return {
        "judged": str(judged), "j_max": j_max, "steps": done.step, "trained_tokens": done.trained_tokens,
        "computed_tokens": sum(row["packed_tokens"] for row in rows), "cpu_s": round(seconds, 2),
        "gradient_norm_mean": statistics.fmean(row["grad_norm"] for row in rows),
        "gradient_norm_max": max(row["grad_norm"] for row in rows),
        "expected_score": {step: round(expected_score(place, judged), 4) for step, place in places.items()},
    }  # fmt: skip


def every_case(seeds: int, steps: int, every: int) -> Iterator[dict[str, Any]]:
    """Train every case, a recording per seed for all of them."""
    for seed in range(seeds):
        with tempfile.TemporaryDirectory(prefix="gyre-learning-") as name:
            folder = Path(name)
            make_policy(folder / "policy", seed=seed)
            record(folder / "run", folder / "policy", groups=2 * steps, seed=seed)
            for judged in Judged:
                for j_max in J_MAX:
                    case = {"seed": seed} | learn(folder, judged=judged, j_max=j_max, steps=steps, every=every)
                    print(json.dumps(case), file=sys.stderr, flush=True)
                    yield case


def summary(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per score and J_max, over seeds: mean, least and most."""
    out = []
    for judged in Judged:
        for j_max in J_MAX:
            some = [c for c in cases if (c["judged"], c["j_max"]) == (judged, j_max)]
            last = [list(c["expected_score"].values())[-1] for c in some]
            norms = [c["gradient_norm_mean"] for c in some]
            out.append(
                {
                    "judged": str(judged), "j_max": j_max, "seeds": len(some),
                    "before": statistics.fmean(c["expected_score"][0] for c in some),
                    "after": statistics.fmean(last), "least": min(last), "most": max(last),
                    "gradient_norm": statistics.fmean(norms),
                    "trained_tokens": statistics.fmean(c["trained_tokens"] for c in some),
                    "computed_tokens": statistics.fmean(c["computed_tokens"] for c in some),
                }
            )  # fmt: skip
    return out


def picture(cases: list[dict[str, Any]]) -> str:
    """A panel per score; a line per J_max over the mean of the seeds, in a band from the least to the most."""
    steps = list(cases[0]["expected_score"])
    panels: dict[str, dict[str, list[list[float]]]] = {}
    for judged in Judged:
        panels[f"expected score, {judged} answers judged"] = {
            f"J_max = {j_max}": [
                list(c["expected_score"].values()) for c in cases if (c["judged"], c["j_max"]) == (judged, j_max)
            ]
            for j_max in J_MAX
        }
    return bands(steps, panels, "optimiser steps")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, ten steps, for a look")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for learning.json and learning.svg")
    options = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    cases = list(every_case(*((1, 10, 5) if options.quick else (options.seeds, 30, 10))))
    found = {
        "benchmark": "learning", "quick": options.quick, "settings": SETTINGS, "summary": summary(cases),
        "cases": cases, "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    for row in found["summary"]:
        print(
            f"{row['judged']:5} J_max {row['j_max']}  {row['before']:.3f} -> {row['after']:.3f}  "
            f"[{row['least']:.3f}, {row['most']:.3f}] over {row['seeds']} seeds   gradient norm "
            f"{row['gradient_norm']:.3f}   trained tokens {row['trained_tokens']:,.0f} of "
            f"{row['computed_tokens']:,.0f} computed"
        )
    if options.out:
        (options.out / "learning.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "learning.svg").write_text(picture(cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
