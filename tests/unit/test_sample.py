"""The run that comes with gyre: found by name, clean, read-only, and holding what the tutorial shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gyre_data as gd
from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_data.store import SAMPLE, find_run


def test_it_is_found_by_name_unless_a_folder_has_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_run("sample") == find_run(Path("sample")) == SAMPLE
    shutil.copytree(SAMPLE, "sample")
    assert find_run("sample") == Path("sample")


def test_it_holds_a_group_of_each_task_with_every_shape() -> None:
    found = gd.stats(gd.open(SAMPLE))
    assert (found.executions, found.groups, found.trees.calls) == (8, 2, 39)
    assert {"sub_agent", "compaction", "retry"} <= set(found.trees.forks)
    assert found.by_state == {"scored": 7, "evaluator_failed": 1}
    assert found.end_reasons == {"finished": 7, "harness_timeout": 1}


def test_nothing_is_written_into_it(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in SAMPLE.rglob("*")}
    runner = CliRunner()
    for words in (
        ["ls", "sample"],
        ["tree", "sample"],
        ["stats", "sample"],
        ["explain", "sample"],
        ["verify", "sample"],
    ):
        assert runner.invoke(app, words).exit_code == 0, words
    with pytest.raises(ConfigError, match=r"run\.json says read_only; make a copy that is not: gyre export"):
        gd.RunWriter(SAMPLE)
    assert {path: path.stat().st_mtime_ns for path in SAMPLE.rglob("*")} == before
    done = runner.invoke(app, ["export", "sample", "-o", str(tmp_path / "copy")])
    assert done.exit_code == 0, done.output
    with gd.RunWriter(tmp_path / "copy"):
        pass


def test_it_tells_nothing_of_the_machine_it_was_made_on() -> None:
    words = (b"/tmp", b"/home", b"/root", b"127.0.0.1", b"key_sha256")
    run = gd.open(SAMPLE)
    texts = [path.read_bytes() for path in SAMPLE.rglob("*") if path.is_file()]
    texts += [run.blob(name) for name in run.table("blobs").column("blob_id").to_pylist()]
    assert not [word for word in words for text in texts if word in text]
