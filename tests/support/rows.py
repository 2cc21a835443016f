"""Rows for tests: small valid executions, and Hypothesis strategies for rows of every table."""

from __future__ import annotations

import typing
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from gyre_data.schema import (
    TABLES,
    AgentRole,
    Author,
    CallStatus,
    DeliveryState,
    EndReason,
    Extension,
    NodeKind,
    ScoreStatus,
)
from gyre_data.types import (
    ROW_TYPES,
    Attempt,
    Call,
    Delivery,
    ExecutionEvent,
    Node,
    Score,
    VersionSpan,
)

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def prompt_node(node_id: str, call_id: str, parent: Node | None = None, num_tokens: int = 3, **more: Any) -> Node:
    start = 0 if parent is None else parent.start_pos + len(parent.token_ids)
    given: dict[str, Any] = {
        "node_id": node_id,
        "execution_id": "e_1" if parent is None else parent.execution_id,
        "root_id": node_id if parent is None else parent.root_id,
        "parent_id": None if parent is None else parent.node_id,
        "call_id": call_id,
        "start_pos": start,
        "kind": NodeKind.PROMPT,
        "author": Author.CLIENT,
        "token_ids": np.arange(start, start + num_tokens, dtype=np.int32),
    }
    return Node(**{**given, **more})


def output_node(node_id: str, call_id: str, parent: Node, num_tokens: int = 4, **more: Any) -> Node:
    sampled: dict[str, Any] = {
        "kind": NodeKind.OUTPUT,
        "author": Author.POLICY,
        "logprobs": -np.arange(num_tokens, dtype=np.float32) / 8,
        "policy_versions": (VersionSpan(policy_id="base", n=0, start=0, end=num_tokens),) if num_tokens else (),
    }
    return prompt_node(node_id, call_id, parent, num_tokens, **{**sampled, **more})


def call_row(call_id: str, prompt: Node | None, output: Node | None, execution_id: str = "e_1", **more: Any) -> Call:
    given: dict[str, Any] = {
        "call_id": call_id,
        "execution_id": execution_id,
        "agent_role": AgentRole.MAIN,
        "role_source": "first",
        "wire": "openai_chat",
        "prompt_node": prompt and prompt.node_id,
        "output_node": output and output.node_id,
        "extension": Extension.ROOT,
        "prompt_tokens": None if prompt is None else prompt.start_pos + len(prompt.token_ids),
        "output_tokens": None if output is None else len(output.token_ids),
        "status": CallStatus.OK,
        "attempts": (Attempt(engine="sgl-0", start=0, end=0 if output is None else len(output.token_ids)),),
        "started_at": START,
    }
    return Call(**{**given, **more})


def one_call(number: int, parent: Node | None = None, execution_id: str = "e_1") -> list[Any]:
    """Prompt, output and call row of call `number`, which goes on from `parent` when given."""
    call_id = f"{execution_id}_c{number}"
    prompt = prompt_node(f"{execution_id}_p{number}", call_id, parent, execution_id=execution_id)
    output = output_node(f"{execution_id}_o{number}", call_id, prompt, num_tokens=1 + number % 5)
    return [prompt, output, call_row(call_id, prompt, output, execution_id=execution_id)]


def one_execution(execution_id: str = "e_1", num_calls: int = 3, score: float | None = 0.5) -> list[Any]:
    """All rows of a finished execution: one conversation of `num_calls` calls, delivered, ended, scored."""
    rows: list[Any] = [
        ExecutionEvent(
            execution_id=execution_id,
            event="started",
            at=START,
            group_id="g_1",
            task_id="task-1",
            sample_index=0,
            harness="bundled",
        )
    ]
    parent = None
    for number in range(num_calls):
        made = one_call(number, parent, execution_id)
        parent = made[1]
        rows += made
        rows.append(
            Delivery(call_id=made[2].call_id, execution_id=execution_id, state=DeliveryState.DELIVERED, at=START)
        )
    ended = START + timedelta(minutes=1)
    rows.append(ExecutionEvent(execution_id=execution_id, event="ended", at=ended, end_reason=EndReason.FINISHED))
    if score is not None:
        rows.append(
            Score(
                score_id=f"s_{execution_id}",
                execution_id=execution_id,
                evaluator="pytest",
                status=ScoreStatus.SCORED,
                value=score,
                at=ended,
            )
        )
    return rows


def same_row(left: Any, right: Any) -> bool:
    """Equality of rows whose fields may be arrays; NaN equals NaN, as bits do."""
    if type(left) is not type(right):
        return False
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            if a is None or b is None or a.dtype != b.dtype or a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


# --- Hypothesis ----------------------------------------------------------------------------------------------------

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_TIMES = st.datetimes(min_value=datetime(1970, 1, 2), max_value=datetime(2200, 1, 1), timezones=st.just(UTC))


def rows_of(name: str) -> st.SearchStrategy[list[Any]]:
    """Lists of rows of one table, every type of value allowed by its schema and by the writer's own checks."""
    return st.lists(_row(name), max_size=6)


def _row(name: str) -> st.SearchStrategy[Any]:
    row_type = ROW_TYPES[name]
    hints = typing.get_type_hints(row_type)
    made = {c.name: _value(c.name, c.type, c.nullable, hints[c.name]) for c in TABLES[name].columns}
    rows = st.builds(row_type, **made)
    return rows.map(_aligned) if name == "nodes" else rows


def _value(column: str, type_: pa.DataType, nullable: bool, hint: Any) -> st.SearchStrategy[Any]:
    found = _plain(column, type_, hint)
    return st.none() | found if nullable else found


def _plain(column: str, type_: pa.DataType, hint: Any) -> st.SearchStrategy[Any]:
    for kind in typing.get_args(hint) or (hint,):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return st.sampled_from([member for member in kind if member != "unknown_value"])
    if column == "policy_versions":
        return st.just(())  # cut to length in _aligned
    if column == "attempts":
        whole = st.integers(0, 2**40)
        made = st.builds(Attempt, engine=_TEXT, start=whole, end=whole, adapter_id=st.none() | _TEXT, error=_TEXT)
        return st.lists(made, max_size=3).map(tuple)
    if pa.types.is_large_list(type_):
        dtype = type_.value_type.to_pandas_dtype()
        if dtype is np.float32:
            numbers: st.SearchStrategy[Any] = st.floats(-50, 0, width=32)
        else:
            top = np.iinfo(dtype).max
            numbers = st.integers(0, int(top))
        return st.lists(numbers, max_size=9).map(lambda values: np.array(values, dtype))
    if pa.types.is_list(type_):
        return st.lists(_TEXT, max_size=3).map(tuple)
    if pa.types.is_string(type_):
        return _TEXT
    if pa.types.is_large_binary(type_):
        return st.binary(max_size=40)
    if pa.types.is_timestamp(type_):
        return _TIMES
    if pa.types.is_boolean(type_):
        return st.booleans()
    if pa.types.is_floating(type_):
        return st.floats(allow_nan=False)
    return st.integers(-(2 ** (type_.bit_width - 1)), 2 ** (type_.bit_width - 1) - 1)


def _aligned(node: Node) -> Node:
    """The node with log-probs and spans that the writer accepts."""
    size = len(node.token_ids)
    is_output = node.kind == NodeKind.OUTPUT
    versions = None
    if node.policy_versions is not None:
        cut = size // 2
        spans = [(0, cut), (cut, size)] if cut else [(0, size)]
        versions = tuple(VersionSpan(policy_id="p", n=i, start=a, end=b) for i, (a, b) in enumerate(spans) if b > a)
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    keep = is_output and node.logprobs is not None
    return Node(
        **{**values, "policy_versions": versions, "logprobs": -np.ones(size, np.float32) if keep else None},
    )
