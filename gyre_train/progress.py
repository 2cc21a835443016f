"""What people see of training: a bar on a terminal, a line a step elsewhere; and who waits for whom.

    step 12/40  loss 0.1234  grad 0.51  1,204 grad tok/s  sharing 2.1x  ETA 3m05  waited: plan 0.1 s, publish 2.0 s

Gradient tokens are the trained ones; sharing is the tokens of one row per trajectory over those computed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from gyre_data.show.numbers import duration

__all__ = ["ProgressLine"]

_LOG = logging.getLogger(__name__)
_SEEN_S = 0.05
"""Waits shorter than this are not worth a word."""
_LAYING_OUT = "plan"
"""The wait that a step's computation follows."""


class ProgressLine:
    """Shows each finished step, and on a terminal what the trainer is waiting for meanwhile."""

    def __init__(self, *, total: int, done: int, show: bool, file: Path | None = None) -> None:
        """`total` are the steps there will be, `done` those of earlier sessions; `file` is told what is done now."""
        console = Console(stderr=True)
        self._total, self._first, self._done = total, done, done
        self._begun: float | None = None
        self._waits: dict[str, float] = {}
        self._told = _Told(file, total)
        self._progress: Progress | None = None
        if show and console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
                TextColumn("[dim]{task.fields[doing]}"), console=console,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total, completed=done, figures="", doing="loading")

    def __enter__(self) -> ProgressLine:
        if self._progress is not None:
            self._progress.start()
        self._told.say("loading the model", waiting=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._told.say("ended" if kind is None else f"ended by {kind.__name__}", waiting=False)

    @contextmanager
    def waiting(self, name: str, doing: str) -> Iterator[None]:
        """The trainer waits for what happens inside: `name` in figures, `doing` for people."""
        if self._progress is not None:
            self._progress.update(self._task, doing=doing)
        self._told.say(doing, waiting=True)
        started = time.monotonic()
        self._begun = self._begun or started
        try:
            yield
        finally:
            self._waits[name] = self._waits.get(name, 0.0) + time.monotonic() - started
            if self._progress is not None:
                self._progress.update(self._task, doing="computing")
            if name == _LAYING_OUT:
                self._told.say(f"computing step {self._done + 1}", waiting=False)

    def waits(self) -> dict[str, float]:
        """Seconds waited since the last step that was shown, as figures: `plan_seconds` and so on."""
        return {f"{name}_seconds": seconds for name, seconds in self._waits.items()}

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one finished step."""
        self._done += 1
        now = time.monotonic()
        each = (now - (self._begun or now)) / (self._done - self._first)
        left = duration(each * max(0, self._total - self._done))
        figures = (
            f"loss {row['loss']:z.4f}  {row['trained_tokens_per_s']:,.0f} grad tok/s  sharing {row['sharing']:.2f}x  "
            f"ETA {left}"
        )
        if self._progress is None:
            _LOG.info("step %d/%d  %s%s", row["step"], max(self._total, row["step"]), figures, self._more(row))
        else:
            self._progress.update(self._task, advance=1, figures=figures)
        self._waits.clear()

    def _more(self, row: Mapping[str, Any]) -> str:
        """What a line has room for and a bar has not."""
        told = f"  grad norm {row['grad_norm']:.3g}"
        if "mismatch_mean" in row:
            told += f"  |dlogp| mean {row['mismatch_mean']:.4f} max {row['mismatch_max']:.4f}"
        waited = [f"{name} {seconds:.1f} s" for name, seconds in self._waits.items() if seconds >= _SEEN_S]
        return told + (f"  waited: {', '.join(waited)}" if waited else "")


class _Told:
    """The trainer's word for whoever looks on: one small file, replaced as a whole (docs/format.md)."""

    def __init__(self, file: Path | None, total: int) -> None:
        self._file, self._total = file, total
        self._said = ""

    def say(self, doing: str, *, waiting: bool) -> None:
        """Write what is done from now on, unless that was said already."""
        if self._file is None or doing == self._said:
            return
        self._said = doing
        partial = self._file.with_suffix(".partial")
        told = {"doing": doing, "waiting": waiting, "since": time.time(), "total": self._total}
        partial.write_text(json.dumps(told) + "\n", encoding="utf-8")
        partial.replace(self._file)
