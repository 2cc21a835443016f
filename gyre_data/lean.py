"""What counting needs of a run, and no more: half the columns, and of lists of tokens how long they are.

A list of token ids stands as a list of as many nulls, which take no memory, and one of log-probs says of each whether
it is finite. A cold segment is unpacked a batch at a time, and a batch's tokens go as soon as they are counted. The
small batches that a proxy commits are joined, of a sealed segment by the thousand (`small_batches`), of one that grows
by the hundred, since each array of each costs as much as a large one.
Segments are read side by side in threads: Arrow works without Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pyarrow as pa
import pyarrow.compute as pc

from .conform import conform
from .gather import AT_ONCE, is_small
from .reader import Batches, Run, conformed
from .schema import arrow_schema
from .tree import Tables

__all__ = ["Lean", "lean"]

_COLUMNS = {
    "nodes": (
        "node_id", "execution_id", "parent_id", "call_id", "start_pos", "kind", "message_role", "author", "copy_of",
        "token_ids", "logprobs", "counted_tokens", "policy_versions", "message_blobs",
    ),
    "calls": (
        "call_id", "execution_id", "agent_role", "continues_from", "spawned_by_node", "wire", "upstream",
        "prompt_node", "output_node", "branch_reason", "fork_check", "echo_difference", "tokens_lost", "served_model",
        "prompt_tokens", "output_tokens", "temperature", "top_p", "top_k", "constrained", "status", "provider_usage",
        "started_at", "first_token_at", "ended_at",
    ),
    "deliveries": ("call_id", "execution_id", "state", "at"),
}  # fmt: skip

_LENGTHS_OF = ("token_ids",)
_SMALL_BYTES = 64 << 10  # few rows may hold many tokens: those are not copied
_THREADS = min(4, os.cpu_count() or 1)


class Lean:
    """A run's tables for counting: `nodes`, `calls` and `deliveries` with the columns that figures over a run need.

    `token_ids` and `logprobs` have the lengths of the real ones and hold no token: null, and true for a finite number.
    All other tables are those of the run.
    """

    def __init__(self, run: Run, columns: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """Read the three tables, or the columns given of others; errors as `Run.table`."""
        self._run, columns = run, _COLUMNS if columns is None else columns
        parts = [(name, part) for name, of in columns.items() for part in run.segments(name, of, _LENGTHS_OF)]
        with ThreadPoolExecutor(_THREADS) as pool:
            read = list(pool.map(lambda one: _table(one[0], columns[one[0]], one[1]), parts))
        self._tables: dict[str, pa.Table] = {}
        for name, of in columns.items():
            found = [rows for (table, _), rows in zip(parts, read, strict=True) if table == name]
            self._tables[name] = run.shown(name, pa.concat_tables([_empty(name, of), *found]))

    def table(self, name: str) -> pa.Table:
        """A table, see above."""
        return self._tables[name] if name in self._tables else self._run.table(name)


def lean(runs: Tables | Sequence[Tables], *more: str) -> list[Tables]:
    """One or more runs for counting, with `more` columns of `calls`; tables in memory stay what they are."""
    given = [cast(Tables, runs)] if hasattr(runs, "table") else list(runs)
    columns = {**_COLUMNS, "calls": (*_COLUMNS["calls"], *more)}
    return [Lean(run, columns) if isinstance(run, Run) else run for run in given]


def _empty(name: str, columns: tuple[str, ...]) -> pa.Table:
    return _measured(conform(name, arrow_schema(name).empty_table(), columns))


def _table(name: str, columns: tuple[str, ...], part: Callable[[], Batches]) -> pa.Table:
    """One segment."""
    schema, batches = part()
    made = [_measured(conformed(name, schema, [batch], columns)) for batch in _joined(batches)]
    return pa.concat_tables([_empty(name, columns), *made])


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, runs of small batches copied into one each."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        small = is_small(batch) and batch.get_total_buffer_size() < _SMALL_BYTES
        if held and (len(held) == AT_ONCE or not small):
            yield pa.concat_batches(held)
            held = []
        if small:
            held.append(batch)
        else:
            yield batch
    if held:
        yield pa.concat_batches(held)


def _measured(table: pa.Table) -> pa.Table:
    """The same rows, with stand-ins for the lists of tokens and log-probs."""
    for place, field in enumerate(table.schema):
        if pa.types.is_large_list(field.type):
            column = table.column(place)
            made = pa.chunked_array([_stand_in(chunk) for chunk in column.chunks], _stand_in_type(field.type))
            table = table.set_column(place, field.name, made)
    return table


def _stand_in_type(type_: pa.DataType) -> pa.DataType:
    return pa.large_list(pa.bool_() if pa.types.is_floating(type_.value_type) else pa.null())


def _stand_in(lists: pa.Array) -> pa.Array:
    ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(lists), 0))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    if pa.types.is_floating(lists.type.value_type):
        values = pc.is_finite(pc.list_flatten(lists))
    else:
        values = pa.nulls(offsets[-1].as_py())
    mask = lists.is_null() if lists.null_count else None
    return pa.LargeListArray.from_arrays(offsets, values, type=_stand_in_type(lists.type), mask=mask)
