"""Figures of a training run: one JSON object per optimiser step in metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["MetricsLog", "read_metrics"]


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
