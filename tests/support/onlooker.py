"""A process that reads a run, again and again, while another one changes it; it fails when it sees what cannot be.

Call number n is the only one of execution `e_<n>`, and calls come in that order. So what may be seen is always the
calls 0..n less the first k of `REMOVED`, with n and k never falling, and never below what was acknowledged before the
reader looked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import gyre_data as gd
from gyre_data.reader import Run
from gyre_data.verify import verify

__all__ = ["REMOVED", "WAYS", "acknowledged", "looks_of"]

REMOVED = (3, 13)
WAYS = ("open", "query", "verify", "refresh", "follow")
State = tuple[int, int]
"""Calls written, executions removed."""


def acknowledged(file: Path, mode: str = "r") -> np.ndarray:
    """What the changing process has made durable, and whether it is done: a State and a flag, shared.

    After these, how often each of `WAYS` has looked, by that reader.
    """
    return np.memmap(file, np.int64, mode, shape=3 + len(WAYS))  # type: ignore[call-overload,no-any-return]


def looks_of(acked: np.ndarray) -> list[int]:
    """How often each reader has looked so far."""
    return [int(looks) for looks in acked[3:]]


class Onlooker:
    def __init__(self, kind: str, path: Path, acked: np.ndarray) -> None:
        self.path, self.acked = path, acked
        self.last: State = (0, 0)
        self._looks = 3 + WAYS.index(kind)

    def floor(self) -> State:
        """What must be seen from now on."""
        return int(self.acked[0]), int(self.acked[1])

    def done(self) -> bool:
        return bool(self.acked[2])

    def saw(self, call_ids: Iterable[str], floor: State) -> set[str]:
        """Check a set of calls against the rules above."""
        told = list(call_ids)
        numbers = sorted(int(name[2:].partition("_")[0]) for name in told)
        assert len(set(numbers)) == len(numbers), f"twice: {numbers}"
        count = numbers[-1] + 1 if numbers else 0
        missing = tuple(sorted(set(range(count)) - set(numbers)))
        assert missing == REMOVED[: len(missing)], f"of {count} calls {missing} are not there"
        state = (count, len(missing))
        for before in (floor, self.last):
            assert state[0] >= before[0], f"{state} after {before}"
            assert state[1] >= before[1], f"{state} after {before}"
        self.last = state
        self.acked[self._looks] += 1
        return set(told)

    def tables(self, run: Run, floor: State) -> None:
        """Calls, and for each its two nodes."""
        calls = self.saw(run.table("calls").column("call_id").to_pylist(), floor)
        nodes = [name for name in run.table("nodes").column("call_id").to_pylist() if name in calls]
        assert len(nodes) == 2 * len(calls), (len(nodes), len(calls))

    # ------------------------------------------------------------------ ways of looking

    def open(self) -> None:
        """Open, count, and read every tree."""
        while not self.done():
            floor = self.floor()
            run = gd.open(self.path)
            self.tables(run, floor)
            calls = run.table("calls").num_rows
            found = gd.stats(run).trees
            assert (found.calls, found.nodes, found.inconsistent) == (calls, 2 * calls, 0), found
            assert [len(one.tree.calls) for one in run] == [1] * calls

    def query(self) -> None:
        """Open and ask in SQL."""
        sql = "SELECT c.call_id, count(n.node_id) FROM calls c LEFT JOIN nodes n USING (call_id) GROUP BY ALL"
        while not self.done():
            floor = self.floor()
            rows = list(gd.open(self.path).sql(sql))
            self.saw((name for name, _ in rows), floor)
            assert {number for _, number in rows} <= {2}, rows

    def verify(self) -> None:
        """Check it: what changes meanwhile is no fault."""
        while not self.done():
            floor = self.floor()
            report = verify(self.path)
            assert report.problems == (), report.problems
            assert report.num_rows.get("calls", 0) >= floor[0] - len(REMOVED)
            self.acked[self._looks] += 1

    def refresh(self) -> None:
        """Keep one run open and move it on; what it had stays readable until then."""
        run = gd.open(self.path)
        while not self.done():
            floor = self.floor()
            self.tables(run, (0, 0))
            run.refresh()
            self.tables(run, floor)

    def follow(self) -> None:
        """Take each change as it comes."""
        calls: set[str] = set()
        nodes: set[str] = set()
        for changes in gd.open(self.path).follow():
            if changes.rewritten:
                calls, nodes = set(), set()
            new = {
                name: changes.tables[name].column("call_id").to_pylist() if name in changes.tables else []
                for name in ("calls", "nodes")
            }
            nodes.update(new["nodes"])
            calls = self.saw([*calls, *new["calls"]], (0, 0))  # one that comes again is there twice
            assert calls <= nodes
            if self.done() and self.last >= self.floor():
                return


def main(kind: str, path: str, acked: str) -> None:
    """Look until all is done, and say what was there last."""
    one = Onlooker(kind, Path(path), acknowledged(Path(acked), "r+"))
    print("ready", flush=True)
    look: Callable[[], None] = getattr(one, kind)
    look()
    print(json.dumps(one.last))


if __name__ == "__main__":
    main(*sys.argv[1:])
