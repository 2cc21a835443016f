"""The two tasks of the demo: small files to read, five numbers to write, and a judge that gives partial credit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TASKS", "DemoTask", "judge"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoTask:
    """One task. `summary` is what a good compaction says; `compact_after` counts rounds."""

    id: str
    prompt: str
    files: Mapping[str, str]
    answer: str
    summary: str = ""
    uses_helper: bool = False
    compact_after: int = 0


TASKS: tuple[DemoTask, ...] = (
    DemoTask(
        id="stock",
        prompt="Write the stock of all bays to answer.txt. A helper can read them.",
        files={"bays.txt": "bay 1: 4\nbay 2: 7\nbay 3: 2\nbay 4: 9\nbay 5: 5\n"},
        answer="4 7 2 9 5",
        uses_helper=True,
    ),
    DemoTask(
        id="moves",
        prompt="Read mon.txt and tue.txt and write the five totals to answer.txt.",
        files={
            "mon.txt": "in 3 out 1\nin 2 out 2\nin 8 out 1\nin 1 out 0\nin 6 out 3\n",
            "tue.txt": "in 1 out 0\nin 5 out 2\nin 0 out 1\nin 3 out 2\nin 2 out 4\n",
        },
        answer="3 3 6 2 1",
        summary="mon.txt and tue.txt are read; the totals are still to be written.",
        compact_after=2,
    ),
)


def judge(expected: str, outage_on: str | None = None) -> None:
    """Evaluator: the share of right numbers in answer.txt, the later ones counting more.

    It fails on purpose for the sample index `outage_on`.
    """
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
