"""The demo's evaluator: the share of right numbers in answer.txt, the later ones counting more.

    python -m gyre_train.demo.judge "4 7 2 9 5" [SAMPLE]     # told the rest by `gyre run` through the environment

It fails on purpose for the sample index SAMPLE: a judge that is down.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

__all__ = ["judge"]


def judge(expected: str, outage_on: str | None = None) -> None:
    """Write the verdict on GYRE_WORKSPACE to GYRE_SCORE_FILE."""
    if outage_on is not None and os.environ["GYRE_SAMPLE_INDEX"] == outage_on:
        sys.exit("the judge is down (a fault injected by the demo)")
    wanted = expected.split()
    path = Path(os.environ["GYRE_WORKSPACE"]) / "answer.txt"
    got = path.read_text().split() if path.exists() else []
    right = [place for place, (a, b) in enumerate(zip(wanted, got, strict=False), start=1) if a == b]
    value = sum(right) / sum(range(1, len(wanted) + 1))
    unfinished = os.environ["GYRE_END_REASON"] != "finished"
    verdict = {"value": value, "partial": unfinished, "detail": {"right": right, "of": len(wanted)}}
    Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))


if __name__ == "__main__":
    judge(*sys.argv[1:])
