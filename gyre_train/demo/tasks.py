"""The two tasks of the demo: small files to read, five numbers to write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TASKS", "DemoTask"]


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
            "mon.txt": "".join(f"hour {hour}: in {hour % 7} out {hour % 5}\n" for hour in range(24)),
            "tue.txt": "in 1 out 0\nin 5 out 2\nin 0 out 1\nin 3 out 2\nin 2 out 4\n",
        },
        answer="3 3 6 2 1",
        summary="mon.txt and tue.txt are read; the totals are still to be written.",
        compact_after=2,
    ),
)
