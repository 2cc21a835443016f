"""schemas/ is what the code declares, and the declarations keep their own rules."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from gyre_data.schema import TABLES, arrow_schema

ROOT = Path(__file__).parents[2]


def test_files_are_generated():
    command = [sys.executable, str(ROOT / "tools" / "generate_schemas.py"), "--check"]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={"PYTHONPATH": f"{ROOT}:{ROOT}/proxy"}
    )
    assert found.returncode == 0, found.stderr


def arrow_type(described) -> pa.DataType:
    """Back from JSON, as a reader in another language would do it."""
    if isinstance(described, str):
        if described.startswith("timestamp"):
            return pa.timestamp("us", tz="UTC")
        return {"double": pa.float64(), "float": pa.float32(), "bool": pa.bool_()}.get(described) or getattr(
            pa, described
        )()
    if described["kind"] == "struct":
        return pa.struct([pa.field(f["name"], arrow_type(f["type"]), f["nullable"]) for f in described["fields"]])
    item = pa.field("item", arrow_type(described["item"]), described["item_nullable"])
    return {"list": pa.list_, "large_list": pa.large_list}[described["kind"]](item)


@pytest.mark.parametrize("name", TABLES)
def test_the_arrow_schema_can_be_made_from_the_file(name):
    described = json.loads((ROOT / "schemas" / f"{name}.json").read_text())
    fields = [pa.field(c["name"], arrow_type(c["type"]), c["nullable"]) for c in described["columns"]]
    assert pa.schema(fields).equals(arrow_schema(name))
    assert all(column["doc"] for column in described["columns"])
    assert all(column["nullable"] for column in described["columns"] if column["since"] != "1.0")
