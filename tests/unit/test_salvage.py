"""Salvage: every commit whose bytes are good is kept, trees stay readable, no file is deleted; flips are noticed."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import gyre_data
from gyre_data import manifest as manifests
from gyre_data.commit_log import read_log
from gyre_data.compact import compact
from gyre_data.errors import AlignmentError, ConfigError, CorruptError, DataError
from gyre_data.main import app
from gyre_data.pins import tag
from gyre_data.removal import remove
from gyre_data.salvage import plan_salvage, salvage
from gyre_data.segment import read_sealed
from gyre_data.store import RunWriter
from gyre_data.types import RoutedExperts, TopLogprobs, VersionSpan
from gyre_data.verify import verify
from tests.support.rows import call_row, one_call, one_execution, output_node, prompt_node


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is on the disk after a power loss is the matter of tests/crash."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)


def made(path: Path, num_executions: int = 6, *, leave_open: bool = False) -> Path:
    """One commit an execution."""
    writer = RunWriter(path)
    for number in range(num_executions):
        writer.write(one_execution(f"e_{number}", 2))
    writer._release() if leave_open else writer.close()
    return path


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 8
    file.write_bytes(data)


def only(path: Path, table: str, suffix: str) -> Path:
    (file,) = (path / table).glob(f"*{suffix}")
    return file


def shown(path: Path, table: str = "calls") -> set[str]:
    return set(gyre_data.open(path).table(table).column("execution_id").to_pylist())


@pytest.mark.parametrize("leave_open", [False, True])
@pytest.mark.parametrize("commit", [0, 3, 5])
def test_all_but_the_damaged_commit_is_kept(tmp_path, leave_open, commit):
    path = made(tmp_path / "run", leave_open=leave_open)
    file = only(path, "nodes", ".open" if leave_open else ".arrow")
    records, _ = read_log(file.with_suffix(".commit" if leave_open else ".crc").read_bytes())
    flip(file, records[commit].end - 100)
    broken = file.read_bytes()
    assert [p.kind for p in verify(path).problems][:1] in (["corrupt"], ["tail"])
    lost = f"e_{commit}"
    plan = plan_salvage(path)
    assert [(b.table, b.name, b.num_good, b.left_alone) for b in plan.broken] == [("nodes", file.name, 20, False)]
    assert set(plan.calls_left_out) == {f"{lost}_c0", f"{lost}_c1"}
    assert (plan.executions, plan.manifest) == ((lost,), None)
    assert file.exists()
    done = salvage(path)
    assert replace(done, manifest=None) == plan
    assert shown(path, "nodes") == shown(path) == {f"e_{i}" for i in range(6)} - {lost}
    assert shown(path, "executions") == {f"e_{i}" for i in range(6)}  # it did run; only its calls are lost
    report = verify(path)
    assert report.problems == ()
    assert any("quarantine/ holds" in note for note in report.notes)
    assert (path / "quarantine" / "nodes" / file.name).read_bytes() == broken
    assert gyre_data.open(path)["e_4" if commit != 4 else "e_1"].main.token_ids.size
    assert salvage(path).broken == ()
    with RunWriter(path) as writer:
        writer.write(one_execution("e_9"))
    compact(path)
    assert (path / "quarantine" / "nodes" / file.name).read_bytes() == broken
    assert verify(path).problems == ()


def test_a_child_of_a_lost_node_is_left_out_with_all_that_rests_on_it(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        parent = None
        for number in range(5):
            rows = one_call(number, parent)
            parent = rows[1]
            writer.write(rows)
    file = only(path, "nodes", ".arrow")
    records, _ = read_log(file.with_suffix(".crc").read_bytes())
    flip(file, records[2].end - 60)
    done = salvage(path)
    assert set(done.calls_left_out) == {"e_1_c2", "e_1_c3", "e_1_c4"}
    assert done.nodes_left_out == 4
    assert len(gyre_data.open(path)["e_1"].tree.calls) == 2
    assert verify(path).problems == ()


def test_damage_of_the_footer_loses_nothing(tmp_path):
    path = made(tmp_path / "run")
    file = only(path, "calls", ".arrow")
    before = gyre_data.open(path).table("calls").to_pylist()
    file.write_bytes(file.read_bytes()[:-30])
    done = salvage(path)
    assert (done.broken[0].num_good, done.calls_left_out) == (12, ())
    assert gyre_data.open(path).table("calls").to_pylist() == before
    assert verify(path).problems == ()


def test_a_compacted_and_a_cold_file_are_saved_batch_by_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_data.rewrite.BATCH_BYTES", 4000)
    for cold in (False, True):
        path = made(tmp_path / f"run{cold}")
        compact(path, cold=cold)
        file = only(path, "nodes", ".arrow")
        records, _ = read_log(file.with_suffix(".crc").read_bytes())
        assert len(records) > 2
        flip(file, records[1].end - 50)
        done = salvage(path)
        assert done.broken[0].num_good == 24 - records[1].num_rows
        assert verify(path).problems == ()


def test_what_cannot_be_proved_is_left_alone_and_said(tmp_path):
    """A file sealed by an older release: one CRC for all of it."""
    path = made(tmp_path / "run")
    file = only(path, "nodes", ".arrow")
    file.with_suffix(".crc").unlink()
    flip(file, 4000)
    result = CliRunner().invoke(app, ["verify", str(path), "--salvage", "--yes"])
    assert result.exit_code == 1
    assert "nothing of it is known to be good; left alone; restore it from a copy" in " ".join(result.output.split())
    assert file.exists()
    assert not (path / "quarantine").exists()


def test_a_segment_that_is_gone_is_let_go(tmp_path):
    path = made(tmp_path / "run")
    only(path, "nodes", ".arrow").unlink()
    assert [p.kind for p in verify(path).problems] == ["missing"]
    done = salvage(path)
    assert len(done.calls_left_out) == 12
    assert verify(path).problems == ()
    assert gyre_data.open(path).table("calls").num_rows == 0


def test_a_file_that_a_tag_names_stays_for_it(tmp_path):
    path = made(tmp_path / "run")
    tag(path, "v1")
    file = only(path, "nodes", ".arrow")
    flip(file, 9500)
    salvage(path)
    assert [(p.kind, p.where) for p in verify(path).problems] == [("corrupt", f"tag v1: nodes/{file.name}")]
    assert (path / "quarantine" / "nodes" / file.name).exists()
    assert gyre_data.open(f"{path}@v1").table("calls").num_rows == 12


def test_damaged_records_are_not_trusted(tmp_path):
    """Of a damaged log the commit of the record and the one after it are not known to be good."""
    path = made(tmp_path / "run")
    file = only(path, "nodes", ".arrow")
    flip(file, 3000)
    flip(file.with_suffix(".crc"), 3 * 20 + 2)
    assert salvage(path).broken[0].num_good == 4 * 4 - 4 * (
        read_log(file.parent.parent.joinpath("quarantine", "nodes", file.with_suffix(".crc").name).read_bytes())[0][
            0
        ].end
        > 3000
    )
    assert verify(path).problems == ()


def test_the_command(tmp_path):
    path = made(tmp_path / "run")
    gyre = CliRunner()

    def run(*words):
        return gyre.invoke(app, list(words))

    assert isinstance(run("verify", str(path), "--yes").exception, ConfigError)
    clean = run("verify", str(path), "--salvage")
    assert (clean.exit_code, "nothing to save" in clean.output) == (0, True)
    flip(only(path, "nodes", ".arrow"), 3000)
    found = run("verify", str(path))
    assert (found.exit_code, f"gyre verify {path} --salvage" in found.output) == (1, True)
    plan = run("verify", str(path), "--salvage")
    assert plan.exit_code == 1
    assert "20 of 24 rows are good" in plan.output
    assert f"do it: gyre verify {path} --salvage --yes" in plan.output
    assert verify(path).exit_status == 1
    done = run("verify", str(path), "--salvage", "--yes", "--json")
    assert done.exit_code == 0
    assert json.loads(done.output)["manifest"] == manifests.newest(path).number
    assert run("verify", str(path)).exit_code == 0
    with RunWriter(path):
        refused = run("verify", str(path), "--salvage", "--yes")
        assert "is being written by pid" in str(refused.exception)


# --- every flip is noticed -----------------------------------------------------------------------------------------


def test_every_flip_of_every_byte_of_a_small_run_is_noticed(tmp_path):
    """Exhaustive over one small sealed segment and its manifest, one bit of each byte; sampled over the rest."""
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_call(0)[:2])
    (sealed,) = manifests.newest(path).sealed["nodes"]
    for at, bad in flips(only(path, "nodes", ".arrow").read_bytes()):
        with pytest.raises(CorruptError):
            read_sealed(pa.py_buffer(bad), sealed, f"flip at {at}", full=True)
    newest = manifests.manifest_path(path, manifests.numbers(path)[-1])
    text = newest.read_bytes()
    for at, bad in flips(text):
        try:
            manifests.parse(bad, newest)
        except DataError:
            continue
        assert json.loads(bad) == json.loads(text), at  # a blank for a blank


def flips(good: bytes) -> Iterator[tuple[int, bytes]]:
    """The bytes with one bit of each byte flipped in turn."""
    for at in range(len(good)):
        yield at, good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :]


@pytest.mark.parametrize("cold", [False, True])
def test_flips_in_compacted_files_are_found_by_verify(tmp_path, cold):
    path = made(tmp_path / "run", 2)
    compact(path, cold=cold)
    for file in sorted(path.rglob("*.arrow")):
        good = file.read_bytes()
        for at in range(11, len(good), max(1, len(good) // 5)):
            file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
            problems = verify(path).problems
            assert any(p.where == f"{file.parent.name}/{file.name}" for p in problems)
        file.write_bytes(good)
    assert verify(path).problems == ()


def test_a_flip_in_what_only_a_tag_names_is_found(tmp_path):
    path = made(tmp_path / "run", 2)
    tag(path, "v1")
    compact(path)
    (old,) = (path / "nodes").glob("w0-*.arrow")
    flip(old, 2000)
    assert [(p.kind, p.where) for p in verify(path).problems] == [("corrupt", f"tag v1: nodes/{old.name}")]
    assert verify(f"{path}@v1").exit_status == 1
    (path / "tags" / "v1.json").write_text("{")
    assert [(p.kind, p.where) for p in verify(path).problems] == [("manifest", "tags/v1.json")]
    with pytest.raises(CorruptError, match="remove the file and tag again"):
        compact(path)  # which files it needs cannot be known
    (path / "tags" / "v1.json").write_text('{"manifest": 99, "created_at": ""}')
    assert [(p.kind, p.where) for p in verify(path).problems] == [("manifest", "tags/v1.json")]
    with pytest.raises(CorruptError, match=r"it is gone; restore it .* or remove the tag"):
        compact(path, cold=True)


# --- the rules between rows ----------------------------------------------------------------------------------------


def found(path: Path, rows) -> list[tuple[str, str]]:
    shutil.rmtree(path, ignore_errors=True)
    with RunWriter(path) as writer:
        writer.write(rows)
    return [(str(p.kind), p.where) for p in verify(path).problems]


def test_versions_never_fall_within_a_reply(tmp_path):
    prompt = prompt_node("n_p", "c_1")
    spans = (VersionSpan(policy_id="run", n=5, start=0, end=2), VersionSpan(policy_id="run", n=4, start=2, end=4))
    output = output_node("n_o", "c_1", prompt, 4, policy_versions=spans)
    call = call_row("c_1", prompt, output)
    assert found(tmp_path / "run", [prompt, output, call]) == [("version", "nodes n_o")]
    taken_over = replace(call, attempts=call.attempts * 2)
    assert found(tmp_path / "run", [prompt, output, taken_over]) == []
    rising = replace(output, policy_versions=(replace(spans[0], n=3), spans[1]))
    assert found(tmp_path / "run", [prompt, rising, call]) == []


def test_usage_is_counted_once(tmp_path):
    def calls(**second):
        first = call_row("c_1", None, None, provider_usage='{"input_tokens": 3}', provider_request_id="req_1")
        return [first, replace(first, call_id="c_2", **second)]

    assert found(tmp_path / "run", calls()) == [("usage", "calls c_2")]
    assert found(tmp_path / "run", calls(provider_request_id="req_2")) == []
    assert found(tmp_path / "run", calls(provider_usage=None)) == []
    assert found(tmp_path / "run", calls(provider_request_id=None, provider_usage="[]")) == [("usage", "calls c_2")]
    prompt, output, call = one_call(0)
    assert found(tmp_path / "run", [prompt, output, replace(call, cached_tokens=4)]) == [
        ("usage", f"calls {call.call_id}")
    ]
    assert found(tmp_path / "run", [prompt, output, replace(call, cached_tokens=3)]) == []


def test_side_tables_are_as_long_as_their_nodes(tmp_path):
    prompt, output, call = one_call(3)
    top = TopLogprobs(node_id=output.node_id, k=1, token_ids=output.token_ids, logprobs=output.logprobs)
    assert found(tmp_path / "run", [prompt, output, call, top]) == []
    assert found(tmp_path / "run", [prompt, output, call, replace(top, k=2)]) == [
        ("alignment", f"top_logprobs {output.node_id}"),
        ("alignment", f"top_logprobs {output.node_id}"),
    ]
    stray = replace(top, node_id="gone")
    assert found(tmp_path / "run", [prompt, output, call, stray]) == [("orphan", "top_logprobs gone")]
    experts = RoutedExperts(
        node_id=output.node_id, call_id=call.call_id, num_layers=1, top_k=2, experts=output.token_ids.astype("int16")
    )
    assert len(output.token_ids) == 4
    assert found(tmp_path / "run", [prompt, output, call, experts]) == []
    assert found(tmp_path / "run", [prompt, output, call, replace(experts, start=3)]) == [
        ("alignment", f"routed_experts {output.node_id}")
    ]


@pytest.mark.parametrize("spans", [[(0, 0), (0, 4)], [(0, 4), (4, 4)], [(0, 2), (3, 4)], [(0, 3)], []])
def test_writer_and_verify_agree_on_version_spans(tmp_path, spans):
    """An empty span says nothing of any token: the writer refuses it as verify would complain of it."""
    prompt = prompt_node("n_p", "c_1")
    made_spans = tuple(VersionSpan(policy_id="run", n=i, start=a, end=b) for i, (a, b) in enumerate(spans))
    output = output_node("n_o", "c_1", prompt, 4, policy_versions=made_spans)
    with RunWriter(tmp_path / "run") as writer, pytest.raises(AlignmentError, match=r"spans that cover 0\.\.4 exactly"):
        writer.write([prompt, output, call_row("c_1", prompt, output)])
    empty = output_node("n_e", "c_1", prompt, 0, policy_versions=(VersionSpan(policy_id="run", n=0, start=0, end=0),))
    with RunWriter(tmp_path / "run") as writer, pytest.raises(AlignmentError):
        writer.write([prompt, empty, call_row("c_1", prompt, empty)])


def test_removed_executions_are_no_fault(tmp_path):
    path = made(tmp_path / "run", 3)
    remove(path, ["e_1"])
    report = verify(path)
    assert report.problems == ()
    assert any("removed executions: 1" in note for note in report.notes)
    assert report.num_rows["calls"] == 4
