"""Trajectory trees on disk: write, read, check, count and admit.

Importing this package loads no third-party module; a name is loaded when it is first used (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers and editors
    from .admission import admit as admit
    from .convert.exporting import export as export
    from .convert.importing import import_sessions as import_sessions
    from .diff import diff_paths as diff_paths
    from .errors import GyreError as GyreError
    from .evaluation import compare as compare
    from .evaluation import evaluate as evaluate
    from .execution import Execution as Execution
    from .explain import explain_execution as explain_execution
    from .explain import explain_run as explain_run
    from .listing import list_executions as list_executions
    from .listing import list_runs as list_runs
    from .path import Path as Path
    from .query import sql as sql
    from .run_stats import stats as stats
    from .scores import score as score
    from .store import Run as Run
    from .store import find_run as find_run
    from .store import open as open
    from .tree import Tree as Tree
    from .writer import RunWriter as RunWriter

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
    "compare": "evaluation",
    "diff_paths": "diff",
    "evaluate": "evaluation",
    "explain_execution": "explain",
    "explain_run": "explain",
    "export": "convert.exporting",
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
