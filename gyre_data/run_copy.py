"""Copies a run into a folder that may be given away: without secrets, unless the caller says otherwise.

Token ids decode back to text, so a node whose text held a secret loses its ids and log-probs with it. It keeps its
place and its number of tokens; what was sampled after it has no exact context any more and is not trained.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .arrays import from_table
from .beside import beside
from .errors import ConfigError, DataError
from .manifest import numbers
from .reader import Run
from .redact import Redactor
from .schema import RUN_TABLES
from .types import Call, Node
from .writer import RunWriter

__all__ = ["Exported", "export_run"]

_BATCH = 4096
_NOT_TOLD = ("pid", "endpoints", "read_only")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export wrote, took out and left out."""

    path: Path
    format: str = "run"
    num_rows: dict[str, int]
    secrets: dict[str, int]
    """Kind -> number of places."""
    num_nodes_redacted: int
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """What is not in it: level (executions, calls, trajectories, tokens, blocks, ...) -> reason -> how many."""


def export_run(run: Run, out: str | Path, *, redact: bool = True, patterns: Iterable[str] = ()) -> Exported:
    """Write a copy of `run` to the new folder `out`; ConfigError when there is something already."""
    out = Path(out)
    if numbers(out) or (out.exists() and any(out.iterdir())):
        raise ConfigError(f"wanted a new folder to export to, {out} is not empty; name another")
    cleaner = _Cleaner(run, Redactor(patterns)) if redact else None
    written: Counter[str] = Counter()
    with beside(out, folder=True) as made:
        with RunWriter(made) as writer:
            info = {name: value for name, value in run.info.items() if name not in _NOT_TOLD}
            writer.update_info(cleaner.info(info) if cleaner else info)
            for name in (name for name in RUN_TABLES if name != "blobs"):
                for batch in _batches(from_table(name, run.table(name))):
                    rows, blobs = cleaner.rows(name, batch) if cleaner else (batch, _blobs_of(run, batch))
                    for data in blobs:
                        writer.put_blob(data)
                    writer.write(rows)
                    written[name] += len(rows)
        made.rename(out)
    secrets = dict(cleaner.secrets) if cleaner else {}
    return Exported(
        path=out, num_rows=dict(written), secrets=secrets, num_nodes_redacted=len(cleaner.nodes) if cleaner else 0
    )


def _batches(rows: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(rows), _BATCH):
        yield rows[start : start + _BATCH]


def _blob_ids(row: Any) -> list[str]:
    if isinstance(row, Node):
        return list(row.message_blobs or ())
    if isinstance(row, Call):
        tools = [row.tools_blob] if row.tools_blob else []
        return [*tools, *(row.request_blobs or ()), *(row.response_blobs or ())]
    return []


def _blobs_of(run: Run, rows: Iterable[Any]) -> Iterator[bytes]:
    for row in rows:
        for blob_id in _blob_ids(row):
            yield _text(run, blob_id)


def _text(run: Run, blob_id: str) -> bytes:
    """A text that a row names. A copy with a hole could not be told from one that lost it."""
    try:
        return run.blob(blob_id)
    except KeyError:
        raise DataError(
            f"{run.path}: wanted all texts that its rows name, {blob_id} is not there; `gyre verify` names what lost "
            "it: take those executions out with `gyre rm`, or export to another format, which leaves them out"
        ) from None


class _Cleaner:
    """Rows and texts of one run without secrets. A blob is judged once, wherever it is named."""

    def __init__(self, run: Run, redactor: Redactor) -> None:
        self._run, self._redactor = run, redactor
        self._known: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._fresh: list[bytes] = []
        self.secrets: Counter[str] = Counter()
        self.nodes: dict[str, tuple[str, ...]] = {}
        """Redacted node -> kinds of what was in it."""
        self._find_nodes()

    def info(self, info: dict[str, Any]) -> dict[str, Any]:
        """`run.json` without secrets."""
        clean, kinds = self._redactor.json(info)
        self.secrets.update(kinds)
        return dict(clean)

    def rows(self, table: str, rows: list[Any]) -> tuple[list[Any], list[bytes]]:
        """Clean rows, and the texts that they name."""
        self._fresh = []
        if table == "nodes":
            return [self._node(node) for node in rows], self._fresh
        if "node_id" in {field.name for field in fields(rows[0])}:  # side tables: alternatives tell the text too
            return [row for row in rows if row.node_id not in self.nodes], []
        return [self._plain(self._call(row) if table == "calls" else row) for row in rows], self._fresh

    def _find_nodes(self) -> None:
        """Which nodes held a secret: in their messages, or, where a path begins, in the tools rendered there."""
        nodes = from_table("nodes", self._run.table("nodes"))
        for node in nodes:
            kinds = [kind for blob_id in node.message_blobs or () for kind in self._clean(blob_id)[1]]
            if kinds:
                self.nodes[node.node_id] = tuple(sorted(set(kinds)))
        root_of = {node.node_id: node.root_id for node in nodes}
        for call in from_table("calls", self._run.table("calls")):
            in_tools = self._clean(call.tools_blob)[1] if call.tools_blob else ()
            root = root_of.get(call.prompt_node or "")
            if in_tools and root is not None:
                self.nodes[root] = tuple(sorted({*self.nodes.get(root, ()), *in_tools}))
        self._tainted = set(self.nodes)
        for node in nodes:  # parents come first
            if node.parent_id in self._tainted:
                self._tainted.add(node.node_id)

    def _clean(self, blob_id: str) -> tuple[str, tuple[str, ...]]:
        """Id of the clean text, and the kinds of what was taken out."""
        known = self._known.get(blob_id)
        if known is None:
            data, kinds = self._redactor.blob(_text(self._run, blob_id))
            self.secrets.update(kinds)
            known = self._known[blob_id] = (hashlib.sha256(data).hexdigest(), kinds)
        return known

    def _named(self, blob_id: str) -> str:
        """Id of the clean text, which is written with the row that names it."""
        self._fresh.append(self._redactor.blob(_text(self._run, blob_id))[0])
        return self._clean(blob_id)[0]

    def _node(self, node: Node) -> Node:
        blobs = tuple(map(self._named, node.message_blobs)) if node.message_blobs is not None else None
        node = replace(node, message_blobs=blobs)
        if node.node_id in self._tainted:
            node = replace(node, content_hash=None)  # a chain of hashes would confirm a guess
        kinds = self.nodes.get(node.node_id)
        if kinds is None:
            return node
        counted = node.counted_tokens if node.counted_tokens is not None else len(node.token_ids)
        return replace(
            node,
            token_ids=node.token_ids[:0],
            counted_tokens=counted,
            logprobs=None,
            policy_versions=None,
            redacted=kinds,
        )

    def _call(self, call: Call) -> Call:
        def named(blobs: tuple[str, ...] | None) -> tuple[str, ...] | None:
            return tuple(map(self._named, blobs)) if blobs is not None else None

        return replace(
            call,
            tools_blob=self._named(call.tools_blob) if call.tools_blob else None,
            request_blobs=named(call.request_blobs),
            response_blobs=named(call.response_blobs),
        )

    def _plain(self, row: Any) -> Any:
        """The row without secrets in its own texts (an error, a command, an evaluator's detail)."""
        changed: dict[str, str] = {}
        for column in fields(row):
            value = getattr(row, column.name)
            if type(value) is not str:
                continue
            clean, kinds = self._in_text(value)
            if kinds:
                changed[column.name] = clean
                self.secrets.update(kinds)
        return replace(row, **changed) if changed else row

    def _in_text(self, text: str) -> tuple[str, tuple[str, ...]]:
        if text.startswith(("{", "[")):
            try:
                value, kinds = self._redactor.json(json.loads(text))
            except (ValueError, RecursionError):
                return self._redactor.text(text)
            return (json.dumps(value, sort_keys=True), kinds) if kinds else (text, ())
        return self._redactor.text(text)
