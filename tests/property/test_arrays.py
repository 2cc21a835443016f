"""Rows written are rows read, for every table; what could not be read back is refused."""

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_data import arrays
from gyre_data.errors import AlignmentError, SchemaError
from gyre_data.schema import TABLES, NodeKind, arrow_schema
from tests.support.rows import call_row, one_call, output_node, prompt_node, rows_of, same_row


@pytest.mark.parametrize("name", TABLES)
def test_rows_survive_arrow(name):
    @settings(max_examples=40, deadline=None)
    @given(rows=rows_of(name), cut=st.integers(0, 6))
    def check(rows, cut):
        parts = [*arrays.to_batches(name, rows[:cut]), *arrays.to_batches(name, rows[cut:])]
        table = pa.Table.from_batches(parts, arrow_schema(name))
        table.validate(full=True)
        back = arrays.from_table(name, table)
        assert len(back) == len(rows)
        assert all(same_row(a, b) for a, b in zip(rows, back, strict=True))
        sliced = arrays.from_table(name, table.slice(1))
        assert all(same_row(a, b) for a, b in zip(rows[1:], sliced, strict=True))

    check()


def test_batches_are_bounded():
    root = prompt_node("n_0", "c_0", num_tokens=600_000)
    rows = [root, *(prompt_node(f"n_{i}", "c_0", root, num_tokens=600_000) for i in range(1, 7))]
    batches = arrays.to_batches("nodes", rows)
    assert [b.num_rows for b in batches] == [1] * 7
    small = arrays.to_batches("nodes", [prompt_node(f"n_{i}", "c_0") for i in range(100)])
    assert [b.num_rows for b in small] == [100]


def test_views_are_read_only_and_zero_copy():
    batch = arrays.to_batches("nodes", one_call(1)[:2])[0]
    table = pa.Table.from_batches([batch])
    views = arrays.list_views(table.column("token_ids"))
    values = batch.column("token_ids").values.buffers()[1]
    assert views[1] is not None
    assert values.address <= views[1].ctypes.data < values.address + values.size
    assert not views[1].flags.writeable
    assert views[1].dtype == np.int32


PROMPT = prompt_node("n_p", "c_0")


@pytest.mark.parametrize(
    ("node", "says"),
    [
        (output_node("n_o", "c_0", PROMPT, 4, logprobs=np.zeros(3, np.float32)), "wanted 4 elements, got 3"),
        (output_node("n_o", "c_0", PROMPT, 1, logprobs=np.array([np.nan], np.float32)), "got NaN at 0"),
        (prompt_node("n_o", "c_0", logprobs=np.zeros(3, np.float32)), "only output nodes have them"),
        (prompt_node("n_o", "c_0", token_ids=np.zeros(3, np.int64)), "wanted int32"),
        (prompt_node("n_o", "c_0", token_ids=[1, 2]), "got list"),
        (prompt_node("n_o", "c_0", token_ids=np.zeros((1, 2), np.int32)), "shape"),
        (output_node("n_o", "c_0", PROMPT, 4, policy_versions=()), "cover 0..4 exactly"),
        (
            output_node(
                "n_o",
                "c_0",
                PROMPT,
                4,
                policy_versions=output_node("x", "c", PROMPT, 3).policy_versions,
            ),
            "cover 0..4 exactly",
        ),
    ],
)
def test_misaligned_rows_are_refused(node, says):
    with pytest.raises(AlignmentError, match=says) as caught:
        arrays.to_batches("nodes", [PROMPT, node])
    assert "n_o" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (prompt_node("n_x", "c_0", root_id=None), r"nodes\.root_id: wanted a value, got None in node_id n_x"),
        (call_row("c_x", None, None, started_at=datetime(2026, 1, 1)), r"calls\.started_at: wanted a time in UTC"),
        (call_row("c_x", None, None, top_k=1 << 70), r"calls\.top_k: wanted int64"),
        (call_row("c_x", None, None, wire=3), r"calls\.wire: wanted string"),
    ],
)
def test_rows_off_the_schema_are_refused(row, says):
    with pytest.raises(SchemaError, match=says):
        arrays.to_batches(arrays.table_of(row), [row])


def test_unknown_rows_and_spellings():
    with pytest.raises(SchemaError, match="known rows"):
        arrays.table_of(object())
    table = pa.Table.from_batches(arrays.to_batches("nodes", [PROMPT]))
    at = table.schema.get_field_index("kind")
    newer = table.set_column(at, table.schema.field(at), pa.array(["thought"]))
    assert arrays.from_table("nodes", newer)[0].kind is NodeKind.UNKNOWN_VALUE
