"""SQL over runs, by DuckDB on the Arrow tables where they lie.

DuckDB reads the memory-mapped columns that a query names and no others; views are made only when their name stands in
the SQL. A query can read the runs and nothing else: no file, no network, no Python variable, and nothing is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pyarrow as pa

from .errors import ConfigError
from .frame import Frame
from .installing import pip_install
from .schema import TABLES, arrow_schema
from .tree import Tables
from .views import VIEWS, Sources

__all__ = ["batches", "describe", "sql"]

_ROWS = 1 << 16  # rows in one batch of a result: lists of tokens stay below 32-bit offsets
_WORD = re.compile(r"\w+")
_HUGE = pa.decimal128(38, 0)  # how DuckDB hands out the sum of whole numbers


def sql(
    runs: Tables | Sequence[Tables],
    query: str,
    *,
    j_max: int | None = 5,
    evaluators: Mapping[str, float] | None = None,
) -> Frame:
    """Rows of one SELECT over the views of one or more runs; `describe` names the views and their columns.

    `j_max` and `evaluators` are those of `admit`, for the views that depend on it. Raises ConfigError for SQL that
    cannot be run, and when DuckDB is not installed.
    """
    return Frame(batches(runs, query, j_max=j_max, evaluators=evaluators).read_all())


def batches(
    runs: Tables | Sequence[Tables],
    query: str,
    *,
    j_max: int | None = 5,
    evaluators: Mapping[str, float] | None = None,
) -> pa.RecordBatchReader:
    """As `sql`, batch by batch, for results that are larger than memory."""
    duckdb = _duckdb()
    every: list[Tables] = [cast(Tables, runs)] if hasattr(runs, "table") else list(runs)
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"wanted SQL as text, got {error}; write it in UTF-8") from error
    spill = TemporaryDirectory(prefix="gyre-query-", ignore_cleanup_errors=True)
    connection = _connect(duckdb, spill.name)
    try:
        _only_select(connection.extract_statements(query), query)
        _make_views(connection, Sources(every, j_max=j_max, evaluators=evaluators), query)
        reader = connection.sql(query).to_arrow_reader(_ROWS)
    except duckdb.Error as error:
        raise _told(error) from error
    fields = [field.with_type(pa.int64()) if field.type == _HUGE else field for field in reader.schema]
    schema = pa.schema(fields)
    return pa.RecordBatchReader.from_batches(schema, _read(duckdb, reader, connection, spill, schema))


def describe() -> dict[str, tuple[str, dict[str, str]]]:
    """Every view: a line of meaning, and its columns with their SQL types."""
    connection = _connect(_duckdb())
    shown = {name: view.doc for name, view in VIEWS.items() if not name.startswith("_")}
    _make_views(connection, Sources([_NoRun()], j_max=5, evaluators=None), " ".join(shown))
    return {
        name: (doc, {row[0]: row[1] for row in connection.execute(f"describe {name}").fetchall()})
        for name, doc in shown.items()
    }


class _NoRun:
    """A run without rows: views have the same columns whatever the runs hold."""

    path = Path()

    def table(self, name: str) -> pa.Table:
        return arrow_schema(name).empty_table()


def _read(
    duckdb: Any, reader: Any, connection: Any, spill: TemporaryDirectory[str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The batches; the connection, and the folder it spills to, live as long as they are read."""
    try:
        for batch in reader:
            yield _whole(batch, schema)
    except (duckdb.Error, pa.ArrowException, OSError) as error:  # by what the stream passes on of DuckDB's errors
        raise _told(error) from error
    finally:
        connection.close()
        spill.cleanup()


def _whole(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    try:
        return batch.cast(schema)
    except pa.ArrowInvalid as error:
        raise ConfigError(f"wanted whole numbers of 64 bits, got {error}; cast it to double in the SQL") from error


def _duckdb() -> Any:
    try:
        return import_module("duckdb")
    except ModuleNotFoundError as error:
        raise ConfigError(f"wanted DuckDB, but it is not installed; run: {pip_install('query')}") from error


def _connect(duckdb: Any, spill: str = "") -> Any:
    """`spill` is where a query goes that needs more memory than there is; it would go to the current folder else."""
    config = {
        "temp_directory": spill,
        "python_enable_replacements": "false",
        "autoinstall_known_extensions": "false",
    }
    connection = duckdb.connect(":memory:", config=config)
    connection.execute("set enable_external_access = false")  # after the folder to spill to was named
    connection.execute("set timezone = 'UTC'")
    connection.execute("set lock_configuration = true")
    connection.execute("create schema raw")
    return connection


def _only_select(statements: Sequence[Any], query: str) -> None:
    kinds = [str(statement.type).rpartition(".")[2] for statement in statements]
    if kinds not in (["SELECT"], ["EXPLAIN"]):
        came = ", ".join(kinds) or "nothing"
        raise ConfigError(f"wanted one SELECT (or DESCRIBE, SUMMARIZE, EXPLAIN), got {came}; SQL only reads runs")
    if re.match(r"\s*show\b", query, re.IGNORECASE):
        raise ConfigError(f"wanted a SELECT, got SHOW; the views are {_known()}; `gyre query RUN` lists their columns")


def _make_views(connection: Any, sources: Sources, query: str) -> None:
    """Make every view whose name stands in the query, and what these read."""
    words = {word.lower() for word in _WORD.findall(query)}
    made: set[str] = set()

    def make(name: str) -> None:
        if name in made:
            return
        made.add(name)
        if name.startswith("raw."):
            _register(connection, name, sources.stored(name.removeprefix("raw.")))
            return
        view = VIEWS[name]
        for below in view.reads:
            make(below)
        if view.make is not None:
            _register(connection, name, view.make(sources))
        else:
            connection.execute(f"create view {name} as {view.sql}")

    for name in VIEWS:
        if name in words:
            make(name)
    for name in TABLES if "raw" in words else ():
        if name in words:
            make(f"raw.{name}")


def _register(connection: Any, name: str, table: pa.Table) -> None:
    """A view over an Arrow table, which is read where it lies."""
    below = f"_arrow_{name.replace('.', '_')}"
    connection.register(below, table)
    connection.execute(f"create view {name} as select * replace (run::varchar as run) from {below}")


def _known() -> str:
    return ", ".join(name for name in VIEWS if not name.startswith("_"))


def _told(error: Exception) -> ConfigError:
    """What DuckDB said, with what there is that is near to what was asked for."""
    text = str(error).strip()
    parts = text.split("\n\n")
    head = " ".join(parts[0].partition("Candidate functions")[0].split())
    if missing := re.search(r"[Tt]able with name \"?([^\s\"]+)\"? does not exist", text):
        near = get_close_matches(missing[1], [name for name in VIEWS if not name.startswith("_")], n=1, cutoff=0.5)
        hint = f"nearest: {near[0]}" if near else f"views: {_known()}"
        return ConfigError(f"wanted a view of the run, got {missing[1]!r}; {hint} (`gyre query RUN` lists all)")
    if "file system operations are disabled" in text:
        return ConfigError(f"wanted SQL over the run alone, got one that uses files ({head}); save a result with -o")
    if "syntax error" in head and len(parts) > 1:
        head += " in " + " ".join(parts[1].split()).rstrip("^ ")
    return ConfigError(f"wanted SQL that DuckDB can run, got: {head}; `gyre query RUN` lists views and columns")
