"""D01, more than 2^31 list elements in one column: a run of 2.2 billion tokens, which lie in holes of a sparse file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import gyre_data as gd
from gyre_data import manifest as manifests
from gyre_data.arrays import to_batches
from gyre_data.schema import arrow_schema
from gyre_data.segment import Sealed
from gyre_data.tree import Tree
from tests.support.forest import Forest, Made

ROWS, LENGTH = 130, 1 << 24
"""Of the published case: together more than 2^31 elements, though each fits."""


class _Holes:
    """A file that leaves a hole where it is given much: all such bytes are zero here."""

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, data: Any) -> int:
        size = len(memoryview(data).cast("B"))
        if size >= LENGTH:
            self._file.seek(size, 1)
            return size
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(self._file.tell())
        self._file.close()
        self.closed = True


def _long_path() -> Forest:
    """A conversation of `ROWS` long messages, and two replies at its end."""
    run, last = Forest(), None
    e = run.execution("e_0123456789ab", score=1.0)
    for _ in range(ROWS - 1):
        last = e.node(last, "c_0", 1).node_id
    first: Made = e.call(after=last, new=[("user", 1)], output=5)
    e.retry(first, output=7)
    return run


def _stretched(node: Any, start: int) -> pa.RecordBatch:
    """The row of a node as a batch, with `LENGTH` zero tokens in place of its one token."""
    (batch,) = to_batches("nodes", [replace(node, start_pos=start)])
    if len(node.token_ids) > 1:
        return batch
    at = batch.schema.get_field_index("token_ids")
    tokens = pa.LargeListArray.from_arrays(
        pa.array([0, LENGTH]), pa.array(np.zeros(LENGTH, np.int32)), type=batch.schema.field(at).type
    )
    return batch.set_column(at, batch.schema.field(at), tokens)


def _write(run: Forest, path: Path) -> None:
    """`run` on disk, its messages stretched."""
    rows = {**run.rows, "nodes": []}
    Forest(rows=rows).write(path)
    (path / "nodes").mkdir()
    sink, start = _Holes(path / "nodes" / "w9-000001.arrow"), 0
    with pa.ipc.new_file(sink, arrow_schema("nodes")) as writer:
        for node in run.rows["nodes"]:
            place = min(start, ROWS * LENGTH + (2 if node.kind == "output" else 0))
            writer.write_batch(_stretched(node, place))
            start += LENGTH if len(node.token_ids) == 1 else len(node.token_ids)
    sink.close()
    size = (path / "nodes" / "w9-000001.arrow").stat().st_size
    sealed = Sealed(name="w9-000001.arrow", num_bytes=size, num_rows=len(run.rows["nodes"]), crc32=0)
    manifests.publish(path, lambda base: base.closed("nodes", "w9-000001", sealed), "w9")


def test_d01_more_than_2_to_the_31_tokens_in_one_run(tmp_path: Path) -> None:
    made = _long_path()
    path, total = tmp_path / "run", ROWS * LENGTH
    _write(made, path)
    on_disk = sum(file.stat().st_blocks * 512 for file in (path / "nodes").iterdir())
    assert on_disk < 64 << 20, "the file system made no holes"
    run = gd.open(path)
    column = run.table("nodes").column("token_ids")
    assert pc.sum(pc.list_value_length(column)).as_py() == total + 2 + 5 + 7 > 2**31
    before = pa.total_allocated_bytes()
    tree = Tree.load(run, "e_0123456789ab")
    assert tree.num_tokens == total + 14
    leaf = tree.leaf(tree.calls[0])
    assert leaf is not None
    assert tree.start_pos_N[leaf] == total + 2 > 2**31
    assert tree.ids(leaf).tolist() == made.rows["nodes"][-2].token_ids.tolist()
    assert len(tree.ids(0)) == LENGTH
    counts = json.loads(json.dumps(gd.stats(run).to_json()))
    assert counts["distinct_tokens"] == total + 14
    assert counts["expanded_tokens"] == 2 * (total + 2) + 12
    assert counts["role_tokens"]["unknown"] == total - LENGTH
    assert pa.total_allocated_bytes() - before < 64 << 20
