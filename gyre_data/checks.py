"""What must hold between the rows of a run, each rule once. `verify` runs them all.

Legend: N nodes, C calls. Index arrays hold -1 where the column is null, -2 where the id is not in the table it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .arrays import list_views, offsets_and_values
from .errors import DataError
from .node_rows import depths
from .reader import unpack_blob
from .schema import TABLES, Author, NodeKind

__all__ = ["CHECKS", "Check", "Indices", "Problem", "ProblemKind", "Tables"]

Indices = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Tables = Mapping[str, pa.Table]


class ProblemKind(StrEnum):
    """What is wrong, for programs; `Problem.detail` says it for people."""

    UNUSABLE = "unusable"  # the run cannot be opened
    INFO = "info"  # run.json is damaged
    MANIFEST = "manifest"  # a manifest is damaged or missing
    MISSING = "missing"  # a segment that a manifest names is gone
    CORRUPT = "corrupt"  # committed bytes changed
    TAIL = "tail"  # bytes that were never acknowledged lie behind the good ones
    SCHEMA = "schema"  # a column is not what the schema says
    DUPLICATE = "duplicate"  # a key occurs twice
    ALIGNMENT = "alignment"  # log-probs or version spans do not match the token ids
    ORPHAN = "orphan"  # a row names a row that is not there
    CIRCLE = "circle"  # nodes are their own ancestors, or hang below such nodes
    POSITION = "position"  # a node does not start where its parent ends
    CALL = "call"  # a call disagrees with its nodes
    VERSION = "version"  # policy versions run backwards within a reply
    USAGE = "usage"  # usage is counted twice or cannot be right
    BLOB = "blob"  # a blob's bytes are not those of its id


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    kind: ProblemKind
    where: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A rule over some tables; it may also leave a note on what is worth knowing but not wrong."""

    says: str
    tables: tuple[str, ...]
    run: Callable[[Tables, list[str]], Iterable[Problem]]


class _Ids:
    """Rows of a table by id."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids
        self._row = {key: i for i, key in enumerate(ids)}

    def __contains__(self, key: str) -> bool:
        return key in self._row

    def find(self, keys: Iterable[str | None]) -> Indices:
        """Row of each key: -1 for None, -2 for an id that is not there."""
        row = self._row
        return np.fromiter((-1 if key is None else row.get(key, -2) for key in keys), np.int64)


def _where(table: str, ids: Sequence[str], bad: Bools) -> Iterator[tuple[int, str]]:
    for i in np.flatnonzero(bad).tolist():
        yield i, f"{table} {ids[i]}"


def _lengths(column: pa.ChunkedArray) -> Indices:
    """Elements per row; -1 for null."""
    return np.asarray(pc.fill_null(pc.list_value_length(column), -1), np.int64)


def _num_tokens(nodes: pa.Table) -> Indices:
    """Tokens per node: its ids, or the local count that stands for them."""
    counted_N = _ints(nodes.column("counted_tokens"))
    return np.where(counted_N >= 0, counted_N, _lengths(nodes.column("token_ids")))


def _ints(column: pa.ChunkedArray) -> Indices:
    """Integers of a column; -1 for null."""
    return np.asarray(pc.fill_null(column, -1), np.int64)


def _equal(column: pa.ChunkedArray, value: str) -> Bools:
    return np.asarray(pc.fill_null(pc.equal(column, value), False), np.bool_)


def _check_keys(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    for name, table in tables.items():
        key = TABLES[name].key
        if key is None or name == "blobs":  # two workers may both write a blob; its id is its content
            continue
        counts = table.column(key).value_counts()
        for item in counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist():
            detail = f"wanted one row of this {key}, found {item['counts']}"
            yield Problem(kind=ProblemKind.DUPLICATE, where=f"{name} {item['values']}", detail=detail)


def _check_nodes(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    nodes = tables["nodes"]
    ids = nodes.column("node_id").to_pylist()
    by_id = _Ids(ids)
    parent_N = by_id.find(nodes.column("parent_id").to_pylist())
    start_N, length_N = _ints(nodes.column("start_pos")), _num_tokens(nodes)
    for i, where in _where("nodes", ids, parent_N == -2):
        detail = f"its parent {nodes.column('parent_id')[i]} is not recorded"
        yield Problem(kind=ProblemKind.ORPHAN, where=where, detail=detail)
    safe_N = np.maximum(parent_N, 0)
    known_N = parent_N >= 0
    if not len(ids):
        return
    wanted_N = np.where(known_N, start_N[safe_N] + length_N[safe_N], 0)
    for i, where in _where("nodes", ids, (parent_N != -2) & (start_N != wanted_N)):
        detail = f"wanted start_pos {wanted_N[i]}, where its parent ends, got {start_N[i]}"
        yield Problem(kind=ProblemKind.POSITION, where=where, detail=detail)
    lost = np.flatnonzero(depths(np.where(known_N, parent_N, -1))[1])
    owners = nodes.column("execution_id").take(pa.array(lost))
    for owner in pc.unique(owners).to_pylist():
        here = lost[np.asarray(pc.equal(owners, owner))]
        detail = f"parents run in a circle in execution {owner}: {len(here)} nodes have no path to a root"
        yield Problem(kind=ProblemKind.CIRCLE, where=f"nodes {ids[here[0]]}", detail=detail)
    for column, own in (("root_id", "node_id"), ("execution_id", "execution_id")):
        values = np.array(nodes.column(column).to_pylist(), object)
        wanted = np.where(known_N, values[safe_N], np.array(nodes.column(own).to_pylist(), object))
        for i, where in _where("nodes", ids, (parent_N != -2) & (values != wanted)):
            detail = f"wanted {column} {wanted[i]} as on its path, got {values[i]}"
            yield Problem(kind=ProblemKind.ORPHAN, where=where, detail=detail)
    for i, where in _where("nodes", ids, by_id.find(nodes.column("copy_of").to_pylist()) == -2):
        detail = f"it is a copy of {nodes.column('copy_of')[i]}, which is not recorded"
        yield Problem(kind=ProblemKind.ORPHAN, where=where, detail=detail)


def _check_alignment(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    nodes = tables["nodes"]
    ids = nodes.column("node_id").to_pylist()
    output_N = _equal(nodes.column("kind"), NodeKind.OUTPUT)
    sampled_N = output_N & _equal(nodes.column("author"), Author.POLICY)
    length_N, logprobs_N = _lengths(nodes.column("token_ids")), _lengths(nodes.column("logprobs"))
    wrong = np.where(output_N, (logprobs_N >= 0) & (logprobs_N != length_N), logprobs_N >= 0)
    wrong |= sampled_N & (length_N > 0) & (logprobs_N < 0)
    for i, where in _where("nodes", ids, wrong):
        wanted = f"{length_N[i]} log-probs" if output_N[i] else "no log-probs on a node that was not sampled"
        came = "none" if logprobs_N[i] < 0 else str(logprobs_N[i])
        yield Problem(kind=ProblemKind.ALIGNMENT, where=where, detail=f"wanted {wanted}, got {came}")
    counted_N = _ints(nodes.column("counted_tokens"))
    for i, where in _where("nodes", ids, (counted_N >= 0) & (length_N > 0)):
        detail = f"wanted token ids or a local count, got {length_N[i]} ids and a count of {counted_N[i]}"
        yield Problem(kind=ProblemKind.ALIGNMENT, where=where, detail=detail)
    for column, lawful, says in (
        ("logprobs", lambda values: values <= 1e-3, "log-probs of at most 0"),
        ("token_ids", lambda values: values >= 0, "token ids from 0"),
    ):
        for i, value in _unlawful(nodes.column(column), lawful):
            yield Problem(kind=ProblemKind.ALIGNMENT, where=f"nodes {ids[i]}", detail=f"wanted {says}, got {value}")
    for i, where in _where("nodes", ids, _bad_spans(nodes.column("policy_versions"), length_N, sampled_N)):
        spans = [(s["start"], s["end"]) for s in nodes.column("policy_versions")[i].as_py() or ()]
        detail = f"wanted version spans that cover 0..{length_N[i]} exactly, got {spans}"
        yield Problem(kind=ProblemKind.ALIGNMENT, where=where, detail=detail)


def _unlawful(column: pa.ChunkedArray, lawful: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Rows of a list column that hold an unlawful value (NaN never is lawful), each with its first such value."""
    if all(lawful(offsets_and_values(chunk)[1]).all() for chunk in column.chunks):
        return
    for i, values in enumerate(list_views(column)):
        if values is not None and not lawful(values).all():
            yield i, values[~lawful(values)][0]


def _bad_spans(column: pa.ChunkedArray, length_N: Indices, sampled_N: Bools) -> Bools:
    """Rows whose spans do not tile [0, length); null is right on what was not sampled only."""
    bad: list[Bools] = []
    at = 0
    for chunk in column.chunks:
        n = len(chunk)
        length, sampled = length_N[at : at + n], sampled_N[at : at + n]
        at += n
        offsets = chunk.offsets.to_numpy().astype(np.int64)
        start, end = (chunk.values.field(name).to_numpy(zero_copy_only=False) for name in ("start", "end"))
        count = np.diff(offsets)
        some = count > 0
        first, last = offsets[:-1][some], offsets[1:][some] - 1
        wrong = np.zeros(n, np.bool_)
        wrong[some] = (start[first] != 0) | (end[last] != length[some])
        wrong[~some] = (sampled & (length > 0))[~some]
        span_bad = end <= start
        if len(start):
            inner = np.ones(len(start), np.bool_)
            inner[first] = False
            span_bad[1:] |= inner[1:] & (start[1:] != end[:-1])
        row_of_span = np.searchsorted(offsets, np.flatnonzero(span_bad), side="right") - 1
        wrong[row_of_span[(row_of_span >= 0) & (row_of_span < n)]] = True
        bad.append(wrong)
    return np.concatenate(bad) if bad else np.zeros(0, np.bool_)


def _check_calls(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    calls, nodes = tables["calls"], tables["nodes"]
    call_ids, node_ids = calls.column("call_id").to_pylist(), nodes.column("node_id").to_pylist()
    by_call, by_node = _Ids(call_ids), _Ids(node_ids)
    found = {}
    for column, ids in (
        ("prompt_node", by_node),
        ("output_node", by_node),
        ("spawned_by_node", by_node),
        ("continues_from", by_call),
    ):
        found[column] = ids.find(calls.column(column).to_pylist())
        for i, where in _where("calls", call_ids, found[column] == -2):
            detail = f"its {column} {calls.column(column)[i]} is not recorded"
            yield Problem(kind=ProblemKind.ORPHAN, where=where, detail=detail)
    if len(nodes):
        yield from _check_call_nodes(calls, nodes, call_ids, found["prompt_node"], found["output_node"], by_node)
    strays = int((by_call.find(nodes.column("call_id").to_pylist()) == -2).sum())
    if strays:
        notes.append(f"{strays} nodes belong to calls that were never committed; readers leave them out")


def _check_call_nodes(
    calls: pa.Table, nodes: pa.Table, call_ids: list[str], prompt_C: Indices, output_C: Indices, by_node: _Ids
) -> Iterator[Problem]:
    """The output hangs on the prompt, and counted tokens are the nodes' own."""
    length_N = _num_tokens(nodes)
    ends_N = _ints(nodes.column("start_pos")) + length_N
    parent_N = by_node.find(nodes.column("parent_id").to_pylist())
    is_output_N = _equal(nodes.column("kind"), NodeKind.OUTPUT)
    node_call = np.array(nodes.column("call_id").to_pylist(), object)
    has = output_C >= 0
    out = np.maximum(output_C, 0)
    for bad, detail in (
        (has & (parent_N[out] != prompt_C), "its output node does not follow its prompt node"),
        (has & ~is_output_N[out], "its output node is not of kind output"),
        (has & (node_call[out] != np.array(call_ids, object)), "its output node names another call"),
    ):
        for _, where in _where("calls", call_ids, np.asarray(bad, np.bool_)):
            yield Problem(kind=ProblemKind.CALL, where=where, detail=detail)
    for column, index_C, count_N in (("prompt_tokens", prompt_C, ends_N), ("output_tokens", output_C, length_N)):
        said = _ints(calls.column(column))
        held = count_N[np.maximum(index_C, 0)]
        for i, where in _where("calls", call_ids, (index_C >= 0) & (said >= 0) & (said != held)):
            detail = f"it says {said[i]} {column}, its nodes hold {held[i]}"
            yield Problem(kind=ProblemKind.CALL, where=where, detail=detail)


def _check_links(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    """Event rows name calls and states that exist."""
    for table, column, target, key in (
        ("deliveries", "call_id", "calls", "call_id"),
        ("calls", "environment_state_id", "environments", "state_id"),
        ("scores", "state_id", "environments", "state_id"),
        ("environments", "parent_id", "environments", "state_id"),
        ("routed_experts", "node_id", "nodes", "node_id"),
        ("top_logprobs", "node_id", "nodes", "node_id"),
        ("teacher_logprobs", "node_id", "nodes", "node_id"),
    ):
        known = _Ids(tables[target].column(key).to_pylist())
        for name in {v for v in tables[table].column(column).to_pylist() if v is not None and v not in known}:
            detail = f"its {column} is not in {target}"
            yield Problem(kind=ProblemKind.ORPHAN, where=f"{table} {name}", detail=detail)


def _check_blobs(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    blobs = tables["blobs"]
    columns = (blobs.column(name) for name in ("blob_id", "codec", "num_bytes", "data"))
    for blob_id, codec, num_bytes, data in zip(*columns, strict=True):
        name = blob_id.as_py()
        try:
            plain = unpack_blob(name, codec.as_py(), num_bytes.as_py(), data.as_buffer())
        except DataError as error:
            yield Problem(kind=ProblemKind.BLOB, where=f"blobs {name}", detail=str(error))
            continue
        if len(plain) != num_bytes.as_py() or hashlib.sha256(plain).hexdigest() != name:
            detail = "its bytes hash to something else or have another length"
            yield Problem(kind=ProblemKind.BLOB, where=f"blobs {name}", detail=detail)


def _check_blob_links(tables: Tables, notes: list[str]) -> Iterator[Problem]:
    known = _Ids(tables["blobs"].column("blob_id").to_pylist())
    for table, key, column in (
        ("nodes", "node_id", "message_blobs"),
        ("calls", "call_id", "request_blobs"),
        ("calls", "call_id", "response_blobs"),
        ("calls", "call_id", "tools_blob"),
    ):
        keys = tables[table].column(key).to_pylist()
        for row, value in zip(keys, tables[table].column(column).to_pylist(), strict=True):
            named: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
            for blob_id in named:
                if blob_id not in known:
                    detail = f"its {column} name {blob_id}, which is not recorded"
                    yield Problem(kind=ProblemKind.ORPHAN, where=f"{table} {row}", detail=detail)


CHECKS: tuple[Check, ...] = (
    Check(says="keys are unique", tables=tuple(t.name for t in TABLES.values() if t.key), run=_check_keys),
    Check(says="nodes hang together", tables=("nodes",), run=_check_nodes),
    Check(says="log-probs and versions match the ids", tables=("nodes",), run=_check_alignment),
    Check(says="calls and their nodes agree", tables=("calls", "nodes"), run=_check_calls),
    Check(
        says="event rows name what exists",
        tables=(
            *("deliveries", "calls", "scores", "environments", "nodes"),
            *("routed_experts", "top_logprobs", "teacher_logprobs"),
        ),
        run=_check_links,
    ),
    Check(says="blobs hash to their ids", tables=("blobs",), run=_check_blobs),
    Check(says="named blobs exist", tables=("nodes", "calls", "blobs"), run=_check_blob_links),
)
