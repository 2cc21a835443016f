"""Imports small sources that a test writes, and looks at what came of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gyre_data import import_sessions
from gyre_data import open as open_run
from gyre_data.convert.importing import Imported
from gyre_data.execution import Execution, executions
from gyre_data.tree import Tree
from gyre_data.verify import verify

DATA = Path(__file__).resolve().parents[1] / "data" / "sessions"


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """JSON lines; a str stands as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


def imported(sources: Any, run: Path, **options: Any) -> Imported:
    """Import, and check that the run is whole and that nothing of it could be trained."""
    done = import_sessions(sources, run, **options)
    assert not verify(run).problems
    return done


def only_execution(run: Path) -> Execution:
    """The one execution of a run."""
    opened = open_run(run)
    known = executions(opened)
    assert len(known) == 1
    return Execution(opened, next(iter(known.values())))


def conversation(execution: Execution, node_id: str) -> list[tuple[str, str]]:
    """(role, text or names of calls) along the path to a node."""
    found = []
    for message in execution.path(node_id).messages():
        calls = " ".join(call["name"] for call in message.get("tool_calls", ()))
        found.append((message["role"], message["content"] or calls))
    return found


def said(execution: Execution) -> dict[str, Any]:
    """Calls by what was said: its text, or the names of its calls."""
    tree = execution.tree
    return {conversation(execution, call.output_node)[-1][1]: call for call in tree.calls if call.output_node}


def attributes(execution: Execution) -> dict[str, Any]:
    """What the execution says of its import."""
    return json.loads(execution.info.attributes or "{}")["import"]


def shape(tree: Tree) -> list[tuple[int, str | None, str]]:
    """Parent, role and kind of each node."""
    return list(zip(tree.parent_N.tolist(), tree.message_role_N.tolist(), map(str, tree.kind_N), strict=True))
