"""`gyre ls --follow` and `gyre stats --follow`: a line or a table per change into a pipe, in place on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gyre_data
from tests.support.engines import ROOT
from tests.support.forest import Forest

ENV = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "80", "LINES": "30", "TERM": "xterm"}


def _heeds_interrupts() -> None:
    """A shell that runs tests in the background lets its children ignore ^C, and theirs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def following(*words: str, out: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The command as it runs; ^C ends it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gyre_data", *words],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENV},
        preexec_fn=_heeds_interrupts,
    )
    try:
        yield child
        child.send_signal(signal.SIGINT)
        assert "Traceback" not in child.communicate(timeout=60)[1]
        assert child.returncode == 130
    finally:
        child.kill()


class Growing:
    """A run with one execution that gets calls one at a time."""

    def __init__(self, path: Path) -> None:
        self.made, self.path = Forest(), path
        self.e = self.made.execution("e_0a00000000aa", task="sort", end=None)
        self.last: Any = self.e.call(new=[("system", 5), ("user", 3)], output=4)
        self.writer = gyre_data.RunWriter(path)
        self.known = dict.fromkeys(self.made.rows, 0)
        self.commit()

    def commit(self) -> None:
        for name, rows in self.made.rows.items():
            self.writer.append(rows[self.known[name] :])
            self.known[name] = len(rows)
        self.writer.commit()

    def call(self) -> None:
        self.last = self.e.call(after=self.last, new=[("tool", 6)], output=2)
        self.commit()


def test_a_pipe_gets_a_line_for_each_change_of_an_execution(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    with following("ls", str(run.path), "--follow") as child:
        assert child.stdout is not None
        assert re.fullmatch(r"e_0a00000000aa  sort  running  1 calls  14 tok\n", child.stdout.readline())
        run.call()
        # A look between the tables of one commit may be told first.
        told = next(line for line in child.stdout if "  1 calls  " not in line)
        assert re.fullmatch(r"e_0a00000000aa  sort  running  2 calls  24 tok\n", told)
        run.e.score(0.5, evaluator="pytest")
        run.commit()
        assert child.stdout.readline().split()[-3:] == ["score", "0.50", "(pytest)"]
        run.writer.close()  # no row says so: who wrote has left
        assert child.stdout.readline().split()[2] == "interrupted"


def test_programs_get_a_value_a_line(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    with (
        following("ls", str(run.path), "--follow", "--json") as one,
        following("stats", str(run.path), "--follow", "--json") as two,
    ):
        assert one.stdout is not None
        assert two.stdout is not None
        assert (json.loads(one.stdout.readline())["num_calls"], json.loads(two.stdout.readline())["calls"]) == (1, 1)
        run.call()
        assert next(line for line in map(json.loads, one.stdout) if line["num_calls"] > 1)["num_calls"] == 2
        assert next(line for line in map(json.loads, two.stdout) if line["calls"] > 1)["calls"] == 2
    run.writer.close()


def test_a_table_is_counted_anew_into_a_pipe(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    with following("stats", str(run.path), "--follow") as child:
        assert child.stdout is not None
        for number in (1, 2):
            calls = 0
            while calls < number:
                table = "".join(iter(child.stdout.readline, "\n"))
                calls = int(re.search(r"calls (\d+)", table)[1])  # type: ignore[index]
            assert calls == number
            if number == 1:
                run.call()
    run.writer.close()


def test_a_terminal_shows_the_present_state_in_place(tmp_path: Path) -> None:
    run = Growing(tmp_path / "run")
    ours, theirs = pty.openpty()
    with following("ls", str(run.path), "--follow", out=theirs):
        os.close(theirs)
        drawn = b""
        while b"running" not in drawn:
            drawn += os.read(ours, 65536)
        before = len(drawn)
        run.call()
        while not re.search(rb"sort\s+running\s+2 ", drawn[before:]):
            drawn += os.read(ours, 65536)
        assert b"\x1b[1A" in drawn[before:]  # upwards, over what stood there
    os.close(ours)
    run.writer.close()
