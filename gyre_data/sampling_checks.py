"""Rules about what was sampled: versions in order, usage counted once, side tables as long as their nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .checks import Check, Indices, Problem, ProblemKind, Tables
from .json_values import parsed

__all__ = ["SAMPLING_CHECKS"]


def _check_versions(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    """Within a reply the version of a policy never falls, unless another engine took over."""
    nodes, calls = tables["nodes"], tables["calls"]
    several = nodes.filter(pc.greater(pc.list_value_length(nodes.column("policy_versions")), 1))
    if not several.num_rows:
        return
    engines = pc.list_value_length(calls.column("attempts")).to_pylist()
    attempts = dict(zip(calls.column("call_id").to_pylist(), engines, strict=True))
    for row in several.select(["node_id", "call_id", "policy_versions"]).to_pylist():
        spans = row["policy_versions"]
        for before, after in pairwise(spans):
            fell = before["policy_id"] == after["policy_id"] and after["n"] < before["n"]
            if fell and attempts.get(row["call_id"], 0) < 2:
                detail = f"wanted versions that never fall, got {before['n']} and then {after['n']} from one engine"
                yield Problem(kind=ProblemKind.VERSION, where=f"nodes {row['node_id']}", detail=detail)


def _check_usage(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    """One request of a hosted API is billed once; cached tokens are part of the prompt."""
    calls = tables["calls"]
    seen: dict[tuple[str | None, str], str] = {}
    for row in _having(calls, "provider_usage", ("call_id", "upstream", "provider_request_id", "provider_usage")):
        where = f"calls {row['call_id']}"
        if not _is_object(row["provider_usage"]):
            detail = f"wanted a JSON object as provider_usage, got {row['provider_usage'][:80]!r}"
            yield Problem(kind=ProblemKind.USAGE, where=where, detail=detail)
        if (request := row["provider_request_id"]) is None:
            continue
        first = seen.setdefault((row["upstream"], request), row["call_id"])
        if first != row["call_id"]:
            detail = f"its usage is that of request {request}, which call {first} counts already"
            yield Problem(kind=ProblemKind.USAGE, where=where, detail=detail)
    for row in _having(calls, "cached_tokens", ("call_id", "cached_tokens", "prompt_tokens")):
        prompt = row["prompt_tokens"]
        if row["cached_tokens"] < 0 or (prompt is not None and row["cached_tokens"] > prompt):
            detail = f"wanted cached tokens within its {prompt} prompt tokens, got {row['cached_tokens']}"
            yield Problem(kind=ProblemKind.USAGE, where=f"calls {row['call_id']}", detail=detail)


def _having(table: pa.Table, column: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.select(names).filter(pc.is_valid(table.column(column))).to_pylist()
    return rows


def _is_object(text: str) -> bool:
    return isinstance(parsed(text), dict)


def _check_side_tables(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    """What hangs on a node's tokens has a value for each of them."""
    nodes = tables["nodes"]
    row = {node_id: i for i, node_id in enumerate(nodes.column("node_id").to_pylist())}
    length_N = _lengths(nodes.column("token_ids"))
    for name, column, factors, whole in (
        ("top_logprobs", "token_ids", ("k",), True),
        ("top_logprobs", "logprobs", ("k",), True),
        ("teacher_logprobs", "logprobs", (), True),
        ("routed_experts", "experts", ("num_layers", "top_k"), False),
    ):
        table = tables[name]
        if not table.num_rows:
            continue
        each = np.ones(table.num_rows, np.int64)
        for factor in factors:
            each *= np.asarray(table.column(factor), np.int64)
        start = np.asarray(pc.fill_null(table.column("start"), 0), np.int64) if not whole else 0 * each
        found = _lengths(table.column(column))
        ids = table.column("node_id").to_pylist()
        held = np.array([length_N[row[node_id]] if node_id in row else -1 for node_id in ids], np.int64)
        fits = found == each * held if whole else (found % np.maximum(each, 1) == 0) & (found <= each * (held - start))
        for i in np.flatnonzero(~fits & (held > 0)).tolist():
            detail = f"wanted {each[i]} {column} for each of the {held[i]} tokens of its node, got {found[i]}"
            yield Problem(kind=ProblemKind.ALIGNMENT, where=f"{name} {ids[i]}", detail=detail)


def _lengths(column: pa.ChunkedArray) -> Indices:
    return np.asarray(pc.list_value_length(column), np.int64)


SAMPLING_CHECKS: tuple[Check, ...] = (
    Check(says="versions never fall within a reply", tables=("nodes", "calls"), run=_check_versions),
    Check(says="usage is counted once", tables=("calls",), run=_check_usage),
    Check(
        says="side tables match their nodes",
        tables=("nodes", "top_logprobs", "teacher_logprobs", "routed_experts"),
        run=_check_side_tables,
    ),
)
