"""The progress of training: steps and time left, gradient tokens, sharing, and who waits for whom."""

import io
import logging
import re
import time

import pytest
from rich.console import Console

from gyre_train import progress
from gyre_train.progress import ProgressLine

ROW = {"step": 3, "loss": 0.5, "trained_tokens_per_s": 1204.4, "sharing": 2.104, "grad_norm": 0.513}


def test_a_line_tells_what_is_left_and_what_was_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    line = ProgressLine(total=12, done=2, show=True)
    with caplog.at_level(logging.INFO), line:
        with line.waiting("plan", "laying out step 3"):
            time.sleep(0.06)
        with line.waiting("save", "saving step 3"):
            pass
        assert set(line.waits()) == {"plan_seconds", "save_seconds"}
        assert line.waits()["plan_seconds"] >= 0.06
        line.step(ROW)
    told = caplog.messages[-1]
    assert told.startswith("step 3/12  loss 0.5000  1,204 grad tok/s  sharing 2.10x  ETA ")
    assert re.search(r"waited: plan 0.\d s$", told)
    assert not line.waits()


def test_a_bar_tells_it_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=True, width=80))
    line = ProgressLine(total=12, done=2, show=True)
    with line, line.waiting("publish", "publishing: waiting for 2 engines"):
        line.step(ROW)
        time.sleep(0.15)
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "3/12" in told
    assert "1,204 grad tok/s" in told
    assert "waiting for 2" in told
