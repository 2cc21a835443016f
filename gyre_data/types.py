"""Rows of the on-disk tables as frozen dataclasses: one field per column of `schema.TABLES`, in the same order.

A nullable column is `... | None = None`. Arrays are one-dimensional numpy arrays (int32 token ids, float32 log-probs),
times are timezone-aware datetimes in UTC. `tests/arch` holds this file against the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import numpy as np
import numpy.typing as npt

from .schema import (
    AgentRole,
    Author,
    BranchReason,
    CallStatus,
    DeliveryState,
    EndReason,
    Extension,
    NodeKind,
    ScoreStatus,
)

__all__ = [
    "ROW_TYPES",
    "Attempt",
    "Blob",
    "Call",
    "CellSpan",
    "Delivery",
    "EnvironmentState",
    "ExecutionEvent",
    "Floats",
    "Ints",
    "LedgerRow",
    "Node",
    "PolicyVersion",
    "RoutedExperts",
    "Score",
    "Step",
    "TeacherLogprobs",
    "TopLogprobs",
    "VersionSpan",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """Weights: lineage id and number. The engine's weight_version string is `id:n`; untrained weights are `base:0`."""

    policy_id: str
    n: int

    def __str__(self) -> str:
        return f"{self.policy_id}:{self.n}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read `id:n`; raise ValueError on anything else (an unlabelled engine says `default`)."""
        policy_id, sep, n = text.rpartition(":")
        if not sep or not policy_id or not n.isdigit():
            raise ValueError(f"wanted a weight version like run-7:3, got {text!r}; start the engine with one")
        return cls(policy_id=policy_id, n=int(n))


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of an output were sampled by version n of policy_id."""

    policy_id: str
    n: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Tokens [start, end) of an output came from this engine."""

    engine: str
    start: int
    end: int
    adapter_id: str | None = None
    rollout_precision: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Node:
    """Row of `nodes`: tokens added to its parent; the ids along a path are a call's exact prompt and output."""

    node_id: str
    execution_id: str
    root_id: str
    parent_id: str | None = None
    call_id: str
    start_pos: int
    kind: NodeKind
    message_role: str | None = None
    author: Author
    copy_of: str | None = None
    token_ids: Ints
    logprobs: Floats | None = None
    policy_versions: tuple[VersionSpan, ...] | None = None
    message_blobs: tuple[str, ...] | None = None
    content_hash: str | None = None
    fingerprint: str | None = None
    counted_tokens: int | None = None
    redacted: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """Row of `calls`: one model request and its reply. It exists once this row is committed; nodes come first."""

    call_id: str
    execution_id: str
    agent_role: AgentRole
    role_source: str
    agent_id: str | None = None
    parent_agent_id: str | None = None
    spawned_by_node: str | None = None
    spawned_by_tool_call: str | None = None
    continues_from: str | None = None
    wire: str
    client: str | None = None
    prompt_node: str | None = None
    output_node: str | None = None
    extension: Extension
    branch_reason: BranchReason | None = None
    fork_check: str | None = None
    first_difference_message: int | None = None
    first_difference_token: int | None = None
    tokens_lost: int | None = None
    thinking_policy: str | None = None
    tools_digest: str | None = None
    tools_blob: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    sampling_asked: str | None = None
    sampling_used: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    constrained: bool | None = None
    max_tokens: int | None = None
    logprob_convention: str | None = None
    seed: int | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    status: CallStatus
    error: str | None = None
    attempts: tuple[Attempt, ...]
    started_at: datetime
    first_token_at: datetime | None = None
    ended_at: datetime | None = None
    environment_state_id: str | None = None
    request_blobs: tuple[str, ...] | None = None
    request_path: str | None = None
    request_headers: str | None = None
    provider_usage: str | None = None
    upstream: str | None = None
    http_status: int | None = None
    served_model: str | None = None
    provider_request_id: str | None = None
    response_blobs: tuple[str, ...] | None = None
    note: str | None = None
    echo_difference: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Delivery:
    """Row of `deliveries`: whether a reply reached the harness. The latest row counts; none means unknown."""

    call_id: str
    execution_id: str
    state: DeliveryState
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupEvent:
    """Row of `groups`. Event rows: a group was created or changed. The latest row of a group counts."""

    group_id: str
    at: datetime
    task_id: str | None = None
    size: int | None = None
    attributes: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExecutionEvent:
    """Row of `executions`. Event rows: an execution started, or ended with a reason. Later rows add to earlier ones."""

    execution_id: str
    event: str
    at: datetime
    end_reason: EndReason | None = None
    group_id: str | None = None
    task_id: str | None = None
    sample_index: int | None = None
    harness: str | None = None
    harness_version: str | None = None
    launcher: str | None = None
    dispatch_policy_id: str | None = None
    dispatch_version: int | None = None
    attributes: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EnvironmentState:
    """Row of `environments`. States of the workspace, captured at the start, every n calls, and at the end."""

    state_id: str
    execution_id: str
    captured_at: datetime
    kind: str
    digest: str
    location: str | None = None
    parent_id: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    """Row of `scores`. Append-only verdicts. A re-score is a new row; the last scored row of an evaluator counts."""

    score_id: str
    execution_id: str
    evaluator: str
    evaluator_version: str | None = None
    config_digest: str | None = None
    status: ScoreStatus
    value: float | None = None
    partial: bool | None = None
    state_id: str | None = None
    detail: str | None = None
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Blob:
    """Row of `blobs`. Content-addressed bytes: message and tool texts, pieces of request bodies."""

    blob_id: str
    num_bytes: int
    codec: str
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoutedExperts:
    """Row of `routed_experts`: experts of a node's tokens, from the first call that computed them."""

    node_id: str
    call_id: str
    num_layers: int
    top_k: int
    start: int | None = None
    experts: npt.NDArray[np.int16]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TopLogprobs:
    """Row of `top_logprobs`. Side table: top-k alternatives of a sampled node."""

    node_id: str
    k: int
    token_ids: Ints
    logprobs: Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TeacherLogprobs:
    """Row of `teacher_logprobs`. Side table: another model's log-probs of a node's tokens."""

    node_id: str
    teacher: str
    logprobs: Floats
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LedgerRow:
    """Row of `ledger`. What training consumed: one row per trained trajectory."""

    step: int
    policy_id: str
    data_run: str
    manifest: int
    execution_id: str
    group_id: str | None = None
    trajectory: int
    leaf_node: str
    owned_tokens: int
    reward: float | None = None
    advantage: float | None = None
    score_ids: tuple[str, ...]
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """Row of `steps`. Optimiser steps: the version each made and what it was made from."""

    step: int
    policy_id: str
    n: int
    parent_policy_id: str
    parent_n: int
    num_executions: int
    trained_tokens: int
    loss: float | None = None
    metrics: str | None = None
    checkpoint: str | None = None
    at: datetime


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellSpan:
    """Row of `cells`. The controller's JSONL read as a table: spans of time a cell spent in one role."""

    cell: str
    role: str
    started_at: datetime
    ended_at: datetime | None = None
    queue_wait_s: float | None = None
    occupancy: float | None = None


ROW_TYPES: dict[str, type] = {
    "nodes": Node,
    "calls": Call,
    "deliveries": Delivery,
    "executions": ExecutionEvent,
    "groups": GroupEvent,
    "environments": EnvironmentState,
    "scores": Score,
    "blobs": Blob,
    "routed_experts": RoutedExperts,
    "top_logprobs": TopLogprobs,
    "teacher_logprobs": TeacherLogprobs,
    "ledger": LedgerRow,
    "steps": Step,
    "cells": CellSpan,
}
