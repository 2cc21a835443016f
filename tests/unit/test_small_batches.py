"""Many small batches joined into few: the rows that Arrow reads, and what Arrow refuses is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data import small_batches
from gyre_data.errors import CorruptError
from gyre_data.segment import Sealed, iter_sealed, map_file, write_sealed
from tests.support.forest import Forest

KINDS = {
    "number": pa.int64(),
    "small": pa.int32(),
    "real": pa.float64(),
    "yes": pa.bool_(),
    "at": pa.timestamp("us", tz="UTC"),
    "text": pa.string(),
    "bytes": pa.large_binary(),
    "names": pa.list_(pa.string()),
    "ids": pa.large_list(pa.field("item", pa.int32(), nullable=False)),
    "spans": pa.list_(pa.struct([("of", pa.string()), ("n", pa.int64())])),
    "nothing": pa.string(),
}
SCHEMA = pa.schema(list(KINDS.items()), {"gyre": "{}"})

texts = st.text("aé€𝄞", max_size=3)
values = {
    "number": st.integers(-(2**63), 2**63 - 1),
    "small": st.integers(-(2**31), 2**31 - 1),
    "real": st.floats(allow_nan=False),
    "yes": st.booleans(),
    "at": st.integers(0, 2**40),
    "text": texts,
    "bytes": st.binary(max_size=5),
    "names": st.lists(st.none() | texts, max_size=3),
    "ids": st.lists(st.integers(0, 9), max_size=4),
    "spans": st.lists(st.none() | st.fixed_dictionaries({"of": st.none() | texts, "n": st.integers(0, 9)}), max_size=2),
    "nothing": st.none(),
}
rows = st.fixed_dictionaries({name: st.none() | value for name, value in values.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("segments")


def segment(path: Path, batches: list[pa.RecordBatch], schema: pa.Schema) -> tuple[pa.Buffer, Sealed]:
    sealed = write_sealed(path / "x-000001.arrow", schema, batches)
    return map_file(path / sealed.name), sealed


def joined(
    data: pa.Buffer, sealed: Sealed, columns: list[str], at_once: int = 1 << 20, few: int = 1
) -> list[pa.RecordBatch]:
    """As counting reads them; up to `few` batches as Arrow reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_batches, "_FEW_BATCHES", few)
        patch.setattr(small_batches, "_AT_ONCE_BYTES", at_once)
        return list(iter_sealed(data, sealed, "x", columns=columns)[1])


def plainly(data: pa.Buffer, sealed: Sealed, columns: list[str]) -> pa.Table | None:
    """As Arrow reads them, batch by batch; None when they are refused."""
    try:
        return pa.Table.from_batches(joined(data, sealed, columns, few=len(data)))
    except CorruptError:
        return None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(rows, min_size=1, max_size=12), min_size=2, max_size=6), st.data())
def test_rows_are_those_that_arrow_reads(folder: Path, made: list[Any], data: st.DataObject) -> None:
    batches = [pa.RecordBatch.from_pylist(part, SCHEMA) for part in made]
    columns = data.draw(st.lists(st.sampled_from(list(KINDS)), min_size=1, unique=True))
    at_once = data.draw(st.sampled_from([1, 5000, 1 << 20]))
    file, sealed = segment(folder, batches, SCHEMA)
    got = joined(file, sealed, columns, at_once)
    assert pa.Table.from_batches(got).equals(plainly(file, sealed, columns), check_metadata=True)
    assert len(got) == 1 or at_once < 1 << 20


def test_a_batch_of_no_row_and_one_that_shows_a_part_of_its_values(folder: Path) -> None:
    whole = pa.RecordBatch.from_pylist([{"text": str(i), "ids": [i] * i, "names": ["a"]} for i in range(9)], SCHEMA)
    for parts in ([(0, 2), (2, 0), (2, 3), (5, 4)], [(0, 4), (8, 1)]):
        batches = [whole.slice(*part) for part in parts]
        file, sealed = segment(folder, batches, SCHEMA)
        assert pa.Table.from_batches(joined(file, sealed, list(KINDS))).equals(pa.Table.from_batches(batches))


def test_lengths_alone_take_no_memory_and_large_batches_are_not_copied(folder: Path) -> None:
    batches = [pa.RecordBatch.from_pylist([{"ids": [i] * 1000}], SCHEMA) for i in range(70)]
    file, sealed = segment(folder, batches, SCHEMA)
    (batch,) = iter_sealed(file, sealed, "x", columns=["ids"], lengths_of=["ids"])[1]
    assert batch.column("ids").value_lengths().to_pylist() == [1000] * 70
    assert not batch.column("ids").values.to_numpy().any()
    assert joined(file, sealed, ["ids"])[0].column("ids").values.to_numpy().any()
    file, sealed = segment(folder, [pa.concat_batches(batches)] * 70, SCHEMA)
    for batch in joined(file, sealed, ["ids"]):
        (at,) = [buffer for buffer in batch.column("ids").buffers() if buffer and buffer.size >= 280_000]
        assert file.address <= at.address < file.address + file.size


def test_a_flipped_bit_is_refused_or_read_as_arrow_reads_it(folder: Path) -> None:
    """Most bytes are headers here; nothing may be read from outside a batch, or past what Arrow checks."""
    run, last = Forest(), None
    e = run.execution()
    for _ in range(4):
        last = e.call(after=last)
    nodes = run.table("nodes")
    batches = [pa.concat_batches(nodes.slice(at, 3).to_batches()) for at in range(0, 12, 3)]
    file, sealed = segment(folder, batches, nodes.schema)
    good, columns = bytes(file), [name for name in nodes.schema.names if name != "logprobs"]
    before = plainly(file, sealed, columns)
    rng, outcomes = np.random.default_rng(7), {"refused": 0, "same": 0}
    for at in rng.integers(0, len(good), 500).tolist():
        flipped = bytearray(good)
        flipped[at] ^= 1 << int(rng.integers(8))
        data = pa.py_buffer(bytes(flipped))
        wanted = plainly(data, sealed, columns)
        try:
            got = pa.Table.from_batches(joined(data, sealed, columns))
        except CorruptError:
            got = None
        if got is not None and wanted is None:
            wanted = before  # a flip in the footer, whose list of batches is not needed
        assert got == wanted, f"bit of byte {at}"
        outcomes["refused" if got is None else "same"] += 1
    assert min(outcomes.values()) > 40, outcomes
