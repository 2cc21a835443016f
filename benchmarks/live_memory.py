"""What a trainer's process holds of a live run that grows, after N executions that were trained and after 10 N.

Run: python benchmarks/live_memory.py [--executions 80] [--calls 4]

One process records groups of two, call by call; another follows as `gyre train` does, and counts all that is due as
trained after each group. Its own memory (`RssAnon`, Linux) is read three times: after N / 4 executions, when code and
allocators are warm, after N and after 10 N. The last over the one before is `growth`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from data import rows_of_call

from gyre_data.schema import DeliveryState, EndReason
from gyre_data.scores import make_score
from gyre_data.store import RunWriter
from gyre_data.types import Delivery, ExecutionEvent
from gyre_train.tiny import make_tiny

_TOKENS = 400
_VOCAB = 1000


def execution(number: int, num_calls: int, rng: np.random.Generator) -> Iterator[list[object]]:
    """The commits of one execution: its start, its calls, its end with a verdict."""
    name, group = f"e_{number:012x}", f"g{number // 2}"
    now, parent = datetime.now(UTC), None
    yield [ExecutionEvent(execution_id=name, event="started", at=now, group_id=group, task_id=group)]
    for call in range(num_calls):
        prompt, output, row = rows_of_call(number * num_calls + call, parent, _TOKENS, rng)
        prompt, output = (
            replace(node, execution_id=name, token_ids=node.token_ids % _VOCAB) for node in (prompt, output)
        )
        parent = output
        row = replace(row, execution_id=name, temperature=1.0)
        yield [prompt, output, row]
        state = DeliveryState.DELIVERED
        yield [Delivery(call_id=row.call_id, execution_id=name, state=state, at=now)]
    ended = ExecutionEvent(execution_id=name, event="ended", at=now, end_reason=EndReason.FINISHED)
    yield [ended, make_score(name, float(number % 2), evaluator="tests")]


def follow(run: str, model: str, pipe: Connection) -> None:
    """The trainer's side: a look for each word that comes; answers what it holds, and how much it trained."""
    from gyre_train.config import load_config
    from gyre_train.source import load_source

    words = [f"--model.path={model}", f'--data.runs=["{run}"]', f'--data.live=["{run}"]']
    config = load_config(None, [*words, "--train.steps=1000000", f"--output.dir={run}-out"])
    source, trained = None, set[str]()
    while pipe.recv():
        source = load_source(config, before=source, trained=trained)
        trained.update(e.execution_id for e in source.due(dict.fromkeys(trained, 1)))
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        pipe.send((int(found[1]) / 1024 if found else 0.0, len(trained), len(source.examples)))


def measure(folder: Path, num_executions: int, num_calls: int) -> dict[str, float]:
    """The figures."""
    model, rng = make_tiny(folder / "model"), np.random.default_rng(0)
    here, there = multiprocessing.Pipe()
    marks = {num_executions // 4: "warm", num_executions: "n", 10 * num_executions: "ten_n"}
    figures: dict[str, float] = {}
    with RunWriter(folder / "run") as writer:
        writer.write(next(execution(0, num_calls, rng)))
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=follow, args=(str(folder / "run"), str(model), there), daemon=True)
        child.start()
        for number in range(10 * num_executions):
            for commit in execution(number, num_calls, rng):
                writer.write(commit)
            if number % 2:
                here.send(True)
                mib, trained, held = here.recv()
                if number + 1 in marks:
                    assert trained == number + 1, (trained, number)
                    figures |= {f"{marks[number + 1]}_mib": round(mib, 1), f"{marks[number + 1]}_held": held}
        here.send(False)
        child.join(30)
    figures["growth"] = round(figures["ten_n_mib"] / figures["n_mib"], 3)
    more = figures["ten_n_mib"] - figures["n_mib"]
    return figures | {"kib_an_execution": round(1024 * more / (9 * num_executions), 1)}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=80, help="N")
    parser.add_argument("--calls", type=int, default=4, help="of each execution")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.executions, options.calls)))


if __name__ == "__main__":
    main()
