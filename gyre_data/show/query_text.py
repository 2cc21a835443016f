"""Results of a query as text, JSON, CSV or a file.

On a terminal a table that is too wide becomes one block a row, and long values are shortened; in a pipe nothing is cut.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from rich.text import Text

from gyre_data.beside import new_file
from gyre_data.errors import ConfigError
from gyre_data.frame import rows
from gyre_data.printable import printable_json

from .layout import flow, wrapped
from .numbers import DASH

__all__ = ["Writes", "save", "table_lines", "view_lines", "write_csv", "write_json"]

_LONG = 120  # characters of a value that a terminal shows
_LISTED = 8  # elements of a list that a terminal shows


def view_lines(views: dict[str, tuple[str, dict[str, str]]], where: str, width: int) -> Iterator[Text]:
    """Every view with its meaning and columns."""
    for name, (doc, columns) in views.items():
        yield from wrapped(Text.assemble((name, "bold"), "  ", doc), width, indent=2)
        parts = [Text.assemble(column, (f" {_short(type_)}", "dim")) for column, type_ in columns.items()]
        yield from (Text("  ") + line for line in flow(parts, max(width - 2, 40), indent=0))
    yield Text("raw.NAME is a table as it is stored; times are UTC", style="dim")
    yield Text(f'next: gyre query {where} "select role, sum(output_tokens) from calls group by 1"', style="dim")


def _short(type_: str) -> str:
    return "struct[]" if type_.startswith("STRUCT") else type_.replace("TIMESTAMP WITH TIME ZONE", "timestamp").lower()


def table_lines(
    names: Sequence[str], rows: Sequence[Sequence[Any]], *, width: int | None, more: bool
) -> Iterator[Text]:
    """Rows as an aligned table; as one block a row where the table is wider than `width`, None for a pipe.

    `more` tells that there are rows which are not shown.
    """
    cells = [[_cell(value, cut=width is not None) for value in row] for row in rows]
    right = [_is_number([row[k] for row in rows]) for k in range(len(names))]
    sizes = [max(len(name), *(len(row[k]) for row in cells)) if cells else len(name) for k, name in enumerate(names)]
    if width is not None and cells and sum(sizes) + 2 * (len(sizes) - 1) > width:
        yield from _blocks(names, cells)
    else:
        yield _line(names, sizes, right, "bold")
        for row in cells:
            yield _line(row, sizes, right, "")
    if more:
        yield Text(f"the first {len(rows):,} rows; --limit 0 shows all, -o FILE saves them", style="dim")
    elif width is not None:
        yield Text(f"{len(rows):,} row{'' if len(rows) == 1 else 's'}", style="dim")


def _line(cells: Sequence[str], sizes: Sequence[int], right: Sequence[bool], style: str) -> Text:
    padded = [f"{c:>{n}}" if r else f"{c:<{n}}" for c, n, r in zip(cells, sizes, right, strict=True)]
    return Text("  ".join(padded).rstrip(), style=style)


def _blocks(names: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[Text]:
    label = max(map(len, names))
    for number, row in enumerate(cells, 1):
        yield Text(f"row {number}", style="bold")
        for name, cell in zip(names, row, strict=True):
            if cell != DASH:
                yield Text.assemble("  ", (f"{name:<{label}}", "dim"), f"  {cell}")


def _is_number(values: Sequence[Any]) -> bool:
    known = [value for value in values if value is not None]
    return bool(known) and all(isinstance(v, int | float | Decimal) and not isinstance(v, bool) for v in known)


def _cell(value: Any, *, cut: bool) -> str:
    if value is None:
        return DASH
    if isinstance(value, list) and cut and len(value) > _LISTED:
        shown = ", ".join(_cell(one, cut=True) for one in value[: _LISTED - 1])
        return f"[{shown}, ... {len(value):,} in all]"
    text = (f"{value:.6g}" if cut else repr(value)) if isinstance(value, float) else _text(value)
    if "\n" in text or "\r" in text:
        text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{text[:_LONG]}... {len(text):,} characters" if cut and len(text) > _LONG + 20 else text


def _text(value: Any) -> str:
    plain = _plain(value)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """The value as JSON has it: times in ISO form, bytes in base64, what is no number null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat().replace("+00:00", "Z")
    return value if value is None or isinstance(value, str | int) else str(value)


class Writes(Protocol):
    """What text can be written to."""

    def write(self, text: str, /) -> int:
        """Write `text`; returns its length."""
        ...


def write_json(reader: pa.RecordBatchReader, out: Writes) -> None:
    """One JSON array of objects, a line each."""
    before = "["
    for batch in reader:
        for row in (dict(zip(reader.schema.names, found, strict=True)) for found in rows(batch)):
            out.write(f"{before}\n{printable_json(json.dumps(_plain(row), ensure_ascii=False))}")
            before = ","
    out.write("[]\n" if before == "[" else "\n]\n")


def write_csv(reader: pa.RecordBatchReader, out: Writes) -> None:
    """CSV with a line of names; null is empty, lists and structs are JSON."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(reader.schema.names)
    for batch in reader:
        for row in rows(batch):
            writer.writerow("" if value is None else _text(value) for value in row)


def save(reader: pa.RecordBatchReader, path: Path) -> int:
    """Write the rows to a new file by its ending; return their number. A failed query leaves no file."""
    if path.suffix not in (".parquet", ".arrow", ".csv", ".json"):
        raise ConfigError(f"wanted a file that ends in .parquet, .arrow, .csv or .json, got {path}; name one of these")
    counted = _Counted(reader)
    with new_file(path, force=True) as file:
        if path.suffix in (".csv", ".json"):
            text = io.TextIOWrapper(file, encoding="utf-8", newline="")
            (write_csv if path.suffix == ".csv" else write_json)(counted.reader, text)
            text.detach()
        else:
            make = pq.ParquetWriter if path.suffix == ".parquet" else pa.ipc.new_file
            with make(file, counted.reader.schema) as writer:
                for batch in counted.reader:
                    writer.write_batch(batch)
    return counted.num_rows


class _Counted:
    """Counts the rows that go by."""

    def __init__(self, reader: pa.RecordBatchReader) -> None:
        self.num_rows = 0
        self.reader = pa.RecordBatchReader.from_batches(reader.schema, self._count(reader))

    def _count(self, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        for batch in reader:
            self.num_rows += batch.num_rows
            yield batch
