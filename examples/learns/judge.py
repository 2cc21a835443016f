"""The evaluator: the share of parts that were treated rightly, `partial` unless all were and the harness finished."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from workshop import is_judge_down, parts_of

__all__ = ["judge"]


def judge() -> None:
    """Write the verdict on GYRE_WORKSPACE to GYRE_SCORE_FILE."""
    task = os.environ["GYRE_TASK"]
    if is_judge_down(task, int(os.environ["GYRE_SAMPLE_INDEX"])):
        sys.exit("the judge is down (a fault on purpose)")
    done = Path(os.environ["GYRE_WORKSPACE"]) / "right.json"
    right, parts = json.loads(done.read_text()) if done.exists() else 0, len(parts_of(task))
    unfinished = right < parts or os.environ["GYRE_END_REASON"] != "finished"
    verdict = {"value": right / parts, "partial": unfinished, "detail": {"right": right, "of": parts}}
    Path(os.environ["GYRE_SCORE_FILE"]).write_text(json.dumps(verdict))


if __name__ == "__main__":
    judge()
