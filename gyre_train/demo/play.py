"""Start the demo harness for one execution, with the faults that the demo wants to show.

    python -m gyre_train.demo.play TASK PROMPT        # GYRE_SAMPLE_INDEX says which execution of the group it is

Sample 1 sends its second request twice (the retry), sample 2 of `moves` never exits (the timeout that is scored).
"""

from __future__ import annotations

import os
import sys

from .harness import main
from .tasks import TASKS

__all__ = ["play"]


def play(task_id: str, prompt: str) -> None:
    """Run the harness on `prompt` with the flags of this task and sample."""
    task = next(task for task in TASKS if task.id == task_id)
    sample = os.environ["GYRE_SAMPLE_INDEX"]
    flags = ["--compact-after", str(task.compact_after)]
    if sample == "1":
        flags += ["--ask-twice", "2"]
    if sample == "2" and task.id == "moves":
        flags += ["--stall"]
    main([prompt, *flags])


if __name__ == "__main__":
    play(*sys.argv[1:])
