"""Merging: all executions of all runs, no row changed, nothing silently mixed up."""

import json
from dataclasses import replace

import pytest

import gyre_data
from gyre_data import folder_commands
from gyre_data.errors import ConfigError, DataError
from gyre_data.merge import merge
from gyre_data.pins import tag
from gyre_data.removal import remove
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter
from gyre_data.types import GroupEvent
from gyre_data.verify import verify
from tests.support.rows import START, one_execution
from tests.unit.test_compact import content


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is on the disk after a power loss is the matter of tests/crash."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)


def made(path, *executions, blob=b"words that both runs hold " * 9, **info):
    with RunWriter(path) as writer:
        writer.update_info(info)
        writer.put_blob(blob)
        for rows in executions:
            writer.write([*rows, GroupEvent(group_id="g_1", at=START, size=2)])
    return path


def test_two_runs_become_one(tmp_path):
    a = made(tmp_path / "a", one_execution("e_1"), one_execution("e_2"), policy="base", tokenizer="t1")
    b = made(tmp_path / "b", one_execution("e_3"), policy="base", tokenizer="t2")
    done = merge([a, b], tmp_path / "c")
    both = {name: rows for path in (a, b) for name, rows in content(path).items()}
    merged = content(tmp_path / "c")
    for name in both:
        wanted = sorted({row for path in (a, b) for row in content(path)[name]})
        assert sorted(set(merged[name])) == wanted
    assert merged["nodes"] == sorted([*content(a)["nodes"], *content(b)["nodes"]])
    assert len(merged["blobs"]) == 1
    assert done.num_rows == {name: len(rows) for name, rows in merged.items()}
    assert verify(tmp_path / "c").problems == ()
    info = gyre_data.open(tmp_path / "c").info
    assert (info["policy"], "tokenizer" in info, "endpoints" in info) == ("base", False, False)
    assert [(one["path"], one["executions"], one["info"]["tokenizer"]) for one in info["merged_from"]] == [
        (str(a), ["e_1", "e_2"], "t1"),
        (str(b), ["e_3"], "t2"),
    ]
    with RunWriter(tmp_path / "c") as writer:  # it is a run like any other
        writer.write(one_execution("e_4"))
    assert set(gyre_data.open(tmp_path / "c").table("calls").column("execution_id").to_pylist()) == {
        f"e_{i}" for i in range(1, 5)
    }


def test_rows_that_both_hold_are_there_once(tmp_path):
    rows = one_execution("e_1", 3)
    a = made(tmp_path / "a", rows)
    b = made(tmp_path / "b", rows, one_execution("e_2"))
    done = merge([a, b, a], tmp_path / "c")
    assert content(tmp_path / "c") == {**content(b), "groups": content(tmp_path / "c")["groups"]}
    assert done.num_same == 2 * len(rows) + 3  # and a row of the group with each execution
    short = made(tmp_path / "short", one_execution("e_1", 3)[:4])  # the same execution, copied when it had one call
    merge([short, a], tmp_path / "d")
    assert content(tmp_path / "d")["calls"] == content(a)["calls"]


def test_an_id_that_means_two_things_is_refused(tmp_path):
    a = made(tmp_path / "a", one_execution("e_1"))
    rows = one_execution("e_1")
    other = [replace(r, author="template") if type(r).__name__ == "Node" and r.logprobs is None else r for r in rows]
    with pytest.raises(DataError, match=r"nodes e_1_p0: .* its author in .*b is not"):
        merge([a, made(tmp_path / "b", other)], tmp_path / "c")
    renamed = [replace(r, call_id="x_" + r.call_id) if hasattr(r, "call_id") else r for r in rows]
    with pytest.raises(DataError, match="two executions under one id"):
        merge([a, made(tmp_path / "d", renamed)], tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_cannot_be_merged(tmp_path):
    a, b = made(tmp_path / "a", one_execution("e_1")), made(tmp_path / "b", one_execution("e_2"))
    with pytest.raises(ConfigError, match="wanted two runs or more"):
        merge([a], tmp_path / "c")
    with pytest.raises(ConfigError, match="is not empty; name another"):
        merge([a, b], a)
    with pytest.raises(ConfigError, match="found no manifest"):
        merge([a, tmp_path], tmp_path / "c")
    with RunWriter(b), pytest.raises(ConfigError, match="b is being written by pid"):
        merge([a, b], tmp_path / "c")


def test_tags_and_removals_of_the_sources_count(tmp_path):
    a = made(tmp_path / "a", one_execution("e_1"), one_execution("e_2"))
    b = made(tmp_path / "b", one_execution("e_3"))
    tag(b, "v1")
    with RunWriter(b) as writer:
        writer.write(one_execution("e_4"))
        remove(a, ["e_1"])
        merge([a, f"{b}@v1"], tmp_path / "c")
    calls = gyre_data.open(tmp_path / "c").table("calls")
    assert set(calls.column("execution_id").to_pylist()) == {"e_2", "e_3"}


def test_the_command(tmp_path, capsys):
    a, b = made(tmp_path / "a", one_execution("e_1")), made(tmp_path / "b", one_execution("e_2"))
    folder_commands.merge([a, b], tmp_path / "c")
    text = capsys.readouterr().out
    assert "2 runs, 6 calls, 12 nodes" in text
    assert f"look at it: gyre stats {tmp_path / 'c'}" in text
    folder_commands.merge([a, b], tmp_path / "d", as_json=True)
    assert json.loads(capsys.readouterr().out)["num_rows"]["calls"] == 6
    assert all(gyre_data.open(tmp_path / "d").table(name) is not None for name in TABLES)
