"""The progress of training: steps and time left, gradient tokens, sharing, and who waits for whom."""

import io
import json
import logging
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from gyre_train import progress
from gyre_train.commands import _show_summary
from gyre_train.folder import TrainSummary
from gyre_train.progress import ProgressLine
from tests.support.engines import wait_until

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
    assert re.search(r"waited: plan \d+\.\d s", told)
    assert not line.waits()


@pytest.mark.parametrize(
    ("steps", "stopped", "told"),
    [
        (1, False, "1 step, 9 trained tokens, loss 0.0000; out:2 is in c\n"),
        (1, True, "1 step, 9 trained tokens, loss 0.0000; out:2 is in c\nstopped after step 2, as asked; the same"),
        (0, True, "stopped after step 2, as asked; the same command goes on\n"),
        (0, False, "nothing to do: step 2 is reached or the data is used up; c\n"),
    ],
)
def test_the_end_tells_whether_it_was_asked_for(
    steps: int, stopped: bool, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = TrainSummary(
        output=str(tmp_path), version="out:2", checkpoint="c", step=2, steps_done=steps, loss=-0.00001,
        trained_tokens=9, publish_errors=(), stopped=stopped,
    )  # fmt: skip
    _show_summary(done, as_json=False)
    said = capsys.readouterr().out
    assert said.startswith(told)
    assert said.endswith(f"next: gyre view {tmp_path}\n")
    rows = [{"step": step, "score": score} for step, score in ((0, 0.25), (1, 0.5), (2, 0.75), (2, None))]
    (tmp_path / "evals.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _show_summary(done, as_json=False)
    assert "held-out tasks scored 0.250 after step 0, 0.750 after step 2; every pass is" in capsys.readouterr().out


def test_a_bar_tells_it_on_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=True, width=80))
    line = ProgressLine(total=12, done=2, show=True)

    def told() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())

    with line, line.waiting("publish", "publishing: waiting for 2 engines"):
        line.step(ROW)
        wait_until(lambda: "1,204 grad tok/s" in told(), "the bar to be drawn")  # by a thread of its own
    assert "3/12" in told()
    assert "waiting for 2" in told()
