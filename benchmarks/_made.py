"""Runs of any size for the benchmarks: long agent executions with tokens and texts of real source files.

As a proxy leaves them: a batch a call (its commit), sixteen executions side by side. Or as compaction leaves them: an
execution after the other, in batches of megabytes. Sealed at the writer's own size; only the syncs of commits are left
out, so that 300 million tokens take minutes and not a day.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from _shape import Shape, long_shape
from _source import Source

from gyre_data import manifest as manifests
from gyre_data.schema import arrow_schema
from gyre_data.schema import table as declared_table
from gyre_data.segment import Sealed, write_sealed
from gyre_data.writer import SEAL_BYTES

__all__ = ["CALLS", "TOKENS", "Part", "link_run", "write_part"]

CALLS, TOKENS = 636, 1_000_000
"""Of one execution, about and exactly."""
START_US = 1_796_000_000_000_000
SIDE_BY_SIDE, ROWS_A_BATCH = 16, 512

_HEADERS = json.dumps({"user-agent": "claude-code/2.1.220 (external, cli)", "anthropic-version": "2023-06-01"})
_SAMPLING = json.dumps({"max_new_tokens": 32000, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop_token_ids": [1]})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Sealed segments of some executions, by table."""

    folder: Path
    sealed: dict[str, tuple[Sealed, ...]]


def write_part(folder: Path, source: Source, executions: range, *, recorded: bool, blobs: bool = True) -> Part:
    """Write the segments of executions number `executions` below `folder`, as recorded or as compacted."""
    sealed: dict[str, list[Sealed]] = {}
    batches: dict[str, list[pa.RecordBatch]] = {}
    name = f"b{executions.start:06d}"

    def flush(table: str) -> None:
        (folder / table).mkdir(parents=True, exist_ok=True)
        path = folder / table / f"{name}-{len(sealed.setdefault(table, [])) + 1:06d}.arrow"
        sealed[table].append(write_sealed(path, arrow_schema(table), batches.pop(table)))

    for at in range(0, len(executions), SIDE_BY_SIDE):
        some = [_Execution(source, number) for number in executions[at : at + SIDE_BY_SIDE]]
        for table, made in _interleaved(some, blobs) if recorded else _in_a_row(some):
            batches.setdefault(table, []).append(made)
        for table in [t for t, held in batches.items() if sum(b.nbytes for b in held) >= SEAL_BYTES]:
            flush(table)
    for table in list(batches):
        flush(table)
    return Part(folder=folder, sealed={table: tuple(found) for table, found in sealed.items()})


def link_run(path: Path, parts: Sequence[Part]) -> Path:
    """A run of all `parts`: their segments by hard links, and a manifest."""
    (path / manifests.FOLDER).mkdir(parents=True)
    sealed: dict[str, tuple[Sealed, ...]] = {}
    for part in parts:
        for table, found in part.sealed.items():
            (path / table).mkdir(exist_ok=True)
            sealed[table] = sealed.get(table, ()) + found
            for one in found:
                os.link(part.folder / table / one.name, path / table / one.name)

    def change(base: manifests.Manifest) -> manifests.Manifest:
        for table, found in sealed.items():
            for one in found:
                base = base.closed(table, one.name.removesuffix(".arrow"), one)
        return base

    manifests.publish(path, change, "bench")
    (path / "run.json").write_text(json.dumps({"format": "gyre", "created_at": "2026-11-29T08:00:00+00:00"}))
    return path


def _interleaved(some: Sequence[_Execution], blobs: bool) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Batches by table in the order of commits: the first call of each execution, then the second, ..."""
    whole = [(one, one.nodes(), one.calls(), one.deliveries()) for one in some]
    for one in some:
        yield "executions", one.events()
        yield "scores", one.scores()
    for number in range(max(len(one.shape.calls) for one in some)):
        for one, nodes, calls, deliveries in whole:
            if number < len(one.shape.calls):
                if blobs:
                    yield "blobs", one.blobs(number)
                first, last = one.rows_of_call[number], one.rows_of_call[number + 1]
                yield "nodes", _cut(nodes, first, last - first)
                yield "calls", _cut(calls, number, 1)
                yield "deliveries", _cut(deliveries, number, 1)


def _in_a_row(some: Sequence[_Execution]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Batches by table, an execution after the other; without blobs."""
    for one in some:
        made = {"executions": one.events(), "scores": one.scores(), "nodes": one.nodes(), "calls": one.calls()}
        for table, batch in (made | {"deliveries": one.deliveries()}).items():
            for at in range(0, batch.num_rows, ROWS_A_BATCH):
                yield table, batch.slice(at, ROWS_A_BATCH)


def _batch(table: str, columns: dict[str, Any], num_rows: int) -> pa.RecordBatch:
    """A batch of `table`; columns that are not given are null."""
    schema = arrow_schema(table)
    arrays = []
    for column in declared_table(table).columns:
        value = columns.get(column.name)
        if value is None:
            value = pa.nulls(num_rows, column.type)
        arrays.append(value if isinstance(value, pa.Array) else pa.array(value, column.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cut(batch: pa.RecordBatch, start: int, count: int) -> pa.RecordBatch:
    """Some rows as the writer would give them: what is null throughout is made anew, else its children come along."""
    cut = batch.slice(start, count)
    arrays = [pa.nulls(count, a.type) if a.null_count == count else a for a in cut.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _ids(prefix: str, execution: int, count: int) -> list[str]:
    """Ids as random as minted ones, the same every time."""
    base = execution << 20
    return [f"{prefix}_{((base + i + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835) % 16**20:020x}" for i in range(count)]


class _Execution:
    """Rows of one execution, column by column."""

    def __init__(self, source: Source, number: int) -> None:
        self.source, self.number = source, number
        self.shape: Shape = long_shape(number % 8, TOKENS)
        self.execution_id = _ids("e", number, 1)[0][:14]
        self.node_ids, self.call_ids = (
            _ids("n", number, len(self.shape.nodes)),
            _ids("c", number, len(self.shape.calls)),
        )
        sizes = np.array([node.num_tokens for node in self.shape.nodes], np.int64)
        self.offset_N1 = np.concatenate([[0], np.cumsum(sizes)])
        self.token_start = number * 1_000_003  # of the endless stream
        call_N = [node.call for node in self.shape.nodes]
        self.rows_of_call = np.searchsorted(call_N, np.arange(len(self.shape.calls) + 1)).tolist()
        self.message_blobs: dict[int, tuple[str, bytes]] = {}

    def _name(self, ids: Sequence[str], at: int | None) -> str | None:
        return None if at is None or at < 0 else ids[at]

    def nodes(self) -> pa.RecordBatch:
        nodes, count = self.shape.nodes, len(self.shape.nodes)
        root: list[str] = []
        for i, node in enumerate(nodes):
            root.append(self.node_ids[i] if node.parent < 0 else root[node.parent])
        output_N = np.array([node.kind == "output" for node in nodes])
        ids = self.source.take(self.token_start, int(self.offset_N1[-1]))
        tokens_type, logprobs_type = (arrow_schema("nodes").field(name).type for name in ("token_ids", "logprobs"))
        sizes = np.diff(self.offset_N1)
        logprob_offset_N1 = np.concatenate([[0], np.cumsum(np.where(output_N, sizes, 0))])
        logprobs = self.source.take_logprobs(self.token_start, int(logprob_offset_N1[-1]))
        version = {"policy_id": "run-7", "n": self.number // 16}
        columns = {
            "node_id": self.node_ids,
            "execution_id": [self.execution_id] * count,
            "root_id": root,
            "parent_id": [self._name(self.node_ids, node.parent) for node in nodes],
            "call_id": [self.call_ids[node.call] for node in nodes],
            "start_pos": self.shape.start_pos,
            "kind": [node.kind for node in nodes],
            "message_role": [node.message_role for node in nodes],
            "author": [node.author for node in nodes],
            "copy_of": [self._name(self.node_ids, node.copy_of) for node in nodes],
            "token_ids": pa.LargeListArray.from_arrays(pa.array(self.offset_N1), pa.array(ids), type=tokens_type),
            "logprobs": pa.LargeListArray.from_arrays(
                pa.array(logprob_offset_N1), pa.array(logprobs), type=logprobs_type, mask=pa.array(~output_N)
            ),
            "policy_versions": [
                [{**version, "start": 0, "end": node.num_tokens}] if node.kind == "output" else None for node in nodes
            ],
            "message_blobs": [
                None if node.message_role is None else [self._message(i)[0]] for i, node in enumerate(nodes)
            ],
            "content_hash": [hashlib.sha256(name.encode()).hexdigest()[:32] for name in self.node_ids],
            "fingerprint": ["qwen3-8b:3fa1c2d4"] * count,
        }
        return _batch("nodes", columns, count)

    def _message(self, i: int) -> tuple[str, bytes]:
        if i not in self.message_blobs:
            node = self.shape.nodes[i]
            text = self.source.text_of(self.token_start + int(self.offset_N1[i]), node.num_tokens)
            message: dict[str, Any] = {"content": text, "role": node.message_role}
            if node.message_role == "assistant":
                name = ("Bash", "Read", "Edit", "Grep")[i % 4]
                message["tool_calls"] = [{"arguments": {"input": text[:40]}, "id": f"toolu_{i}", "name": name}]
            elif node.message_role == "tool":
                message["tool_call_id"] = f"toolu_{node.parent}"
            data = json.dumps(message, sort_keys=True, separators=(",", ":")).encode()
            self.message_blobs[i] = hashlib.sha256(data).hexdigest(), data
        return self.message_blobs[i]

    def _request(self, number: int) -> tuple[str, bytes]:
        """The part of a request's body that no message holds."""
        data = json.dumps({"metadata": {"user_id": self.call_ids[number]}, "stream": True, "x": "x" * 400}).encode()
        return hashlib.sha256(data).hexdigest(), data

    def calls(self) -> pa.RecordBatch:
        calls, nodes, count = self.shape.calls, self.shape.nodes, len(self.shape.calls)
        start_pos = self.shape.start_pos
        prompt = [int(start_pos[c.prompt]) + nodes[c.prompt].num_tokens for c in calls]
        output = [0 if c.output is None else nodes[c.output].num_tokens for c in calls]
        started = START_US + (self.number * 1000 + np.arange(count, dtype=np.int64) * 20_000_000)
        columns = {
            "call_id": self.call_ids,
            "execution_id": [self.execution_id] * count,
            "agent_role": [c.role for c in calls],
            "role_source": ["client"] * count,
            "agent_id": [c.agent for c in calls],
            "spawned_by_node": [self._name(self.node_ids, c.spawned_by) for c in calls],
            "spawned_by_tool_call": [None if c.spawned_by is None else f"toolu_{c.spawned_by}" for c in calls],
            "continues_from": [self._name(self.call_ids, c.continues_from) for c in calls],
            "wire": ["anthropic"] * count,
            "client": ["claude-code/2.1.220 (external, cli)"] * count,
            "prompt_node": [self.node_ids[c.prompt] for c in calls],
            "output_node": [self._name(self.node_ids, c.output) for c in calls],
            "extension": [c.extension for c in calls],
            "branch_reason": [c.reason for c in calls],
            "tokens_lost": [c.tokens_lost for c in calls],
            "thinking_policy": ["keep"] * count,
            "tools_digest": ["77c0" * 8] * count,
            "tools_blob": ["3fa1" * 16] * count,
            "prompt_tokens": prompt,
            "output_tokens": output,
            "cached_tokens": [p * 9 // 10 for p in prompt],
            "sampling_asked": [_SAMPLING] * count,
            "sampling_used": [_SAMPLING] * count,
            "temperature": [1.0] * count,
            "top_p": [1.0] * count,
            "top_k": [-1] * count,
            "constrained": [False] * count,
            "max_tokens": [32000] * count,
            "logprob_convention": ["after_temperature"] * count,
            "seed": list(range(count)),
            "finish_reason": ["stop" if c.status == "ok" else None for c in calls],
            "stop_reason": ["tool_use" if c.status == "ok" else None for c in calls],
            "status": [c.status for c in calls],
            "error": [None if c.status == "ok" else "engine lost" for c in calls],
            "attempts": [[{"engine": "sgl-0", "start": 0, "end": n}] for n in output],
            "started_at": pa.array(started, pa.timestamp("us", tz="UTC")),
            "first_token_at": pa.array(started + 700_000, pa.timestamp("us", tz="UTC")),
            "ended_at": pa.array(started + 9_000_000, pa.timestamp("us", tz="UTC")),
            "request_blobs": [[self._request(i)[0], "3fa1" * 16] for i in range(count)],
            "request_path": ["/v1/messages?beta=true"] * count,
            "request_headers": [_HEADERS] * count,
        }
        return _batch("calls", columns, count)

    def deliveries(self) -> pa.RecordBatch:
        """One row a call: calls without a known delivery say `abandoned`, as the proxy does for failed ones."""
        calls, count = self.shape.calls, len(self.shape.calls)
        at = START_US + self.number * 1000 + np.arange(count, dtype=np.int64) * 20_000_000 + 9_100_000
        columns = {
            "call_id": self.call_ids,
            "execution_id": [self.execution_id] * count,
            "state": [c.delivery or "abandoned" for c in calls],
            "at": pa.array(at, pa.timestamp("us", tz="UTC")),
        }
        return _batch("deliveries", columns, count)

    def blobs(self, number: int) -> pa.RecordBatch:
        rows = range(self.rows_of_call[number], self.rows_of_call[number + 1])
        plain = [self._message(i) for i in rows if self.shape.nodes[i].message_role is not None]
        plain.append(self._request(number))
        columns = {
            "blob_id": [name for name, _ in plain],
            "num_bytes": [len(data) for _, data in plain],
            "codec": ["zstd"] * len(plain),
            "data": [pa.Codec("zstd").compress(data, asbytes=True) for _, data in plain],
        }
        return _batch("blobs", columns, len(plain))

    def events(self) -> pa.RecordBatch:
        """Started and ended; sixteen executions are a group."""
        end = START_US + self.number * 1000 + len(self.shape.calls) * 20_000_000
        columns = {
            "execution_id": [self.execution_id] * 2,
            "event": ["started", "ended"],
            "at": pa.array([START_US + self.number * 1000, end], pa.timestamp("us", tz="UTC")),
            "end_reason": [None, "finished"],
            "group_id": [f"swe-{self.number // 16}", None],
            "task_id": [f"swe-{self.number // 16}", None],
            "sample_index": [self.number % 16, None],
            "harness": ["claude-code", None],
        }
        return _batch("executions", columns, 2)

    def scores(self) -> pa.RecordBatch:
        columns = {
            "score_id": _ids("s", self.number, 1),
            "execution_id": [self.execution_id],
            "evaluator": ["pytest"],
            "evaluator_version": ["3"],
            "status": ["scored"],
            "value": [self.number % 3 / 2],
            "at": pa.array([START_US + 30_000_000_000], pa.timestamp("us", tz="UTC")),
        }
        return _batch("scores", columns, 1)
