"""CPU that a turn of a long conversation costs the proxy, from the request's bytes to the engine's, and the record.

Run: python benchmarks/turns.py [--quick] [--json] [--tokenizer FOLDER]. An agent's conversation with tools grows turn
by turn, every turn sampled; at 80,000 and 400,000 tokens the median of the next turns is taken: reading the body,
planning the prompt, reserving its nodes, writing the ids for the engine, and making the rows to commit. HTTP, engine
events and the disk are measured by proxy.py: they do not depend on the length of a conversation. Beside it, in the same
run, what the turn costs where a template is not local, and what it costs a program that renders and tokenises the whole
conversation again. Exit status 1 when a bound is missed.

The tokenizer is Qwen3's where tools/tokenizers/install.sh has put it, else one trained on the spot.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

ROOT = Path(__file__).resolve().parents[1]
NUM_MEASURED, NUM_ROUNDS = 15, 3
NEW_WORDS = 60
"""Words of the tool results in the turns that are measured."""
BOUNDS = {
    "turn_cpu_ms_80k": (None, 3.0),
    "turn_cpu_ms_400k": (None, 10.0),
    "rerender_vs_turn_80k": (100.0, None),
    "execution_mib_100k": (None, 5.12),
}
"""Figure: (least, most). 200 executions of 100,000 tokens in 1 GiB are 5.12 MiB each."""
REPLY = 'I look.\n<tool_call>\n{"name": "tool_1", "arguments": {"path": "/a"}}\n</tool_call><|im_end|>'
TOOLS = [
    {
        "name": f"tool_{i}",
        "description": f"Does thing {i}. " + "It takes a path and gives back what is there. " * 8,
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for i in range(16)
]


@dataclass
class Client:
    """Writes bodies as Claude Code does: the mark of the cache moves to the newest message with every turn."""

    chat: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "user", "content": [{"type": "text", "text": "Look at everything."}]}]
    )

    def body(self) -> bytes:
        mark = {"cache_control": {"type": "ephemeral"}}
        *blocks, newest = self.chat[-1]["content"]
        last = {**self.chat[-1], "content": [*blocks, {**newest, **mark}]}
        system = [{"type": "text", "text": "You look after a house. " * 200, **mark}]
        fields = {"model": "m", "max_tokens": 64, "messages": [*self.chat[:-1], last], "system": system, "tools": TOOLS}
        return orjson.dumps(fields)

    def answer(self, node_id: str, words: int) -> None:
        number, name = len(self.chat), f"toolu_{node_id}_0"
        lines = (f"{number}.{i}: the value of item {(i * 7919 + number) % 9973} is fine" for i in range(words // 9))
        said = [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": name, "name": "tool_1", "input": {"path": "/a"}},
        ]
        result = [{"type": "tool_result", "tool_use_id": name, "content": "\n".join(lines)}]
        self.chat += [{"role": "assistant", "content": said}, {"role": "user", "content": result}]


class Execution:
    """What a proxy keeps of one execution, and one turn of it."""

    def __init__(self, template: Any, locality: Any) -> None:
        from gyre_proxy.dialects import load
        from gyre_proxy.dialects.reading import Reader
        from gyre_proxy.history import History
        from gyre_proxy.parse import parse_reply
        from gyre_proxy.roles import AgentLabel

        self._dialect, self._label = load("anthropic"), AgentLabel()
        self.reader = Reader()
        self.history = History(template, execution_id="e", locality=locality)
        self._reply_ids = template.encode(REPLY).ids
        self._reply = parse_reply(REPLY.removesuffix("<|im_end|>"), "stop")
        self._logprobs = np.full(len(self._reply_ids), -0.5, np.float32)
        self.num_turns = self.num_tokens = 0

    def turn(self, body: bytes) -> str:
        """One call; the node that it sampled."""
        request = self._dialect.parse(body, {}, self.reader)
        plan = self.history.plan(request, self._label)
        self.history.reserve(plan)
        orjson.dumps({"input_ids": orjson.Fragment(self.history.ids_text.of(plan.prompt_ids))})
        node_id = f"n_{self.num_turns:020x}"
        self.history.commit(
            plan,
            call_id=f"c_{self.num_turns}",
            output_node_id=node_id,
            output_ids=self._reply_ids,
            logprobs=self._logprobs,
            versions=(),
            reply=self._reply,
        )
        for part in request.body:
            assert part.blob_id
            part.stored = True
        assert self.num_turns == 0 or str(plan.extension) in ("bridge", "repair")
        self.num_turns, self.num_tokens = self.num_turns + 1, len(plan.prompt_ids)
        return node_id


def cpu_ms(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return 1e3 * (time.process_time() - started)


def grown(template: Any, locality: Any, tokens: int, words: int) -> tuple[Execution, Client]:
    """An execution of `tokens` tokens, every turn of which was sampled."""
    execution, client = Execution(template, locality), Client()
    while execution.num_tokens < tokens:
        client.answer(execution.turn(client.body()), words)
    return execution, client


def measure_turns(template: Any, locality: Any, tokens: int, words: int, count: int = NUM_MEASURED) -> dict[str, float]:
    """Median CPU of the turns after `tokens` tokens, and of doing it all anew, in the least disturbed of some rounds.

    Other work on the machine only ever adds, to a turn more than to a rendering of everything: it is short, and finds
    the caches cold.
    """
    execution, client = grown(template, locality, tokens, words)
    for _ in range(2):  # the last of the long results is new in the first of them
        client.answer(execution.turn(client.body()), NEW_WORDS)
    rounds = [_round(template, locality, execution, client, count) for _ in range(NUM_ROUNDS)]
    cost, again = min(rounds)
    figures = {"cpu_ms": cost, "messages": float(len(client.chat)), "body_kb": len(client.body()) / 1e3}
    return figures | ({"rerender_ms": again} if again is not None else {})


def _round(
    template: Any, locality: Any, execution: Execution, client: Client, count: int
) -> tuple[float, float | None]:
    """Median CPU, in ms, of the next `count` turns; and of doing the first of them all anew, where that is compared."""
    costs, again = [], None
    for number in range(count):
        body, node = client.body(), [""]
        costs.append(cpu_ms(lambda body=body, node=node: node.__setitem__(0, execution.turn(body))))
        if number == 0 and locality is not None:
            again = cpu_ms(lambda body=body: rerendered(template, body))
        client.answer(node[0], NEW_WORDS)
    return statistics.median(costs), again


def rerendered(template: Any, body: bytes) -> None:
    """What a program without a history does for each turn."""
    from gyre_proxy.dialects import load

    request = load("anthropic").parse(body, {})
    ids = template.encode(template.render(request.messages, request.tools, True)).ids
    orjson.dumps({"input_ids": ids}, option=orjson.OPT_SERIALIZE_NUMPY)


def measure_memory(template: Any, locality: Any) -> float:
    """MiB that one live execution of 100,000 tokens takes, bodies, messages and tokens included."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    execution, client = grown(template, locality, 100_000, 250)
    del client
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert execution.num_turns
    return size / (1 << 20)


def measure(folder: Path, tokenizer: Path | None, quick: bool) -> dict[str, float]:
    from gyre_proxy.collector import start_up_kept
    from gyre_proxy.locality import Locality
    from gyre_proxy.template import ChatTemplate
    from gyre_train.tiny import make_tiny

    template = ChatTemplate.load(tokenizer or make_tiny(folder / "model", vocab=4096, hidden=32, layers=1))
    figures: dict[str, float] = {}
    figures["probe_cpu_ms"] = cpu_ms(lambda: Locality(template))
    with start_up_kept():  # as a proxy does
        return figures | _measure(template, quick)


def _measure(template: Any, quick: bool) -> dict[str, float]:
    from gyre_proxy.locality import Locality

    figures: dict[str, float] = {}
    locality = Locality(template)
    lengths = [("80k", 80_000, 250)] + ([] if quick else [("400k", 400_000, 1000)])
    for name, tokens, words in lengths:
        found = measure_turns(template, locality, tokens, words)
        figures |= {
            f"turn_cpu_ms_{name}": found["cpu_ms"],
            f"rerender_cpu_ms_{name}": found["rerender_ms"],
            f"rerender_vs_turn_{name}": found["rerender_ms"] / found["cpu_ms"],
            f"messages_{name}": found["messages"],
            f"body_kb_{name}": found["body_kb"],
        }
    figures["turn_cpu_ms_2k"] = measure_turns(template, locality, 2_000, 250)["cpu_ms"]
    figures["whole_history_cpu_ms_80k"] = measure_turns(template, None, 80_000, 2500, 3)["cpu_ms"]
    figures["execution_mib_100k"] = measure_memory(template, locality)
    return figures


def missed(figures: dict[str, float]) -> list[str]:
    """What lies outside its bound, in words."""
    found = []
    for name, (least, most) in BOUNDS.items():
        value = figures.get(name)
        if value is not None and ((least is not None and value < least) or (most is not None and value > most)):
            found.append(f"{name} is {value:.3g}, wanted {'at least' if least else 'at most'} {least or most}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without the longest context")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tokenizer", type=Path, help="folder of a tokenizer whose stop token is <|im_end|>")
    options = parser.parse_args()
    known = Path(os.environ.get("GYRE_TEST_QWEN3") or ROOT / ".cache" / "tokenizers" / "qwen3")
    tokenizer = options.tokenizer or (known if (known / "tokenizer.json").is_file() else None)
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        figures = measure(Path(folder), tokenizer, options.quick)
    failed = missed(figures)
    if options.json:
        report = {"benchmark": "turns", "quick": options.quick, "figures": figures, "missed": failed}
        print(json.dumps(report, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name:26} {value:12,.2f}")
        for text in failed:
            print(f"MISSED: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
