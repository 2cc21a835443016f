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
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Verdict", "evaluate"]

_MAX_SCORE_FILE = 8 << 20


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
    """Run `command` in `workspace` and read its verdict. Never raises for what the evaluator does wrong.

    What it prints goes to `evaluator.log` beside the score file; processes that it leaves behind are ended.
    """
    if score_file.is_dir():
        shutil.rmtree(score_file)
    score_file.unlink(missing_ok=True)
    log_file = score_file.with_name("evaluator.log")
    told = {"GYRE_WORKSPACE": str(workspace), "GYRE_END_REASON": end_reason, "GYRE_SCORE_FILE": str(score_file)}
    try:
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=workspace,
                env={**env, **told},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        return Verdict(status="failed", detail=f"evaluator did not start: {error}")
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return Verdict(status="failed", detail=f"evaluator ran past its {timeout_s:g} s")
    finally:
        _stop(process.pid)
        await process.wait()
    if process.returncode != 0:
        return Verdict(status="failed", detail=f"evaluator exited {process.returncode}: {_tail(log_file)}")
    return read_verdict(score_file)


def read_verdict(score_file: Path) -> Verdict:
    """Read the evaluator's file; everything but a finite number is a failure with its reason."""
    try:
        if not score_file.is_file() and score_file.exists():
            return Verdict(status="failed", detail="score file cannot be read: it is no regular file")
        if score_file.stat().st_size > _MAX_SCORE_FILE:
            return Verdict(status="failed", detail=f"score file cannot be read: it is over {_MAX_SCORE_FILE} bytes")
        told = json.loads(score_file.read_text())
    except FileNotFoundError:
        return Verdict(status="failed", detail="evaluator wrote no score file")
    except (OSError, ValueError, RecursionError) as error:
        return Verdict(status="failed", detail=f"score file cannot be read: {error}")
    value, partial = (told.get("value"), told.get("partial")) if isinstance(told, dict) else (None, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        return Verdict(status="failed", detail=f"not a number: value is {value!r:.100}")
    if not isinstance(partial, bool | None):
        return Verdict(status="failed", detail=f"not true or false: partial is {partial!r:.100}")
    return Verdict(status="scored", value=float(value), partial=partial, detail=_sendable(told.get("detail")))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False


def _sendable(detail: Any) -> Any:
    """`detail`, or its text when JSON has no form for it (NaN, half of a surrogate pair)."""
    try:
        json.dumps(detail, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return repr(detail).encode("ascii", "backslashreplace").decode()
    return detail


def _tail(log_file: Path) -> str:
    with log_file.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 500))
        return log.read().decode("utf-8", "replace").strip()


def _stop(process_group: int) -> None:
    try:
        os.killpg(process_group, signal.SIGKILL)
    except ProcessLookupError:
        return
