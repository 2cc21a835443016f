"""Compaction: same rows, other files; depth first; cold reads as warm; old files go when nobody needs them."""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import gyre_data
from gyre_data import folder_commands
from gyre_data import manifest as manifests
from gyre_data.admission import admit
from gyre_data.arrays import from_table, list_views
from gyre_data.compact import compact, plan_compaction
from gyre_data.errors import ConfigError, CorruptError, SchemaError
from gyre_data.pins import delete_tag, lease, tag
from gyre_data.rewrite import codec_of
from gyre_data.schema import TABLES, DeliveryState
from gyre_data.store import RunWriter
from gyre_data.types import Delivery
from gyre_data.verify import verify
from tests.support.rows import START, call_row, one_execution, output_node, prompt_node


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is on the disk after a power loss is the matter of tests/crash."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)


def forked(execution_id: str) -> list:
    """A scored execution of five calls with a fork after the first, its rows in the order of the calls."""
    start, *_, end, score = one_execution(execution_id, 1, score=len(execution_id) + int(execution_id[-1]))
    rows: list = [start]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    root = prompt_node(f"{execution_id}_root", f"{execution_id}_c0", execution_id=execution_id)
    first = output_node(f"{execution_id}_o0", f"{execution_id}_c0", root)
    rows += [root, first, call_row(f"{execution_id}_c0", root, first, execution_id, **sampling)]
    ends = [first, first]
    for number in range(1, 5):
        call_id = f"{execution_id}_c{number}"
        prompt = prompt_node(f"{execution_id}_p{number}", call_id, ends[number % 2])
        output = output_node(f"{execution_id}_o{number}", call_id, prompt)
        ends[number % 2] = output
        rows += [prompt, output, call_row(call_id, prompt, output, execution_id, **sampling)]
        rows.append(Delivery(call_id=call_id, execution_id=execution_id, state=DeliveryState.DELIVERED, at=START))
    return [*rows, end, score]


def interleaved(path: Path, num_executions: int = 4, *, seal_every: int = 5) -> Path:
    """A run whose executions were written call by call in turns, in several segments."""
    commits = []
    for number in range(num_executions):
        rows = one_execution(f"e_{number}", 3) if number % 2 else forked(f"e_{number}")
        commits += [(i, rows[i : i + 3]) for i in range(0, len(rows), 3)]
    commits.sort(key=lambda pair: pair[0])
    with RunWriter(path) as writer:
        for number, (_, rows) in enumerate(commits):
            writer.append(rows)
            writer.put_blob(b"text %d " % number * 40)
            writer.commit()
            if number % seal_every == seal_every - 1:
                writer.seal()
    return path


def content(path: Path) -> dict[str, list]:
    """All rows of a run by table, in an order of their own; tokens as bytes."""
    run = gyre_data.open(path)
    return {name: sorted(map(repr, run.table(name).to_pylist())) for name in TABLES if run.table(name).num_rows}


def files(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*.arrow"))


@pytest.mark.parametrize("cold", [False, True])
def test_the_same_rows_in_few_files(tmp_path, cold):
    path = interleaved(tmp_path / "run")
    before, old, number = content(path), files(path), manifests.newest(path).number
    plan = plan_compaction(path, cold=cold)
    assert plan.manifest is None
    assert {t.table: (t.num_files, t.num_rows) for t in plan.tables}["nodes"][0] > 3
    done = compact(path, cold=cold)
    assert done.manifest == number + 1
    assert content(path) == before
    assert verify(path).problems == ()
    assert files(path) == sorted(f"{t}/{s.name}" for t, many in manifests.newest(path).sealed.items() for s in many)
    assert not set(files(path)) & set(old)
    assert all(len(many) == 1 for many in manifests.newest(path).sealed.values())
    assert {t.table: (t.num_files, t.num_rows) for t in done.tables} == {
        t.table: (t.num_files, t.num_rows) for t in plan.tables
    }
    assert {codec_of(path / name) for name in files(path)} == {"zstd" if cold else None}
    # A second time there is nothing to do, and no manifest is made.
    assert compact(path, cold=cold).tables == ()
    assert manifests.newest(path).number == number + 1


def test_cold_and_back(tmp_path):
    path = interleaved(tmp_path / "run")
    before = content(path)
    compact(path, cold=True)
    assert content(path) == before
    compact(path)
    assert content(path) == before
    assert {codec_of(path / name) for name in files(path)} == {None}


def test_nodes_stand_depth_first(tmp_path):
    path = interleaved(tmp_path / "run")
    executions = gyre_data.open(path).table("calls").column("execution_id").unique().to_pylist()
    wanted = [node_id for execution in executions for node_id in gyre_data.open(path)[execution].tree.node_id]
    assert gyre_data.open(path).table("nodes").column("node_id").to_pylist() != wanted
    compact(path)
    run = gyre_data.open(path)
    assert run.table("nodes").column("node_id").to_pylist() == wanted
    calls = run.table("calls").column("execution_id").to_pylist()
    assert calls == sorted(calls, key=executions.index)


def test_admission_is_the_same_before_and_after(tmp_path):
    """What training consumes is kept by execution, so compaction changes nothing: ids and log-probs bit for bit."""
    path = interleaved(tmp_path / "run", 6)

    def admitted():
        adm = admit(gyre_data.open(path))
        return [
            (
                e.execution_id,
                e.reward,
                e.advantage,
                [[e.tree.node_id[i] for i in t.owned] for t in e.trajectories],
                [e.tree.path_ids(t.leaf).tobytes() for t in e.trajectories],
                [e.tree.logprobs(i).tobytes() for t in e.trajectories for i in t.owned],
            )
            for e in adm.executions
        ]

    before = admitted()
    assert [len(e[3]) for e in before] == [2, 2, 2]
    assert len({e[2] for e in before}) == 3
    compact(path, cold=True)
    assert admitted() == before
    compact(path)
    assert admitted() == before


def test_an_open_reader_keeps_what_it_has(tmp_path):
    path = interleaved(tmp_path / "run")
    reader = gyre_data.open(path)
    views = [view.copy() for view in list_views(gyre_data.open(path).table("nodes").column("token_ids"))]
    compact(path)
    compact(path, cold=True)
    # Only now does the old reader touch the table: its files are gone, its maps are not.
    for old, view in zip(views, list_views(reader.table("nodes").column("token_ids")), strict=True):
        assert np.array_equal(old, view)
    assert reader.refresh()
    assert reader.table("nodes").num_rows == len(views)
    assert not reader.refresh()


def test_files_of_tags_and_leases_stay(tmp_path):
    path = interleaved(tmp_path / "run")
    number, old = manifests.newest(path).number, files(path)
    tag(path, "v1")
    compact(path)
    assert set(old) < set(files(path))
    delete_tag(path, "v1")
    with lease(path, number):
        assert plan_compaction(path).stale_bytes == 0
        compact(path)
        assert set(old) < set(files(path))
    stale = plan_compaction(path).stale_bytes
    assert stale > 0
    assert compact(path).stale_bytes == stale
    assert not set(old) & set(files(path))


def test_a_run_goes_on_after_compaction_and_no_name_comes_back(tmp_path):
    path = interleaved(tmp_path / "run")
    old = set(files(path))
    compact(path)
    with RunWriter(path) as writer:
        writer.write(one_execution("e_9"))
    before = content(path)
    fresh = set(files(path))
    assert not fresh & old
    compact(path)
    assert {name for name in files(path) if name in fresh} == {name for name in fresh if name.startswith("blobs/")}
    assert content(path) == before
    assert verify(path).problems == ()


def test_what_a_crash_left_open_is_recovered_first(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path)
    writer.write(one_execution("e_1"))
    writer._release()
    before = content(path)
    compact(path)
    assert content(path) == before
    assert manifests.newest(path).open == {}


def test_a_run_that_is_written_is_refused(tmp_path):
    with RunWriter(tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"is being written by pid \d+; use that one or another run"):
            compact(tmp_path / "run")
        with pytest.raises(ConfigError, match="changes of a folder use it"):
            RunWriter(tmp_path / "other", writer="compact")
    with pytest.raises(ConfigError, match="holds no manifest"):
        compact(tmp_path)


def test_large_tables_become_several_files_of_bounded_batches(tmp_path, monkeypatch):
    path = interleaved(tmp_path / "run", 12)
    before = content(path)
    monkeypatch.setattr("gyre_data.rewrite.BATCH_BYTES", 3000)
    monkeypatch.setattr("gyre_data.rewrite.FILE_BYTES", 20_000)
    compact(path)
    assert content(path) == before
    nodes = gyre_data.open(path).table("nodes")
    assert len(manifests.newest(path).sealed["nodes"]) > 1
    assert max(len(chunk) for chunk in nodes.column("node_id").chunks) <= 6
    assert verify(path).problems == ()


def test_large_files_of_an_earlier_compaction_stay_unless_an_execution_goes_on(tmp_path, monkeypatch):
    path = interleaved(tmp_path / "run", 12)
    monkeypatch.setattr("gyre_data.rewrite.BATCH_BYTES", 3000)
    monkeypatch.setattr("gyre_data.rewrite.FILE_BYTES", 9000)
    compact(path)
    first = [one.name for one in manifests.newest(path).sealed["nodes"]]
    assert len(first) > 3
    with RunWriter(path) as writer:
        writer.write(one_execution("e_new"))
    before = content(path)
    plan = {one.table: one for one in plan_compaction(path).tables}["nodes"]
    compact(path)
    second = [one.name for one in manifests.newest(path).sealed["nodes"]]
    assert second[: len(first) - 1] == first[:-1]
    assert plan.num_files == 2 < len(first)
    assert content(path) == before
    # The execution in the second file goes on: that file and all after it are written anew.
    held = gyre_data.open(path).parts("nodes")[1][1].column("execution_id")[0].as_py()
    parent = from_table("nodes", gyre_data.open(path).table("nodes").filter(pc.field("node_id") == f"{held}_o0"))[0]
    prompt = prompt_node("more_p", "more_c", parent)
    output = output_node("more_o", "more_c", prompt)
    with RunWriter(path) as writer:
        writer.write([prompt, output, call_row("more_c", prompt, output, held)])
    before = content(path)
    compact(path)
    third = [one.name for one in manifests.newest(path).sealed["nodes"]]
    assert not set(third[1:]) & set(second)
    assert content(path) == before
    column = gyre_data.open(path).table("nodes").column("execution_id").to_pylist()
    assert len([a for a, b in itertools.pairwise(column) if a != b]) == len(set(column)) - 1
    assert verify(path).problems == ()


def test_nulls_and_empty_lists_survive_any_order(tmp_path):
    """Rows picked from many batches in any order are the rows: nulls, empty lists, spans and log-probs too."""
    from gyre_data.rewrite import gathered

    path = interleaved(tmp_path / "run")
    table = gyre_data.open(path).table("nodes")
    order = np.array(random.Random(0).sample(range(table.num_rows), table.num_rows))
    rows = table.to_pylist()
    got = pa.Table.from_batches(gathered(table, order), table.schema).to_pylist()
    assert got == [rows[i] for i in order]
    assert len(from_table("nodes", table)) == len(rows)


def test_what_a_newer_release_wrote_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("gyre_data.schema.MINOR", 99)
        interleaved(path)
    with pytest.raises(SchemaError, match="upgrade gyre-rl to change this folder"):
        compact(path)


@pytest.mark.parametrize("table", ["nodes", "blobs"])
def test_damage_is_not_given_a_fresh_checksum(tmp_path, table):
    path = interleaved(tmp_path / "run")
    (first, *_) = (path / table).glob("*.arrow")
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    old, number = files(path), manifests.newest(path).number
    with pytest.raises(CorruptError, match=f"{first.name}: wanted CRC-32"):
        compact(path)
    assert (files(path), manifests.newest(path).number) == (old, number)


def test_the_command_shows_a_plan_and_does_it_with_yes(tmp_path, capsys):
    path = interleaved(tmp_path / "run")
    before, number = content(path), manifests.newest(path).number
    folder_commands.compact(path)
    text = capsys.readouterr().out
    assert "would rewrite 6 tables" in text
    assert f"do it: gyre compact {path} --yes" in text
    assert manifests.newest(path).number == number
    folder_commands.compact(path, cold=True, yes=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["manifest"] == number + 1
    folder_commands.compact(path, cold=True, yes=True)
    assert "compact and compressed already; nothing to do" in capsys.readouterr().out
    assert content(path) == before
