"""Runs of every released format read for ever, row by row; made once by tools/make_golden.py and never again."""

import json
import shutil
from pathlib import Path

import pytest

import gyre_data
from gyre_data.arrays import from_table
from gyre_data.rewrite import codec_of
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter
from gyre_data.verify import verify

GOLDEN = sorted(path.with_suffix("") for path in Path(__file__).parent.glob("run-*.json"))


def plain(value):
    return json.loads(json.dumps(value, default=lambda v: v.hex() if isinstance(v, bytes) else str(v)))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_golden_run_reads_as_when_it_was_written(path, tmp_path):
    wanted = json.loads(path.with_suffix(".json").read_text())
    files = [p for p in path.rglob("*") if p.is_file()]
    assert files
    assert max(p.stat().st_size for p in files) < 20_000
    report = verify(path)
    assert report.problems == ()
    check_rows(path, wanted)
    copy = tmp_path / "run"
    shutil.copytree(path, copy)
    with RunWriter(copy) as writer:
        assert {r.table: r.intact for r in writer.recovered} == {"calls": True, "nodes": True, "top_logprobs": True}
    check_rows(copy, wanted)


def check_rows(path: Path, wanted: dict) -> None:
    run = gyre_data.open(path)
    assert {name for name in TABLES if run.table(name).num_rows} == set(wanted)
    for name, rows in wanted.items():
        for row, read in zip(rows, plain(run.table(name).to_pylist()), strict=True):
            assert {key: read[key] for key in row} == row
            assert all(read[key] is None for key in read.keys() - row.keys())
        assert len(from_table(name, run.table(name))) == len(rows)


def test_there_is_a_golden_run():
    assert {"run-1_0", "run-1_2"} <= {path.name for path in GOLDEN}


def test_what_format_1_2_added_reads_on():
    """A tag shows what was removed later; compaction made every other segment cold."""
    path = Path(__file__).parent / "run-1_2"
    assert gyre_data.open(path).manifest.removed == ("e_removed",)
    assert "e_removed" not in gyre_data.open(path).table("calls").column("execution_id").to_pylist()
    assert "e_removed" in gyre_data.open(f"{path}@v1").table("calls").column("execution_id").to_pylist()
    assert {codec_of(p) for p in (path / "nodes").glob("*.arrow")} == {None, "zstd"}
