"""`verify` finds each kind of damage, names where, and stays quiet on what is right; `ls` and its exit statuses."""

import json
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import gyre_data
from gyre_data import manifest as manifests
from gyre_data import recovery
from gyre_data.arrays import table_of
from gyre_data.checks import ProblemKind
from gyre_data.commit_log import encode_record
from gyre_data.compact import compact
from gyre_data.errors import ConfigError
from gyre_data.listing import list_executions, list_runs
from gyre_data.main import app
from gyre_data.reader import Run
from gyre_data.removal import remove
from gyre_data.schema import CallStatus, DeliveryState, ScoreStatus, arrow_schema
from gyre_data.segment import write_sealed
from gyre_data.store import RunWriter
from gyre_data.types import Delivery, Score, VersionSpan
from gyre_data.verify import verify
from tests.support.rows import START, call_row, one_call, one_execution, output_node, prompt_node


def write(path: Path, rows) -> Path:
    with RunWriter(path) as writer:
        writer.write(rows)
    return path


def found(path: Path) -> list[tuple[str, str]]:
    return [(str(p.kind), p.where) for p in verify(path).problems]


def test_a_good_run_is_clean_open_and_sealed(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path)
    writer.write(one_execution())
    live = verify(path)
    assert (live.problems, live.notes, live.exit_status) == ((), (), 0)
    writer._release()
    left = verify(path)
    assert left.problems == ()
    assert any("was left open with 6 rows; the next writer" in note for note in left.notes)
    RunWriter(path).close()
    assert verify(path).num_rows == {"calls": 3, "deliveries": 3, "executions": 2, "nodes": 6, "scores": 1}


def test_a_folder_that_is_rewritten_between_two_looks_lacks_no_manifest(tmp_path, monkeypatch):
    """The files are listed before the manifest is read: what replaced them meanwhile is on no list."""
    path = write(tmp_path / "run", one_execution())
    compact(path)
    files, rewrites = recovery._files, [path]

    def listed(run):
        there = files(run)
        if rewrites:
            compact(rewrites.pop(), cold=True)
        return there

    monkeypatch.setattr(recovery, "_files", listed)
    assert verify(path).problems == ()
    assert not rewrites


def test_a_folder_that_changes_again_and_again_is_looked_at_until_it_holds_still(tmp_path, monkeypatch):
    path, gone = tmp_path / "run", [f"e_{number}" for number in range(1, 7)]
    write(path, [row for name in (*gone, "e_0") for row in one_execution(name)])

    def changes_then(*where):
        run = Run(*where)
        if gone:
            remove(path, [gone.pop()], purge=True)
        return run

    monkeypatch.setattr("gyre_data.verify.Run", changes_then)
    assert verify(path).problems == ()
    assert not gone


def test_flips_in_every_file_are_found(tmp_path):
    path = write(tmp_path / "run", one_execution())
    with RunWriter(path) as writer:
        writer.put_blob(b"words " * 50)
    files = [p for p in path.rglob("*") if p.suffix == ".arrow"]
    assert len(files) == 6
    for file in files:
        good = file.read_bytes()
        for at in range(3, len(good), len(good) // 5):
            bad = bytearray(good)
            bad[at] ^= 16
            file.write_bytes(bad)
            assert ("corrupt", f"{file.parent.name}/{file.name}") in found(path), at
        file.write_bytes(good[:-4])
        assert ("corrupt", f"{file.parent.name}/{file.name}") in found(path)
        file.unlink()
        assert ("missing", f"{file.parent.name}/{file.name}") in found(path)
        file.write_bytes(good)
    assert found(path) == []


def test_a_flip_in_an_acknowledged_commit_is_worse_than_a_torn_tail(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path)
    for number in range(3):
        writer.write(one_call(number))
    log = writer._live["nodes"].segment.log_path
    writer._release()
    good = log.read_bytes()
    where = f"nodes/{log.stem}.open"
    log.write_bytes(good[:25] + bytes([good[25] ^ 1]) + good[26:])
    assert found(path)[0] == ("corrupt", where)
    log.write_bytes(good[:45] + bytes([good[45] ^ 1]) + good[46:])
    assert found(path)[0] == ("tail", where)
    log.write_bytes(good + encode_record(1 << 40, 1, 1)[:11])
    assert found(path) == [("tail", where)]


def test_manifests(tmp_path):
    path = write(tmp_path / "run", one_execution())
    first, second, third = (manifests.manifest_path(path, n) for n in (1, 2, 3))
    second.rename(tmp_path / "aside")
    assert found(path) == [("manifest", "manifest/00000003.json")]
    (tmp_path / "aside").rename(second)
    good = first.read_text()
    first.write_text(good.replace('"number": 1', '"number": 7'))
    assert found(path) == [("manifest", "manifest/00000001.json")]
    first.write_text(good)
    third.write_text("{")
    report = verify(path)
    assert (report.usable, report.exit_status) == (False, 1)
    assert {p.kind for p in report.problems} == {ProblemKind.MANIFEST, ProblemKind.UNUSABLE}


ROOT = prompt_node("n_p", "c_0")
OUTPUT = output_node("n_o", "c_0", ROOT)
CALL = call_row("c_0", ROOT, OUTPUT)


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([ROOT, OUTPUT, CALL], []),
        ([ROOT, OUTPUT, OUTPUT, CALL], [("duplicate", "nodes n_o")]),
        ([ROOT, OUTPUT, CALL, CALL], [("duplicate", "calls c_0")]),
        ([OUTPUT, CALL], [("orphan", "nodes n_o"), ("orphan", "calls c_0")]),
        ([ROOT, CALL], [("orphan", "calls c_0")]),
        ([ROOT, replace(OUTPUT, start_pos=2), CALL], [("position", "nodes n_o")]),
        (
            [replace(ROOT, start_pos=1), replace(OUTPUT, start_pos=4), call_row("c_0", None, None)],
            [("position", "nodes n_p")],
        ),
        (
            [replace(ROOT, parent_id="n_o", start_pos=7), OUTPUT, CALL],
            [("position", "nodes n_o"), ("circle", "nodes n_p"), ("call", "calls c_0")],
        ),
        ([ROOT, replace(OUTPUT, root_id="n_o"), CALL], [("orphan", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, execution_id="e_2"), CALL], [("orphan", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, copy_of="n_x"), CALL], [("orphan", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, logprobs=None), CALL], [("alignment", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, logprobs=np.ones(4, np.float32)), CALL], [("alignment", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, policy_versions=None), CALL], [("alignment", "nodes n_o")]),
        ([ROOT, replace(OUTPUT, token_ids=np.array([1, -2, 3, 4], np.int32)), CALL], [("alignment", "nodes n_o")]),
        ([ROOT, OUTPUT, replace(CALL, prompt_tokens=4)], [("call", "calls c_0")]),
        ([ROOT, OUTPUT, replace(CALL, output_tokens=5)], [("call", "calls c_0")]),
        ([ROOT, OUTPUT, replace(CALL, output_node="n_p", output_tokens=None)], [("call", "calls c_0")] * 2),
        ([ROOT, OUTPUT, replace(CALL, continues_from="c_9")], [("orphan", "calls c_0")]),
        ([ROOT, OUTPUT, replace(CALL, environment_state_id="st_9")], [("orphan", "calls st_9")]),
        ([ROOT, OUTPUT, replace(CALL, request_blobs=("00",))], [("orphan", "calls c_0")]),
        ([ROOT, OUTPUT, replace(CALL, tools_blob="00")], [("orphan", "calls c_0")]),
        ([ROOT, replace(OUTPUT, message_blobs=("00",)), CALL], [("orphan", "nodes n_o")]),
        (
            [ROOT, OUTPUT, CALL, Delivery(call_id="c_9", execution_id="e_1", state=DeliveryState.DELIVERED, at=START)],
            [("orphan", "deliveries c_9")],
        ),
    ],
)
def test_rows_that_disagree(tmp_path, rows, wanted):
    assert found(write(tmp_path / "run", rows)) == wanted


def test_nodes_without_a_call_are_noted_not_wrong(tmp_path):
    report = verify(write(tmp_path / "run", [ROOT, OUTPUT]))
    assert report.problems == ()
    assert report.notes == ("2 nodes belong to calls that were never committed; readers leave them out",)


def put_raw(path: Path, rows, change) -> None:
    """Write rows as a buggy writer would: `change` maps the lawful Arrow table to an unlawful one."""
    name = table_of(rows[0])
    lawful = gyre_data.open(write(path.with_name(f"{path.name}-lawful"), rows)).table(name)
    table = change(lawful)
    (path / name).mkdir(exist_ok=True)
    sealed = write_sealed(path / name / "x-000001.arrow", table.schema, table.to_batches())
    manifests.publish(path, lambda base: base.closed(name, "x-000001", sealed), "x")


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))


def test_what_our_writer_would_refuse(tmp_path):
    short = write(tmp_path / "short", [])
    put_raw(short, [ROOT, OUTPUT], lambda table: with_column(table, "logprobs", [None, [-1.0, -1.0]]))
    assert found(short) == [("alignment", "nodes n_o")]
    prompts = write(tmp_path / "prompts", [])
    put_raw(prompts, [ROOT, OUTPUT], lambda table: with_column(table, "logprobs", [[-1.0] * 3, [-1.0] * 4]))
    assert found(prompts) == [("alignment", "nodes n_p")]
    nulls = write(tmp_path / "nulls", [])
    put_raw(nulls, [ROOT, OUTPUT], lambda table: with_column(table, "author", [None, None]))
    assert found(nulls) == [("schema", "nodes.author")]


@pytest.mark.parametrize(
    "spans",
    [[(0, 2), (2, 4)], [(0, 4)], [(0, 2), (3, 4)], [(0, 3), (2, 4)], [(1, 4)], [(0, 3)], [(0, 2), (2, 2), (2, 4)], []],
)
def test_spans_tile_the_tokens(tmp_path, spans):
    path = write(tmp_path / "run", [])
    fine = replace(OUTPUT, node_id="n_f", policy_versions=(VersionSpan(policy_id="b", n=0, start=0, end=4),))

    def change(table):
        made = [{"policy_id": "b", "n": 1, "start": a, "end": b} for a, b in spans]
        whole = [{"policy_id": "b", "n": 0, "start": 0, "end": 4}]
        return with_column(table, "policy_versions", [None, made, whole, made, whole])

    more = [replace(OUTPUT, node_id="n_2"), replace(fine, node_id="n_f2")]
    put_raw(path, [ROOT, OUTPUT, fine, *more], change)
    tiles = spans in ([(0, 2), (2, 4)], [(0, 4)])
    assert found(path) == ([] if tiles else [("alignment", "nodes n_o"), ("alignment", "nodes n_2")])


def test_blobs_hash_to_their_ids(tmp_path):
    path = write(tmp_path / "run", [])
    with RunWriter(path.with_name(f"{path.name}-lawful")) as writer:
        ids = [writer.put_blob(b"first " * 40), writer.put_blob(b"second"), writer.put_blob(b"third")]
    table = gyre_data.open(path.with_name(f"{path.name}-lawful")).table("blobs")
    data = table.column("data").to_pylist()
    table = with_column(table, "data", [data[0][:-1], b"sekond", data[2]])
    (path / "blobs").mkdir()
    sealed = write_sealed(path / "blobs" / "x-000001.arrow", table.schema, table.to_batches())
    manifests.publish(path, lambda base: base.closed("blobs", "x-000001", sealed), "x")
    assert found(path) == [("blob", f"blobs {ids[0]}"), ("blob", f"blobs {ids[1]}")]
    with pytest.raises(gyre_data.GyreError, match="hash to something else"):
        gyre_data.open(path).blob(ids[1])
    assert gyre_data.open(path).blob(ids[2]) == b"third"


def test_damage_does_not_raise_a_flood(tmp_path):
    path = write(tmp_path / "run", one_execution(num_calls=30))
    (nodes,) = (path / "nodes").glob("*.arrow")
    bad = bytearray(nodes.read_bytes())
    bad[len(bad) // 2] ^= 1
    nodes.write_bytes(bad)
    report = verify(path)
    assert [p.kind for p in report.problems] == ["corrupt"]
    assert any("not checked, since nodes is damaged: calls and their nodes agree" in n for n in report.notes)


def test_tables_of_a_newer_release_are_noted(tmp_path):
    path = write(tmp_path / "run", one_execution())
    schema = arrow_schema("cells")
    (path / "moods").mkdir()
    sealed = write_sealed(path / "moods" / "x-000001.arrow", schema, [])
    manifests.publish(path, lambda base: base.closed("moods", "x-000001", sealed), "x")
    report = verify(path)
    assert report.problems == ()
    assert report.notes == ("moods/ is a table of a newer release; its rows were not checked",)


# --- ls ------------------------------------------------------------------------------------------------------------


def test_list_executions(tmp_path):
    path = tmp_path / "runs" / "a"
    rows = [*one_execution("e_1"), *one_execution("e_2", 2, score=None)]
    rescored = {"execution_id": "e_1", "evaluator": "judge", "at": START + timedelta(hours=1)}
    rows += [
        Score(score_id="s_2", status=ScoreStatus.SCORED, value=0.75, partial=True, **rescored),
        Score(score_id="s_3", status=ScoreStatus.FAILED, **{**rescored, "at": START + timedelta(hours=2)}),
    ]
    third = one_call(0, execution_id="e_3")
    rows += [*third[:2], replace(third[2], status=CallStatus.FAILED, error="engine lost")]
    with RunWriter(path) as writer:
        writer.write(rows)
        assert list_executions(gyre_data.open(path))[2].state == "running"
        assert list_runs(path.parent)[0].writing
    one, two, three = list_executions(gyre_data.open(path))
    assert (one.task_id, one.group_id, one.sample_index, one.harness) == ("task-1", "g_1", 0, "bundled")
    assert (one.state, one.end_reason, one.num_calls, one.num_bad_calls) == ("ended", "finished", 3, 0)
    assert (one.num_tokens, one.num_sampled_tokens) == (9 + 1 + 2 + 3, 1 + 2 + 3)
    assert (one.score, one.score_status, one.evaluator, one.partial) == (0.75, "failed", "judge", True)
    assert (two.score, two.score_status, two.num_calls) == (None, None, 2)
    assert (three.state, three.num_calls, three.num_bad_calls) == ("interrupted", 1, 1)
    (run,) = list_runs(path.parent)
    assert (run.num_executions, run.num_calls, run.writing, run.problem) == (3, 6, False, None)


def gyre(*arguments: str):
    return CliRunner().invoke(app, arguments)


def test_ls_and_verify_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no run here or in ./runs; record one: gyre demo" in gyre("ls").output
    path = write(Path("runs/a"), one_execution())
    assert "runs/a" in gyre("ls").output
    listed = gyre("ls", "runs/a")
    assert listed.exit_code == 0
    assert "task-1" in listed.output
    assert "score (pytest)" in listed.output
    assert "0.50" in listed.output
    assert "look at one: gyre tree runs/a" in listed.output
    assert json.loads(gyre("ls", "runs/a", "--json").output)[0]["num_calls"] == 3
    assert json.loads(gyre("ls", "--json").output)[0]["num_executions"] == 1
    clean = gyre("verify")
    assert clean.exit_code == 0
    assert "runs/a: clean" in clean.output
    assert json.loads(gyre("verify", "runs/a", "--json").output)["exit_status"] == 0
    (nodes,) = (path / "nodes").glob("*.arrow")
    os.truncate(nodes, 100)
    broken = gyre("verify", "runs/a")
    assert broken.exit_code == 1
    assert f"corrupt    nodes/{nodes.name}" in broken.output
    manifests.manifest_path(path, manifests.numbers(path)[-1]).write_text("{")
    assert gyre("verify", "runs/a").exit_code == 1
    assert json.loads(gyre("verify", "runs/a", "--json").output)["usable"] is False
    assert "see `gyre verify" in gyre("ls").output
    missing = gyre("verify", "runs/none")
    assert isinstance(missing.exception, ConfigError)
