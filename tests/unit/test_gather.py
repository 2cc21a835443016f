"""Many small batches become few chunks; rows, their order, and where tokens lie stay as they are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

import gyre_data as gd
from gyre_data.arrays import to_batches
from gyre_data.gather import Gathered
from gyre_data.reader import conformed
from gyre_data.schema import arrow_schema
from tests.support.forest import Forest

SCHEMA = arrow_schema("nodes")
made = partial(conformed, "nodes", SCHEMA)


def batches_of(num_rows: int) -> list[pa.RecordBatch]:
    """As a proxy leaves them: a row a batch."""
    run = Forest()
    e, last = run.execution(), None
    while len(run.rows["nodes"]) < num_rows:
        last = e.call(after=last)
    return [to_batches("nodes", [row])[0] for row in run.rows["nodes"][:num_rows]]


SMALL = batches_of(1300)
WIDE = pa.concat_batches(SMALL[:100])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 700), st.just(-1)), max_size=4), st.data())
def test_rows_are_the_same_whatever_the_batches(runs: list[int], data: st.DataObject) -> None:
    batches = [batch for run in runs for batch in ([WIDE] if run < 0 else SMALL[:run])]
    wanted = pa.Table.from_batches(batches, SCHEMA)
    assert Gathered(made, batches).table().equals(wanted)
    growing, done = Gathered(made), 0
    for end in sorted(data.draw(st.lists(st.integers(0, len(batches)), max_size=3))):
        growing.add(batches[done:end])
        assert growing.table().equals(wanted.slice(0, sum(batch.num_rows for batch in batches[:end])))
        done = end
    growing.add(batches[done:])
    assert growing.table().equals(wanted)


def test_names_are_gathered_and_tokens_stay_where_they_are() -> None:
    table = Gathered(made, SMALL).table()
    assert table.column("node_id").num_chunks < 300 < table.column("token_ids").num_chunks == len(SMALL)
    for batch, chunk in zip(SMALL, table.column("token_ids").chunks, strict=True):
        assert np.shares_memory(batch.column("token_ids").values.to_numpy(), chunk.values.to_numpy())


def test_a_run_committed_call_by_call_reads_the_same_live_and_sealed(tmp_path: Path) -> None:
    run = Forest()
    e, last = run.execution("e_0123456789ab"), None
    for _ in range(300):
        last = e.call(after=last)
    with gd.RunWriter(tmp_path / "run") as writer:
        live = gd.open(tmp_path / "run")
        for at in range(0, 900, 3):
            writer.append(run.rows["nodes"][at : at + 3])
            if at % 30 == 0:
                writer.commit()
            if at % 300 == 0:
                live.refresh()
                assert live.table("nodes").num_rows == at + 3
        writer.commit()
        live.refresh()
        while_open = live.table("nodes")
    sealed = gd.open(tmp_path / "run").table("nodes")
    assert while_open.equals(sealed)
    assert sealed.column("node_id").to_pylist() == [row.node_id for row in run.rows["nodes"]]
