"""Trajectory trees on disk: write, read, check, count and admit.

Importing this package loads no third-party module; a name is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name: module that defines it
_EXPORTS: dict[str, str] = {
    "Execution": "execution",
    "GyreError": "errors",
    "Path": "path",
    "Run": "store",
    "RunWriter": "writer",
    "Tree": "tree",
    "admit": "admission",
    "diff_paths": "diff",
    "explain_execution": "explain",
    "explain_run": "explain",
    "find_run": "store",
    "import_sessions": "convert.importing",
    "list_executions": "listing",
    "list_runs": "listing",
    "open": "store",
    "score": "scores",
    "sql": "query",
    "stats": "run_stats",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
