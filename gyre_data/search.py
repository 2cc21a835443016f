"""Text search over the messages of a run: blobs are read one after the other, none is kept.

A message that several nodes render is read once and found at each of them. Node and call ids in the hits are those on
disk: they stay the same whatever is compacted or rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .errors import ConfigError, GyreError
from .json_values import parsed
from .reader import Run
from .texts import parts_of, role_of

__all__ = ["Hit", "search"]

_BEFORE, _AFTER = 32, 120
# In these no character is written otherwise in JSON, so the blob's own bytes can be looked at first.
_PLAIN = re.compile(r"[\w ./-]+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """A message that holds the text, at one node."""

    execution_id: str
    call_id: str
    """The call that added the node: the first to send it, or the one that sampled it."""
    number: int
    """That call's number in its execution: `c12`."""
    node_id: str
    role: str
    author: str
    part: str
    """reasoning, content, or call: tool name and arguments."""
    num_matches: int
    """Matches in the whole message."""
    before: str
    match: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    role: str
    part: str
    num_matches: int
    before: str
    match: str
    after: str


def search(run: Run, text: str, *, role: str | None = None, limit: int | None = None) -> list[Hit]:
    """Messages that hold `text` (case does not matter), of one role only when given, in the order of their nodes."""
    if not text:
        raise ConfigError("wanted a text to search for, got an empty one")
    found = dict(_matching(run, text, role))
    nodes = run.table("nodes")
    hits: list[Hit] = []
    numbers = _Numbers(run)
    for blob_id, row in _places(nodes, list(found)):
        told, at = found[blob_id], row
        columns = {name: nodes.column(name)[at].as_py() for name in ("execution_id", "call_id", "node_id", "author")}
        number = numbers.of(columns["execution_id"], columns["call_id"])
        if number is None:  # a node whose call was never committed
            continue
        hits.append(
            Hit(
                **columns,
                number=number,
                role=told.role,
                part=told.part,
                num_matches=told.num_matches,
                before=told.before,
                match=told.match,
                after=told.after,
            )
        )
        if limit is not None and len(hits) >= limit:
            break
    return hits


def _matching(run: Run, text: str, role: str | None) -> Iterator[tuple[str, _Found]]:
    """Blob id and what was found, for every message blob that holds the text."""
    wanted = re.compile(re.escape(text), re.IGNORECASE)
    quick = re.compile(re.escape(text.encode()), re.IGNORECASE) if _PLAIN.fullmatch(text) else None
    blobs = run.table("blobs")
    for blob_id in (name for chunk in blobs.column("blob_id").chunks for name in chunk.to_pylist()):
        try:
            data = run.blob(blob_id)
        except GyreError:  # `gyre verify` names damaged blobs
            continue
        if quick is not None and not quick.search(data):
            continue
        message = parsed(data)  # a piece of a request body is none
        if isinstance(message, dict) and "role" in message and role in (None, role_of(message)):
            told = _in_message(message, wanted)
            if told is not None:
                yield blob_id, told


def _in_message(message: Any, wanted: re.Pattern[str]) -> _Found | None:
    first: tuple[str, str, re.Match[str]] | None = None
    number = 0
    for part, text in parts_of(message):
        for match in wanted.finditer(text):
            first = first or (part, text, match)
            number += 1
    if first is None:
        return None
    part, text, match = first
    begin, end = max(match.start() - _BEFORE, 0), match.end() + _AFTER
    return _Found(
        role=role_of(message),
        part=part,
        num_matches=number,
        before=("..." if begin else "") + text[begin : match.start()],
        match=match[0],
        after=text[match.end() : end] + ("..." if end < len(text) else ""),
    )


def _places(nodes: pa.Table, blob_ids: list[str]) -> Iterator[tuple[str, int]]:
    """(blob id, row) of every node that renders one of these blobs, in the order of rows."""
    wanted, start = pa.array(blob_ids, pa.string()), 0
    for chunk in nodes.column("message_blobs").chunks:
        parents, names = pc.list_parent_indices(chunk), pc.list_flatten(chunk)
        hit = pc.is_in(names, value_set=wanted)
        for name, parent in zip(names.filter(hit).to_pylist(), parents.filter(hit).to_pylist(), strict=True):
            yield name, start + parent
        start += len(chunk)


class _Numbers:
    """Numbers of calls in their executions, as `gyre tree` gives them, worked out for executions that are asked for."""

    def __init__(self, run: Run) -> None:
        self._calls = run.table("calls").select(["execution_id", "call_id", "started_at"])
        self._known: dict[str, dict[str, int]] = {}

    def of(self, execution_id: str, call_id: str) -> int | None:
        if execution_id not in self._known:
            own = self._calls.filter(pc.equal(self._calls.column("execution_id"), execution_id)).to_pylist()
            ordered = sorted(own, key=lambda row: (row["started_at"], row["call_id"]))
            self._known[execution_id] = {row["call_id"]: n for n, row in enumerate(ordered, 1)}
        return self._known[execution_id].get(call_id)
