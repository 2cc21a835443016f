"""The evaluator contract: a command that judges a preserved workspace and writes one JSON file.

It gets GYRE_WORKSPACE, GYRE_END_REASON and GYRE_SCORE_FILE (and the task's id and sample index) and writes
`{"value": number, "partial": bool, "detail": ...}`. A non-zero exit, no file, a value that is not a finite number, or
its own timeout make the verdict `failed`: the execution is excluded and counted, never scored zero.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "evaluate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """`value` is finite when `status` is scored and None otherwise; `detail` says why it failed."""

    status: str  # scored | failed
    value: float | None = None
    partial: bool | None = None
    detail: Any = None


async def evaluate(
    command: list[str], workspace: Path, end_reason: str, score_file: Path, *, timeout_s: float, env: Mapping[str, str]
) -> Verdict:
    """Run `command` in `workspace` and read its verdict. Never raises for what the evaluator does wrong."""
    score_file.unlink(missing_ok=True)
    told = {"GYRE_WORKSPACE": str(workspace), "GYRE_END_REASON": end_reason, "GYRE_SCORE_FILE": str(score_file)}
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=workspace,
            env={**env, **told},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Verdict(status="failed", detail=f"evaluator did not start: {error}")
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        _stop(process.pid)
        await process.wait()
        return Verdict(status="failed", detail=f"evaluator ran past its {timeout_s:g} s")
    except asyncio.CancelledError:
        _stop(process.pid)
        raise
    if process.returncode != 0:
        tail = printed.decode("utf-8", "replace")[-500:].strip()
        return Verdict(status="failed", detail=f"evaluator exited {process.returncode}: {tail}")
    return read_verdict(score_file)


def read_verdict(score_file: Path) -> Verdict:
    """Read the evaluator's file; everything but a finite number is a failure with its reason."""
    try:
        told = json.loads(score_file.read_text())
    except FileNotFoundError:
        return Verdict(status="failed", detail="evaluator wrote no score file")
    except (OSError, ValueError) as error:
        return Verdict(status="failed", detail=f"score file cannot be read: {error}")
    value = told.get("value") if isinstance(told, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return Verdict(status="failed", detail=f"not a number: value is {value!r}")
    return Verdict(status="scored", value=float(value), partial=told.get("partial"), detail=told.get("detail"))


def _stop(process_group: int) -> None:
    try:
        os.killpg(process_group, signal.SIGKILL)
    except ProcessLookupError:
        return
