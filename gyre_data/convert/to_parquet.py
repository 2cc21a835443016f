"""Parquet, as Hugging Face `datasets` and every data library read it: a row for each kept trajectory.

Lists within rows are read back whole row group by row group, and readers fail on groups whose texts pass 2 GiB. So
groups are cut by bytes, and each is read once before the file gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gyre_data.admission import AdmittedExecution
from gyre_data.eligible import eligibility
from gyre_data.errors import DataError
from gyre_data.execution import Execution

from .export_job import Job, TextMissing
from .to_chat import chat_message
from .token_rows import TokenRow, token_row

__all__ = ["SCHEMA", "write_parquet"]

_GROUP_BYTES = 64 << 20
_GROUP_ROWS = 1024

_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.string()),
        ("tool_call_id", pa.string()),
        ("trained", pa.bool_()),
    ]
)
_CALL = pa.struct(
    [
        ("call_id", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("temperature", pa.float64()),
        ("finish_reason", pa.string()),
    ]
)
_VERSION = pa.struct([("policy_id", pa.string()), ("n", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])

SCHEMA = pa.schema(
    [
        ("execution_id", pa.string()),
        ("trajectory", pa.int32()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample_index", pa.int64()),
        ("harness", pa.string()),
        ("agent_role", pa.string()),
        ("agent_id", pa.string()),
        ("messages", pa.list_(_MESSAGE)),
        ("tools", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("rl_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float32())),
        ("calls", pa.list_(_CALL)),
        ("versions", pa.list_(_VERSION)),
        ("num_tokens", pa.int64()),
        ("num_trained", pa.int64()),
        ("admitted", pa.bool_()),
        ("reason", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
    ]
)


def write_parquet(job: Job, file: IO[bytes]) -> None:
    """Write all rows, then read every row group once."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in _groups(job):
            writer.write_table(pa.Table.from_batches([batch]), row_group_size=batch.num_rows)
            job.num_rows["rows"] += batch.num_rows
            job.num_rows["row groups"] += 1
    file.flush()
    written = pq.ParquetFile(file.name)
    try:
        read = sum(written.read_row_group(i).num_rows for i in range(written.num_row_groups))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"wanted to read back {file.name}, got {error}; report this, nothing was exported") from error
    assert read == job.num_rows["rows"]


def _groups(job: Job) -> Iterator[pa.RecordBatch]:
    """Row groups: of one execution or several, cut by bytes."""
    held: list[pa.RecordBatch] = []
    held_bytes = held_rows = 0
    for row in _rows(job):
        batch = pa.RecordBatch.from_pylist([row], schema=SCHEMA)
        if held and (held_bytes + batch.nbytes > _GROUP_BYTES or held_rows >= _GROUP_ROWS):
            yield pa.concat_batches(held)
            held, held_bytes, held_rows = [], 0, 0
        held.append(batch)
        held_bytes, held_rows = held_bytes + batch.nbytes, held_rows + 1
    if held:
        yield pa.concat_batches(held)


def _rows(job: Job) -> Iterator[dict[str, Any]]:
    judged, why = _judged(job)
    for admitted, execution in job.admitted(need_score=False, need_ids=False):
        rl_N = eligibility(admitted.tree).trainable_N
        of_rl = judged.get(admitted.execution_id)
        for trajectory in admitted.trajectories:
            row = token_row(job, admitted, trajectory, execution)
            try:
                messages = _messages(job, row)
            except TextMissing:
                job.left_out["trajectories"]["text_missing"] += 1
                continue
            rl_T = row.owned_T & np.repeat(rl_N[row.nodes], np.diff(row.starts_N1))
            yield {
                **_labels(job, row, execution),
                **_tokens(row, rl_T),
                "messages": messages,
                "tools": json.dumps(job.clean(row.path.tools()), ensure_ascii=False),
                "admitted": of_rl is not None,
                "reason": why.get(admitted.execution_id),
                "reward": of_rl and of_rl.reward,
                "advantage": of_rl and of_rl.advantage,
            }


def _judged(job: Job) -> tuple[dict[str, AdmittedExecution], dict[str, str]]:
    """What RL admits, and why not the rest."""
    found = job.admission()
    admitted = {e.execution_id: e for e in found.executions}
    whole = {x.execution_id: str(x.reason) for x in found.excluded if x.call_id is None and x.node_id is None}
    return admitted, whole


def _labels(job: Job, row: TokenRow, execution: Execution) -> dict[str, Any]:
    info, call = execution.info, row.path.call
    told = {
        "group_id": info.group_id,
        "task_id": info.task_id,
        "harness": info.harness,
        "agent_id": call.agent_id if call else None,
    }
    return {
        **job.clean(told),
        "execution_id": info.execution_id,
        "sample_index": info.sample_index,
        "trajectory": row.trajectory.index,
        "agent_role": str(row.trajectory.role),
    }


def _tokens(row: TokenRow, rl_T: Any) -> dict[str, Any]:
    """The columns of tokens; null where no id is known, as of imported text."""
    if not len(row.ids_T):
        return {"num_tokens": 0, "num_trained": 0}
    calls = [
        {
            "call_id": one.call.call_id,
            "start": one.start,
            "end": one.end,
            "temperature": one.call.temperature,
            "finish_reason": one.call.finish_reason,
        }
        for one in row.calls
    ]
    return {
        "token_ids": row.ids_T,
        "loss_mask": row.owned_T.astype(np.int8),
        "rl_mask": rl_T.astype(np.int8),
        "logprobs": pa.array(row.logprobs_T, pa.float32(), from_pandas=True),
        "calls": calls,
        "versions": [{"policy_id": s.policy_id, "n": s.n, "start": s.start, "end": s.end} for s in row.versions],
        "num_tokens": len(row.ids_T),
        "num_trained": int(row.owned_T.sum()),
    }


def _messages(job: Job, row: TokenRow) -> list[dict[str, Any]]:
    owned = set(row.trajectory.owned)
    found = []
    for one, value in job.messages(row.path.conversation, row.path.tree):
        made = chat_message(value, job.left_out["blocks"])
        content = made["content"]
        calls = made.get("tool_calls")
        found.append(
            {
                "role": made["role"],
                "content": content if isinstance(content, str) else json.dumps(content, ensure_ascii=False),
                "reasoning": made.get("reasoning_content"),
                "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
                "tool_call_id": made.get("tool_call_id"),
                "trained": one.sampled and one.node in owned,
            }
        )
    return found
