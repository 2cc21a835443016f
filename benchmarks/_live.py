"""A run that is written by one process and followed by another: how long until a durable call is in the reader's tree.

As a program it is the writer: `_live.py SOURCE RUN LIVE` copies the one execution of SOURCE into RUN, all but its last
LIVE calls at once, and those one by one, printing the id and the time of each as soon as it is durable.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import gyre_data
from gyre_data.arrays import from_table

__all__ = ["lags"]

_GAP_S, _POLL_S, _WAIT_S = 0.03, 0.005, 120.0


def lags(source: Path, path: Path, live: int) -> list[float]:
    """Seconds from durable in the writer to there in the reader's tree, of the last `live` calls."""
    command = [sys.executable, __file__, str(source), str(path), str(live)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        run, seen = gyre_data.open(path), dict[str, float]()
        known = len(run[""].tree.calls)
        writer.stdin.write("go\n")
        writer.stdin.flush()
        give_up = time.monotonic() + _WAIT_S
        while len(seen) < live and time.monotonic() < give_up:
            if run.refresh():
                calls = run[""].tree.calls
                new = [calls[i] for i in range(known, len(calls))]
                now, known = time.monotonic(), len(calls)
                seen |= {call.call_id: now for call in new}
            time.sleep(_POLL_S)
        durable = dict(line.split() for line in writer.stdout)
    return [seen[call_id] - float(at) for call_id, at in durable.items() if call_id in seen]


def _write(source: Path, path: Path, live: int) -> None:
    run = gyre_data.open(source)
    rows = {name: from_table(name, run.table(name)) for name in ("executions", "nodes", "calls", "deliveries")}
    of_call: dict[str, list[object]] = {call.call_id: [call] for call in rows["calls"]}
    for row in (*rows["nodes"], *rows["deliveries"]):
        of_call[row.call_id].append(row)
    calls = list(of_call.items())
    with gyre_data.RunWriter(path) as writer:
        writer.write([*rows["executions"][:1], *(row for _, some in calls[:-live] for row in some)])
        print("ready", flush=True)
        sys.stdin.readline()
        for call_id, some in calls[-live:]:
            writer.write(some)
            print(call_id, time.monotonic(), flush=True)
            time.sleep(_GAP_S)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
