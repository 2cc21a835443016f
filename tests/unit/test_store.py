"""The store in the plain case: order, snapshots, blobs, manifests, which run is meant. Crashes are in tests/crash."""

import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import gyre_data
from gyre_data import manifest as manifests
from gyre_data.arrays import from_table, list_views
from gyre_data.commit_log import RECORD_BYTES
from gyre_data.errors import ConfigError, CorruptError, SchemaError
from gyre_data.listing import list_runs
from gyre_data.reader import READ_ORDER
from gyre_data.schema import MAJOR, TABLES, arrow_schema
from gyre_data.segment import Sealed, write_sealed
from gyre_data.store import RunWriter, find_run
from gyre_data.types import Step
from gyre_data.verify import verify
from gyre_data.writer import COMMIT_ORDER
from tests.support.rows import START, one_call, one_execution, output_node, prompt_node, same_row


def test_rows_come_back_open_and_sealed(tmp_path):
    rows = one_execution()
    with RunWriter(tmp_path / "run") as writer:
        writer.write(rows)
        run = gyre_data.open(tmp_path / "run")
        for _ in range(2):
            nodes, calls = (from_table(name, run.table(name)) for name in ("nodes", "calls"))
            wanted = [row for row in rows if type(row).__name__ == "Node"]
            assert all(same_row(a, b) for a, b in zip(wanted, nodes, strict=True))
            assert [c.call_id for c in calls] == ["e_1_c0", "e_1_c1", "e_1_c2"]
            assert run.table("environments").num_rows == 0
            assert run.table("environments").schema.names == list(TABLES["environments"].column_names)
            writer.seal()
            run.refresh()
            assert not run.open_segments
            assert not run.refresh()


def test_orders_are_one_another_reversed():
    assert READ_ORDER[::-1] == COMMIT_ORDER
    assert set(READ_ORDER) == set(TABLES)
    place = {name: i for i, name in enumerate(COMMIT_ORDER)}
    assert max(place["blobs"], place["nodes"], place["environments"]) < place["calls"] < place["deliveries"]


def test_append_waits_for_commit(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        run = gyre_data.open(tmp_path / "run")
        writer.append(one_call(0))
        assert not run.refresh()
        writer.commit()
        assert run.refresh()
        assert run.table("calls").num_rows == 1
        number = run.manifest_number
        writer.append(one_call(1))
    run.refresh()
    assert run.table("calls").num_rows == 2
    assert run.manifest_number == number + 1
    with pytest.raises(gyre_data.GyreError, match="this writer is closed; open a new one"):
        writer.append(one_call(2))


def test_reading_is_zero_copy_from_the_memory_map(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        for number in range(20):
            writer.write(one_call(number))
        check_views_lie_in_maps(tmp_path / "run", ".open")
    check_views_lie_in_maps(tmp_path / "run", ".arrow")


def check_views_lie_in_maps(path: Path, suffix: str) -> None:
    before = pa.total_allocated_bytes()
    views = list_views(gyre_data.open(path).table("nodes").column("token_ids"))
    assert pa.total_allocated_bytes() == before
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else ():
        if line.endswith(suffix):
            start, end = line.split()[0].split("-")
            maps.append((int(start, 16), int(end, 16)))
    for view in views:
        assert not view.flags.writeable
        if maps:
            assert any(low <= view.ctypes.data < high for low, high in maps)


def test_who_follows_a_run_maps_each_file_once_however_often_it_looks(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        writer.write(one_call(0))
        run = gyre_data.open(tmp_path / "run")
        for number in range(1, 200):
            writer.write(one_call(number))
            run.refresh()
            nodes = run.table("nodes")
        assert nodes.equals(gyre_data.open(tmp_path / "run").table("nodes"))
        if sys.platform == "linux":
            maps = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
            times = Counter(name for name in maps if name.startswith(str(tmp_path)))
            assert max(times.values()) <= 2  # one has room for a megabyte
        del run, nodes
        if sys.platform == "linux":
            assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_commit_that_was_taken_back_is_not_kept(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        for number in range(3):
            writer.write(one_call(number))
        run = gyre_data.open(tmp_path / "run")
        before = run.table("nodes")
        log = next((tmp_path / "run" / "nodes").glob("*.commit"))
        os.truncate(log, log.stat().st_size - RECORD_BYTES)
        assert run.refresh()
        assert run.table("nodes").equals(before.slice(0, 4))  # two of each call


def test_blobs(tmp_path):
    path = tmp_path / "run"
    texts = [b"", b"x", b"the same words " * 100, os.urandom(500)]
    with RunWriter(path) as writer:
        ids = [writer.put_blob(text) for text in texts + texts]
        assert ids[:4] == ids[4:]
    with RunWriter(path) as writer:
        assert [writer.put_blob(text) for text in texts] == ids[:4]
    run = gyre_data.open(path)
    assert [run.blob(i) for i in ids[:4]] == texts
    blobs = run.table("blobs")
    assert blobs.num_rows == 4
    assert blobs.column("codec").to_pylist() == ["none", "none", "zstd", "none"]
    with pytest.raises(KeyError):
        run.blob("0" * 64)


def test_run_json_keeps_what_others_wrote(tmp_path):
    with RunWriter(tmp_path / "run") as writer:
        first = writer.update_info({"endpoints": {"proxy": "http://127.0.0.1:1"}})
        second = writer.update_info({"policy": "base:0"})
    assert second == {**first, "policy": "base:0"} == gyre_data.open(tmp_path / "run").info
    RunWriter(tmp_path / "run").close()
    assert gyre_data.open(tmp_path / "run").info == second


def test_full_and_old_segments_are_sealed_before_the_next_commit(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        monkeypatch.setattr("gyre_data.writer.SEAL_BYTES", 3000)
        for number in range(4):
            writer.write(one_call(number))
        sealed = manifests.newest(path).sealed
        assert len(sealed["nodes"]) >= 1
        assert len(sealed["calls"]) == 3
        monkeypatch.setattr("gyre_data.writer.SEAL_AGE_S", 0.0)
        writer.write(one_call(4))
        assert gyre_data.open(path).table("calls").num_rows == 5
        assert len(manifests.newest(path).sealed["calls"]) == 4


# --- manifests -----------------------------------------------------------------------------------------------------


def publish_many(path: str, writer: str, count: int) -> None:
    for number in range(count):
        manifests.publish(Path(path), lambda base, n=number: base.opened("nodes", f"{writer}-{n}"), writer)


def test_manifests_of_racing_writers_are_all_kept(tmp_path):
    (tmp_path / "manifest").mkdir()
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=publish_many, args=(str(tmp_path), f"w{k}", 20)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert manifests.numbers(tmp_path) == list(range(1, 61))
    newest = manifests.newest(tmp_path)
    assert set(newest.open["nodes"]) == {f"w{k}-{n}" for k in range(3) for n in range(20)}
    assert not list((tmp_path / "manifest").glob(".*"))
    for number in range(2, 61):
        older, newer = (
            set(manifests.read(manifests.manifest_path(tmp_path, n)).open["nodes"]) for n in (number - 1, number)
        )
        assert older < newer


def test_manifest_flips_are_found(tmp_path):
    RunWriter(tmp_path).close()
    with RunWriter(tmp_path) as writer:
        writer.write(one_call(0))
    path = manifests.manifest_path(tmp_path, manifests.numbers(tmp_path)[-1])
    good = path.read_bytes()
    whole = json.loads(good)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        try:
            manifests.read(path)
        except CorruptError:
            continue
        assert json.loads(bad) == whole, f"flip at {at} changed the meaning and was not seen"


def test_a_higher_major_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("gyre_data.manifest.MAJOR", MAJOR + 1)
        RunWriter(tmp_path / "newer").close()
    with pytest.raises(SchemaError, match="upgrade gyre-rl"):
        gyre_data.open(tmp_path / "newer")
    with RunWriter(tmp_path / "segment") as writer, monkeypatch.context() as patched:
        patched.setattr("gyre_data.schema.MAJOR", MAJOR + 1)
        writer.write(one_call(0))
    with pytest.raises(SchemaError, match="upgrade gyre-rl"):
        gyre_data.open(tmp_path / "segment").table("nodes")


def put_segment(path: Path, table: str, schema: pa.Schema, batch: pa.RecordBatch) -> None:
    """Add a sealed segment as another release would have written it."""
    (path / table).mkdir(exist_ok=True)
    sealed = write_sealed(path / table / "other-000001.arrow", schema, [batch])
    manifests.publish(path, lambda base: base.closed(table, "other-000001", sealed), "other")


def test_an_older_file_reads_null_where_a_column_is_missing(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_call(0))
    table = gyre_data.open(path).table("nodes")
    older = table.drop_columns(["copy_of", "logprobs", "message_blobs"])
    put_segment(path, "nodes", older.schema, older.to_batches()[0])
    newer = table.append_column(pa.field("mood", pa.string()), pa.array(["calm", "calm"]))
    (path / "nodes" / "x").mkdir()
    run = gyre_data.open(path)
    assert run.table("nodes").schema == arrow_schema("nodes")
    assert run.table("nodes").num_rows == 4
    nodes = from_table("nodes", run.table("nodes"))
    assert nodes[3].logprobs is None
    assert nodes[3].token_ids.tolist() == nodes[1].token_ids.tolist()
    shutil.rmtree(path / "nodes" / "x")
    sealed = write_sealed(path / "nodes" / "newer-000001.arrow", newer.schema, newer.to_batches())
    manifests.publish(path, lambda base: base.closed("nodes", "newer-000001", sealed), "newer")
    assert gyre_data.open(path).table("nodes").num_rows == 6


def test_a_wrong_type_or_table_is_refused(tmp_path):
    path = tmp_path / "run"
    RunWriter(path).close()
    batch = pa.RecordBatch.from_arrays([pa.array([1])], schema=pa.schema([("node_id", pa.int64())]))
    put_segment(path, "nodes", batch.schema, batch)
    with pytest.raises(SchemaError, match=r"nodes\.node_id: wanted string, the file holds int64"):
        gyre_data.open(path).table("nodes")
    empty = arrow_schema("calls").empty_table()
    put_segment(
        path,
        "scores",
        empty.schema,
        pa.RecordBatch.from_arrays([c.combine_chunks() for c in empty.columns], schema=empty.schema),
    )
    with pytest.raises(SchemaError, match="wrong folder"):
        gyre_data.open(path).table("scores")


def test_a_segment_that_is_gone_is_named(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_call(0))
    gone = next((path / "nodes").glob("*.arrow"))
    gone.rename(tmp_path / "elsewhere")
    with pytest.raises(CorruptError, match=gone.name):
        gyre_data.open(path).table("nodes")
    monkeypatch.setattr("gyre_data.reader._RETRIES", 2)
    manifests.publish(path, lambda base: base.opened("calls", "w0-000999"), "w0")
    with pytest.raises(CorruptError, match=r"w0-000999.*it is gone"):
        gyre_data.open(path)


def test_the_newest_manifest_can_be_lost(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_call(0))
    held = {name: gyre_data.open(path).table(name).num_rows for name in TABLES}
    manifests.manifest_path(
        path, manifests.numbers(path)[-1]
    ).unlink()  # what it names sealed is open in the one before
    with RunWriter(path) as again:
        assert {(r.table, r.num_rows) for r in again.recovered} == {(t, n) for t, n in held.items() if n}
    assert {name: gyre_data.open(path).table(name).num_rows for name in TABLES} == held
    assert verify(path).problems == ()


def test_a_segment_that_vanished_is_not_called_intact(tmp_path, caplog):
    path = tmp_path / "run"
    RunWriter(path).close()
    (path / "calls").mkdir()
    manifests.publish(path, lambda base: base.opened("calls", "w0-000009"), "w0")
    with RunWriter(path) as again:
        (gone,) = again.recovered
    assert not gone.intact
    assert "all its files are gone" in caplog.text


def test_a_snapshot_holds_what_its_calls_rest_on(tmp_path, monkeypatch):
    """Between the manifest and the commit log of `calls`, a writer opens a segment of nodes and commits a call."""
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_call(0))
        writer._seal(["nodes"])
        real, late = manifests.newest, iter([one_call(1)])

        def newest(run):
            found = real(run)
            for rows in late:
                writer.write(rows)
            return found

        monkeypatch.setattr("gyre_data.reader.manifests.newest", newest)
        run = gyre_data.open(path)
        monkeypatch.undo()
        nodes = set(run.table("nodes").column("node_id").to_pylist())
        for call in from_table("calls", run.table("calls")):
            assert {call.prompt_node, call.output_node} <= nodes


@pytest.mark.parametrize("text", ["", "[1]", '"x"'])
def test_a_damaged_run_json_is_named(tmp_path, text):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        (path / "run.json").write_text(text)
        with pytest.raises(CorruptError, match=r"run\.json: wanted a JSON object"):
            _ = gyre_data.open(path).info
        with pytest.raises(CorruptError, match=r"run\.json: wanted a JSON object"):
            writer.update_info({"policy": "p"})


def test_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match="wanted a run folder"):
        gyre_data.open(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no none in {Path.cwd()}; see `gyre ls`"):
        gyre_data.open("none")
    with pytest.raises(ConfigError, match="record one first"):
        RunWriter(tmp_path / "none", create=False)
    with pytest.raises(ConfigError, match="becomes a file name"):
        RunWriter(tmp_path / "none", "../w0")


def test_find_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"record one with `gyre demo`"):
        find_run()
    for name, made in (("b", "2026-01-01"), ("a", "2026-01-03"), ("c", "2026-01-02")):
        with RunWriter(Path("runs") / name) as writer:
            writer.update_info({"created_at": made})
    with RunWriter(Path("runs") / "trained") as writer:  # a trainer's own folder looks like a run, and is none
        writer.update_info({"created_at": "2026-02-01"})
        writer.write([step_row()])
    assert find_run() == Path("runs/a")
    assert find_run("runs/c") == Path("runs/c")
    with pytest.raises(ConfigError, match="holds no manifest"):
        find_run("runs")
    with RunWriter(Path("gyre-demo")) as writer:  # what the demo and live training make lies where they were started
        writer.update_info({"created_at": "2026-01-04"})
    assert find_run() == Path("gyre-demo")
    assert find_run(root="runs") == Path("runs/a")
    assert [run.path for run in list_runs()] == ["runs/b", "runs/c", "runs/a", "gyre-demo"]
    assert [run.path for run in list_runs("runs")] == ["runs/b", "runs/c", "runs/a"]


def step_row() -> Step:
    return Step(
        step=1,
        policy_id="run",
        n=1,
        parent_policy_id="base",
        parent_n=0,
        num_executions=2,
        trained_tokens=10,
        at=START,
    )


# --- D01: more than 2^31 list elements -----------------------------------------------------------------------------


def test_d01_a_column_passes_two_to_the_31_elements(tmp_path):
    """A run that names one small segment 520 times: 2^31 tokens through reader and rows, in almost no memory."""
    path, num_tokens, times = tmp_path / "run", 1 << 22, 520
    with RunWriter(path) as writer:
        writer.write([prompt_node("n_0", "c_0", num_tokens=num_tokens)])

    def repeat(base):
        (sealed,) = base.sealed["nodes"]
        return replace(base, sealed={"nodes": (sealed,) * times})

    manifests.publish(path, repeat, "w0")
    before = pa.total_allocated_bytes()
    table = gyre_data.open(path).table("nodes")
    column = table.column("token_ids")
    assert pc.sum(pc.list_value_length(column)).as_py() == num_tokens * times > 2**31 - 1
    nodes = from_table("nodes", table)
    assert len(nodes) == times
    assert all(node.token_ids[-1] == num_tokens - 1 for node in nodes)
    assert pa.total_allocated_bytes() - before < 1 << 20
    # What the report ran into: the same chunks under 32-bit offsets cannot be joined, and ours are never joined at all.
    values = column.chunks[0].values
    narrow = pa.ListArray.from_arrays(pa.array([0, num_tokens], pa.int32()), values)
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        pa.chunked_array([narrow] * times).combine_chunks()


def test_d01_every_list_of_tokens_has_wide_offsets_and_nothing_joins_chunks():
    for table in TABLES.values():
        for column in table.columns:
            if pa.types.is_list(column.type):  # 32-bit offsets: short lists of names and spans only
                assert column.type.value_type in (pa.string(),) or pa.types.is_struct(column.type.value_type)
    root = Path(gyre_data.__file__).parent
    users = [p.name for p in root.rglob("*.py") if ".combine_chunks(" in p.read_text()]
    assert users == []


def test_d01_batches_stay_small(tmp_path):
    root = prompt_node("n_0", "c_0", num_tokens=900_000)
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write([root, *(output_node(f"n_{i}", "c_0", root, num_tokens=900_000) for i in range(1, 4))])
        assert [len(c) for c in gyre_data.open(path).table("nodes").column("node_id").chunks] == [1, 1, 1, 1]
    assert gyre_data.open(path).table("nodes").num_rows == 4


def test_light_import():
    code = "import sys, gyre_data; print([m for m in ('numpy', 'pyarrow', 'typer') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(gyre_data.__file__).parents[1],
    )
    assert found.stdout.strip() == "[]"


def test_errors_of_the_store_pickle():
    for error in (ConfigError("a"), CorruptError("b"), SchemaError("c")):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert Sealed(name="x", num_bytes=1, num_rows=1, crc32=1) == Sealed(name="x", num_bytes=1, num_rows=1, crc32=1)
