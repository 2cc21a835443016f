"""Figures of a training run: one JSON object per optimiser step in metrics.jsonl, and a progress line for people."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["MetricsLog", "ProgressLine", "read_metrics"]

_LOG = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; a line that a crash cut or filled with zeros is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


class MetricsLog:
    """Appends to metrics.jsonl; opened at step `n`, it drops lines of later steps, which will be computed again."""

    def __init__(self, path: Path, step: int) -> None:
        kept = [row for row in read_metrics(path) if row["step"] <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line at once."""
        self._file.write(json.dumps(dict(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProgressLine:
    """A bar on stderr where that is a terminal, else one log record per step."""

    def __init__(self, *, total: int | None, done: int, show: bool) -> None:
        console = Console(stderr=True)
        self._progress: Progress | None = None
        if show and console.is_terminal:
            self._progress = Progress(
                TextColumn("train"), BarColumn(bar_width=24), MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), console=console,
            )  # fmt: skip
            self._task = self._progress.add_task("", total=total, completed=done, figures="")

    def __enter__(self) -> ProgressLine:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def step(self, row: Mapping[str, Any]) -> None:
        """Show one finished step."""
        figures = f"loss {row['loss']:.4f}  grad {row['grad_norm']:.3g}  {row['tokens_per_s']:.0f} tok/s"
        if "mismatch_mean" in row:
            figures += f"  |dlogp| mean {row['mismatch_mean']:.4f} max {row['mismatch_max']:.4f}"
        if self._progress is None:
            _LOG.info("step %d  %s", row["step"], figures)
        else:
            self._progress.update(self._task, advance=1, figures=figures)
