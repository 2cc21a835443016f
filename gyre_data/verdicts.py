"""Verdicts from a file: one JSON object a line, all checked before the first is written."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .errors import ConfigError, GyreError
from .execution import executions, find
from .scores import make_score
from .tree import Tables
from .types import Score

__all__ = ["read_verdicts"]

# key of a line: what its value must be
_KEYS: dict[str, tuple[type, ...]] = {
    "execution": (str,),
    "value": (int, float),
    "evaluator": (str,),
    "version": (str,),
    "status": (str,),
    "partial": (bool,),
    "detail": (str, dict, list),
    "state_id": (str,),
    "config_digest": (str,),
}


def read_verdicts(run: Tables, path: Path, *, evaluator: str) -> list[Score]:
    """Rows for `run` from the lines of `path`; `evaluator` is meant where a line names none.

    A line is `{"execution": "e7f3", "value": 0.5, "partial": true}`, or without a value `{"execution": "e7f3",
    "status": "failed", "detail": "timed out"}`. Raises ConfigError that names the first line which cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"wanted a file of verdicts, one JSON object a line, got {path}: {error}") from error
    known = list(executions(run))
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(_object(line), known, evaluator))
        except (GyreError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}; nothing was written") from error
    return rows


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ConfigError(f"wanted a JSON object, got {line.strip():.60}")
    for name, value in found.items():
        if name not in _KEYS:
            near = get_close_matches(name, _KEYS, n=1)
            raise ConfigError(f"unknown key {name!r}; {f'nearest {near[0]}' if near else 'known: ' + ', '.join(_KEYS)}")
        right = isinstance(value, _KEYS[name]) and (bool in _KEYS[name] or not isinstance(value, bool))
        if value is not None and not right:
            wanted = " or ".join(kind.__name__ for kind in _KEYS[name])
            raise ConfigError(f"wanted {wanted} for {name}, got {value!r:.60}")
    return {name: value for name, value in found.items() if value is not None}


def _row(told: dict[str, Any], known: Iterable[str], evaluator: str) -> Score:
    if "execution" not in told:
        raise ConfigError("wanted the key execution, the start of an execution's id")
    detail = told.get("detail")
    more = {name: told.get(name) for name in ("version", "status", "partial", "state_id", "config_digest")}
    return make_score(
        find(known, told["execution"]),
        told.get("value"),
        evaluator=told.get("evaluator", evaluator),
        detail=detail if detail is None or isinstance(detail, str) else json.dumps(detail, ensure_ascii=False),
        **more,
    )
