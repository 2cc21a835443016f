"""The task: parts come to a workshop one after another; each wants the tool for its material, called with its number.

    python3 workshop.py > tasks.toml        # how the task file was made

The prompt names the first part, the result of each call the next. A wrong call spoils its part and the work goes on, so
the score is the share of parts that were treated rightly. Held-out tasks consist of pairs of a material and a number
that occur in no task that is trained, nor in the text of the warm start.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

__all__ = ["NUMBERS", "TOOLS", "TOOL_OF", "Part", "Workshop", "draw", "is_jammed", "is_judge_down", "parts_of"]

TOOL_OF = {
    "oak": "saw", "pine": "saw", "iron": "weld", "steel": "weld",
    "wool": "sew", "silk": "sew", "clay": "bake", "glass": "bake",
}  # fmt: skip
NUMBERS = range(10, 20)
PARTS = 2
NUM_TRAINED, NUM_HELD_OUT = 64, 16


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"part": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool(name) for name in sorted(set(TOOL_OF.values()))]

Part = tuple[str, int]
"""Material and number."""


def draw(rng: random.Random, *, held_out: bool) -> list[Part]:
    """Parts of a task: pairs that are held out, or of the others."""
    pairs = [(m, n) for m in TOOL_OF for n in NUMBERS if (zlib.crc32(f"{m} {n}".encode()) % 4 == 0) == held_out]
    return rng.sample(pairs, PARTS)


def parts_of(task: str) -> list[Part]:
    """The parts of a task, drawn by its id: `t..` is trained, `h..` held out."""
    return draw(random.Random(task), held_out=task.startswith("h"))


class Workshop:
    """The environment of one execution: gives the parts and counts those that were treated rightly."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.num_done = self.num_right = 0

    def prompt(self) -> str:
        """What the model is asked."""
        return f"part: {self.parts[0][0]} {self.parts[0][1]}"

    def call(self, name: str, arguments: Any) -> str:
        """Use a tool on the part that is there; tells the next one."""
        if self.num_done < len(self.parts):
            material, number = self.parts[self.num_done]
            self.num_right += (name, arguments) == (TOOL_OF[material], {"part": number})
            self.num_done += 1
        if self.num_done == len(self.parts):
            return "all done"
        return "part: {} {}".format(*self.parts[self.num_done])


def is_jammed(task: str, sample: int) -> bool:
    """A fault on purpose: a machine jams after the first call, and the harness runs into its timeout."""
    return _drawn(task, sample) == 0


def is_judge_down(task: str, sample: int) -> bool:
    """A fault on purpose: the evaluator fails."""
    return _drawn(task, sample) in (1, 2, 3)


def _drawn(task: str, sample: int) -> int:
    """A number below 100; never a fault in a held-out task, so that every evaluation judges the same."""
    return zlib.crc32(f"fault {task}/{sample}".encode()) % 100 if task.startswith("t") else 99


HEAD = """\
# Made by `python3 workshop.py > tasks.toml`. t..: trained; h..: held out (rl.toml), of other parts.
[defaults]
worker = "python3 {tasks}/agent.py"
evaluator = "python3 {tasks}/judge.py"
timeout_s = 15
evaluator_timeout_s = 60
"""

if __name__ == "__main__":
    print(HEAD, end="")
    for task in [f"t{n:02d}" for n in range(NUM_TRAINED)] + [f"h{n:02d}" for n in range(NUM_HELD_OUT)]:
        print(f'\n[[task]]\nid = "{task}"\nprompt = {json.dumps(Workshop(parts_of(task)).prompt())}')
