"""Text for the warm start: the harness's own loop with a teacher that knows the form of a call and chooses badly.

    python3 teacher.py 3200 0 > warm.jsonl          # conversations, seed

It takes the right tool half of the time, else any other, and the right number six times out of ten, else any other.
No pair of a material and a number that is held out occurs.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from agent import work
from workshop import NUMBERS, TOOL_OF, TOOLS, Workshop, draw

__all__ = ["conversations"]

RIGHT_TOOL, RIGHT_NUMBER = 0.5, 0.6


def conversations(num: int, seed: int) -> Iterator[dict[str, Any]]:
    """Conversations in the chat form."""
    rng = random.Random(seed)
    for _ in range(num):
        # Short ones too: with one part in sight it is learnt soonest that the call goes by the part.
        workshop = Workshop(draw(rng, held_out=False)[: rng.choice((1, 1, 2))])
        yield {"messages": work(lambda messages, w=workshop: reply(rng, w, len(messages)), workshop), "tools": TOOLS}


def reply(rng: random.Random, workshop: Workshop, place: int) -> dict[str, Any]:
    """The teacher's call for the part that is there."""
    material, number = workshop.parts[workshop.num_done]
    tool = _mostly(rng, TOOL_OF[material], sorted(set(TOOL_OF.values())), RIGHT_TOOL)
    arguments = json.dumps({"part": _mostly(rng, number, NUMBERS, RIGHT_NUMBER)})
    call = {"id": f"call_{place}", "type": "function", "function": {"name": tool, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _mostly(rng: random.Random, right: Any, every: Sequence[Any], share: float) -> Any:
    return right if rng.random() < share else rng.choice([one for one in every if one != right])


if __name__ == "__main__":
    for conversation in conversations(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(conversation))
