"""What the page shows, as plain JSON values: the run at a glance, and one execution whole.

Texts and token ids are not in it. Messages are named by blob, tokens by node, so that a page fetches or inflates only
what is opened. Nothing is left out for size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, fields
from datetime import datetime
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gyre_data.admission import admit
from gyre_data.arrays import from_table
from gyre_data.errors import ConfigError
from gyre_data.execution import Execution
from gyre_data.links import compactions, sub_agents
from gyre_data.listing import list_executions
from gyre_data.reader import Run
from gyre_data.run_stats import stats
from gyre_data.schema import NodeKind
from gyre_data.show.outline import outline
from gyre_data.show.tree_json import tree_json
from gyre_data.tree import Tree
from gyre_data.types import Call

from .texts import Texts

__all__ = ["Kept", "execution_model", "node_tokens", "plain", "run_figures", "run_model"]

_FACTS = ("mode", "policy", "tokenizer", "template", "context_window", "thinking", "parser", "created_at")


def plain(value: Any) -> Any:
    """Values that JSON holds: times as ISO text, enums by their spelling, tuples as lists."""
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def run_model(run: Run) -> dict[str, Any]:
    """The run at a glance: a row per execution, and counts of what is wrong. No tree is loaded."""
    calls = run.table("calls")
    rows = _rows_per_execution(run)
    info = run.info
    return {
        "path": str(run.path),
        "info": {name: plain(info.get(name)) for name in _FACTS if info.get(name) is not None},
        "executions": [
            {**plain(asdict(one)), "num_rows": rows.get(one.execution_id, 0)} for one in list_executions(run)
        ],
        "calls": {
            "status": _counts(calls, "status"),
            "role": _counts(calls, "agent_role"),
            "total": calls.num_rows,
        },
    }


def run_figures(run: Run, *, j_max: int | None = 5, evaluators: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What needs every tree: sharing, distributions, what would be trained, and why executions are not admitted."""
    told: dict[str, Any] = {"stats": plain(stats(run, j_max=j_max).to_json()), "j_max": j_max}
    try:
        admission = admit(run, j_max=j_max, evaluators=evaluators)
    except ConfigError as error:  # several evaluators, and nobody said which one is the reward
        return told | {"admission": {}, "groups": [], "not_judged": str(error)}
    every: dict[str, dict[str, Any]] = {
        e.execution_id: {
            "admitted": True,
            "reward": plain(e.reward),
            "advantage": plain(e.advantage),
            "owned_tokens": e.num_owned,
            "partial": e.partial,
        }
        for e in admission.executions
    }
    for left_out in admission.excluded:
        if left_out.call_id is None and left_out.node_id is None:
            why = {"admitted": False, "reason": str(left_out.reason), "detail": left_out.detail}
            every.setdefault(left_out.execution_id, why)
    groups = [{name: plain(getattr(g, name)) for name in g.__slots__ if name != "run"} for g in admission.groups]
    return told | {"admission": every, "groups": groups, "not_judged": None}


class Kept:
    """What never changes of the rows of one execution, so that a page that follows it is not told anew at each call."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.blobs: list[str] = []
        """Blob ids by the small numbers that stand for them, in order of first use."""
        self.recorded: dict[str, dict[str, Any]] = {}
        """Of calls and nodes by id, for `tree_json`."""
        self._number: dict[str, int] = {}
        self._calls: dict[str, dict[str, Any]] = {}
        self._nodes: dict[str, dict[str, Any]] = {}

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The numbers of these blobs."""
        found = []
        for name in names:
            if name not in self._number:
                self._number[name] = len(self.blobs)
                self.blobs.append(name)
            found.append(self._number[name])
        return found

    def call(self, call: Call, told: Container[str]) -> dict[str, Any]:
        """Every column of the call that has a value and is not `told` already."""
        if call.call_id not in self._calls:
            values = {f.name: getattr(call, f.name) for f in fields(call) if f.name not in told}
            row = {name: plain(value) for name, value in values.items() if value is not None}
            row["attempts"] = [plain(asdict(attempt)) for attempt in call.attempts]
            for name in ("request_blobs", "response_blobs"):
                if name in row:
                    row[name] = self.numbers(row[name])
            if call.tools_blob is not None:
                row["tools_blob"] = self.numbers([call.tools_blob])[0]
            self._calls[call.call_id] = row
        return self._calls[call.call_id]

    def node(self, tree: Tree, i: int) -> dict[str, Any]:
        """Messages, version spans, and whether its tokens were only counted."""
        node_id = tree.node_id[i]
        if node_id not in self._nodes:
            row: dict[str, Any] = {}
            if names := tree.message_blobs(i):
                row["messages"] = self.numbers(names)
            if tree.kind_N[i] == NodeKind.OUTPUT and (spans := tree.versions(i)) is not None:
                row["versions"] = [[f"{s.policy_id}:{s.n}", s.start, s.end] for s in spans]
            if tree.counted_N[i]:
                row["counted"] = True
            self._nodes[node_id] = row
        return self._nodes[node_id]


def execution_model(execution: Execution, kept: Kept, *, j_max: int | None = 5) -> dict[str, Any]:
    """One execution of a run on disk: outline, calls with every recorded column, nodes, links, a line of each message.

    `kept` is of this execution, new or from an earlier snapshot.
    """
    tree = execution.tree
    told = tree_json(outline(execution, j_max=j_max), kept.recorded)
    for row, call in zip(told["calls"], tree.calls, strict=True):
        row |= kept.call(call, row.keys())
    redacted, teachers = _redacted(execution), _teachers(execution)
    for i, row in enumerate(told["nodes"]):
        row |= kept.node(tree, i)
        if row["node_id"] in redacted:
            row["redacted"] = redacted[row["node_id"]]
        if row["node_id"] in teachers:
            row["teachers"] = teachers[row["node_id"]]
    named = {number for row in told["nodes"] for number in row.get("messages", ())}
    return told | {
        "lines": {number: kept.texts.line(kept.blobs[number]) for number in sorted(named)},
        "blobs": [*kept.blobs],  # it grows, and what was told stays as it was told
        "compactions": [asdict(one) for one in compactions(tree)],
        "sub_agents": [plain(asdict(one)) for one in sub_agents(tree)],
        "environments": _environments(execution),
        "execution": plain(told["execution"]),
        "scores": plain(told["scores"]),
        "running": execution.info.running,
    }


def node_tokens(tree: Tree, nodes: Iterable[int]) -> tuple[bytes, bytes]:
    """Little-endian int32 ids of these nodes end to end, and float32 log-probs of those that have any."""
    ids: list[Any] = [np.empty(0, "<i4")]
    logprobs: list[Any] = [np.empty(0, "<f4")]
    for i in nodes:
        ids.append(np.asarray(tree.ids(i), "<i4"))
        if (recorded := tree.logprobs(i)) is not None:
            logprobs.append(np.asarray(recorded, "<f4"))
    return np.concatenate(ids).tobytes(), np.concatenate(logprobs).tobytes()


def _redacted(execution: Execution) -> dict[str, list[str]]:
    nodes = execution.run.table("nodes").select(("node_id", "execution_id", "redacted"))
    found = nodes.filter(pc.is_valid(nodes.column("redacted")))
    found = found.filter(pc.equal(found.column("execution_id"), execution.execution_id))
    return dict(zip(found.column("node_id").to_pylist(), found.column("redacted").to_pylist(), strict=True))


def _teachers(execution: Execution) -> dict[str, list[dict[str, Any]]]:
    """Log-probs that another model, or the trainer, gave to recorded tokens."""
    table = execution.run.table("teacher_logprobs")
    found: dict[str, list[dict[str, Any]]] = {}
    if table.num_rows:
        table = table.filter(pc.is_in(table.column("node_id"), value_set=pa.array(execution.tree.node_id, pa.string())))
        for row in from_table("teacher_logprobs", table):
            one = {"teacher": row.teacher, "logprobs": [round(float(x), 6) for x in row.logprobs]}
            found.setdefault(row.node_id, []).append(one)
    return found


def _rows_per_execution(run: Run) -> dict[str, int]:
    """Rows that tell of an execution: when the number changes there is something new to show.

    Log-probs of another model are counted for each, since only nodes name them.
    """
    total: Counter[str] = Counter()
    for name in ("calls", "deliveries", "executions", "scores", "environments"):
        for item in run.table(name).column("execution_id").value_counts().to_pylist():
            total[item["values"]] += item["counts"]
    taught = run.table("teacher_logprobs").num_rows
    return {name: rows + taught for name, rows in total.items()}


def _counts(table: pa.Table, column: str) -> dict[str, int]:
    return {item["values"]: item["counts"] for item in table.column(column).value_counts().to_pylist()}


def _environments(execution: Execution) -> list[dict[str, Any]]:
    table = execution.run.table("environments")
    table = table.filter(pc.equal(table.column("execution_id"), execution.execution_id))
    rows: list[dict[str, Any]] = plain([asdict(row) for row in from_table("environments", table)])
    return rows
