"""Write schemas/<table>.json from the declarations in gyre_data/schema.py. `--check` writes nothing and fails on drift.

The files are documentation for readers in other languages: nothing of ours reads them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from gyre_data.schema import MAJOR, MINOR, TABLES, Table

FOLDER = Path(__file__).resolve().parents[1] / "schemas"


def describe_type(type_: pa.DataType) -> Any:
    """An Arrow type as JSON: its name, or an object for a list or struct with the parts it is made of."""
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        kind = "large_list" if pa.types.is_large_list(type_) else "list"
        item = type_.value_field
        return {"kind": kind, "item": describe_type(item.type), "item_nullable": item.nullable}
    if pa.types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        parts = [{"name": f.name, "type": describe_type(f.type), "nullable": f.nullable} for f in fields]
        return {"kind": "struct", "fields": parts}
    return str(type_)


def describe(table: Table) -> dict[str, Any]:
    """One table as JSON."""
    return {
        "table": table.name,
        "major": MAJOR,
        "minor": MINOR,
        "owner": table.owner,
        "doc": table.doc,
        "key": table.key,
        "columns": [
            {
                "name": column.name,
                "type": describe_type(column.type),
                "nullable": column.nullable,
                "since": f"{MAJOR}.{column.since}",
                "doc": column.doc,
            }
            for column in table.columns
        ],
    }


def render() -> dict[str, str]:
    """File name to text, one for each table."""
    return {f"{name}.json": json.dumps(describe(table), indent=1) + "\n" for name, table in TABLES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    check = parser.parse_args().check
    wanted = render()
    have = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    differ = sorted(name for name in wanted.keys() | have.keys() if wanted.get(name) != have.get(name))
    if check:
        if differ:
            sys.stderr.write(f"wanted schemas/ as generated, these differ: {', '.join(differ)}; run: make schemas\n")
        return 1 if differ else 0
    FOLDER.mkdir(exist_ok=True)
    for name in have.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
