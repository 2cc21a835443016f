"""Damage that is no flipped byte: files swapped, lost, of another kind or from elsewhere are told, never obeyed."""

import json
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

import gyre_data
from gyre_data import manifest as manifests
from gyre_data.compact import compact
from gyre_data.errors import ConfigError, CorruptError
from gyre_data.main import run as entry
from gyre_data.object_store import RemoteRun
from gyre_data.pins import delete_tag, find_tag, tag, tags
from gyre_data.recovery import lost_manifest
from gyre_data.removal import remove
from gyre_data.salvage import plan_salvage, salvage
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter
from gyre_data.verify import verify
from tests.support.command import out
from tests.support.rows import one_execution


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk after a power loss is the matter of tests/crash."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)


def made(path: Path, *names: str) -> Path:
    with RunWriter(path) as writer:
        for name in names or ("e_0", "e_1"):
            writer.write(one_execution(name, 2))
            writer.seal()
    return path


def found(path: Path) -> list[tuple[str, str]]:
    return [(str(p.kind), p.where) for p in verify(path).problems]


def files(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# --- run.json --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ['{"read_only": true,', "", '{"read_only": "no"}'])
def test_a_damaged_run_json_is_a_fault_and_nobody_writes_on(tmp_path: Path, text: str) -> None:
    """Whether the run is read-only is not known then; an empty object in its place would say that it is not."""
    run = made(tmp_path / "run")
    (run / "run.json").write_text(text)
    before = files(run)
    assert found(run) == [("info", "run.json")]
    for change in (
        lambda: tag(run, "v1"),
        lambda: remove(run, ["e_1"]),
        lambda: compact(run),
        lambda: gyre_data.open(run).score("e_0", 1.0, evaluator="x"),
    ):
        with pytest.raises(CorruptError, match=r"run\.json: wanted .*mend or remove it"):
            change()
    assert {name: data for name, data in files(run).items() if name != "lock"} == {
        name: data for name, data in before.items() if name != "lock"
    }
    (run / "run.json").unlink()
    assert tag(run, "v1").manifest
    assert found(run) == []


# --- tags ------------------------------------------------------------------------------------------------------------


def test_tags_that_changed_places_are_not_obeyed(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    tag(run, "v1")
    remove(run, ["e_1"])
    tag(run, "v2")
    one, two = (run / "tags" / f"{name}.json" for name in ("v1", "v2"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert found(run) == [("manifest", "tags/v1.json"), ("manifest", "tags/v2.json")]
    with pytest.raises(CorruptError, match="wanted the tag v1, got a tag 'v2'"):
        gyre_data.open(f"{run}@v1")
    one.write_bytes(first)
    two.write_bytes(second)
    assert found(run) == []


@pytest.mark.parametrize("number", [0, -1, True, "4", 4.0, None, 10**30])
def test_a_tag_names_a_manifest_by_its_number(tmp_path: Path, number: object) -> None:
    run = made(tmp_path / "run")
    tag(run, "v1")
    file = run / "tags" / "v1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "manifest": number}))
    assert found(run) == [("manifest", "tags/v1.json")]
    with pytest.raises(CorruptError, match="restore it"):
        gyre_data.open(f"{run}@v1")


def test_a_tag_of_a_number_that_means_something_else_now(tmp_path: Path) -> None:
    """The manifest of a tag is lost, and what is recorded next takes its number: the tag must not name that."""
    run = made(tmp_path / "run")
    before = remove(run, ["e_1"]).manifest
    tag(run, "v1")
    lost = manifests.manifest_path(run, before or 0)
    lost.unlink()
    assert found(run) == [("manifest", "tags/v1.json")]
    with pytest.raises(CorruptError, match="it is gone; restore it"):
        gyre_data.open(f"{run}@v1")
    with RunWriter(run) as writer:
        writer.write(one_execution("e_2"))
    assert lost.exists()
    assert found(run) == [("manifest", "tags/v1.json")]
    for way in (lambda: gyre_data.open(f"{run}@v1"), lambda: tags(run), lambda: compact(run)):
        with pytest.raises(CorruptError, match="got another of that number"):
            way()
    with pytest.raises(CorruptError, match="got another of that number"):
        RemoteRun(f"file://{run}@v1")
    assert delete_tag(run, "v1").manifest == before
    compact(run)


def test_a_tag_from_before_tags_kept_a_checksum(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    tag(run, "v1")
    file = run / "tags" / "v1.json"
    old = json.loads(file.read_text())
    del old["sha256"]
    file.write_text(json.dumps(old))
    assert find_tag(run, "v1").sha256 is None
    assert found(run) == []


@pytest.mark.parametrize("name", ["../run", "../manifest/00000001", "a/b", "", ".x"])
def test_no_tag_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    run = made(tmp_path / "run")
    before = files(run)
    for way in (find_tag, delete_tag, tag):
        with pytest.raises(ConfigError, match="it becomes a file name"):
            way(run, name)
    assert files(run).keys() == before.keys()


# --- manifests -------------------------------------------------------------------------------------------------------


def republished(run: Path, change: object) -> None:
    """The newest manifest changed by hand, with a right checksum."""
    path = manifests.manifest_path(run, manifests.numbers(run)[-1])
    document = json.loads(path.read_text())
    change(document)  # type: ignore[operator]
    document["sha256"] = manifests._checksum(document)
    path.write_text(json.dumps(document))


def test_no_name_in_a_manifest_leads_out_of_the_folder(tmp_path: Path) -> None:
    """A run may come from anybody, and salvage moves the files that a manifest names."""
    run = made(tmp_path / "run")
    for table, entry_of in (
        ("nodes", lambda held: held["sealed"][0].update(name="../../w0-000001.arrow")),
        ("calls", lambda held: held["open"].append("../x-1")),
    ):
        shutil.copytree(run, tmp_path / table)
        republished(tmp_path / table, lambda doc, table=table, one=entry_of: one(doc["tables"][table]))
        with pytest.raises(CorruptError, match="wanted names of segments"):
            gyre_data.open(tmp_path / table)
    republished(run, lambda doc: doc["tables"].update({"../nodes": doc["tables"]["nodes"]}))
    with pytest.raises(CorruptError, match="wanted names of segments"):
        gyre_data.open(run)


@pytest.mark.parametrize(
    "change",
    [
        lambda doc: doc.pop("tables"),
        lambda doc: doc.pop("major"),
        lambda doc: doc.update(major="1"),
        lambda doc: doc["tables"]["nodes"]["sealed"][0].pop("crc32"),
        lambda doc: doc["tables"]["nodes"].update(sealed=[7]),
        lambda doc: doc["tables"].update(nodes=[]),
    ],
)
def test_a_manifest_of_another_shape_is_damage(tmp_path: Path, change: object) -> None:
    run = made(tmp_path / "run")
    republished(run, change)
    with pytest.raises(CorruptError, match="wanted the fields of a manifest"):
        gyre_data.open(run)


def test_what_a_later_release_adds_to_a_manifest_is_passed_over(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    republished(run, lambda doc: doc["tables"]["nodes"]["sealed"][0].update(level=3))
    assert len(gyre_data.open(run)) == 2
    assert found(run) == []


def test_files_beside_the_manifests_are_no_manifests(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    newest = manifests.numbers(run)[-1]
    for name in ("9.json", "²²²²²²²².json", "00000099 (copy).json", "00000099.json.swp", "٠٠٠٠٠٠٩٩.json"):
        (run / "manifest" / name).write_text("{}")
    assert manifests.numbers(run)[-1] == newest
    assert found(run) == []
    assert gyre_data.open(run).manifest_number == newest


def last_numbers(run: Path, count: int) -> list[Path]:
    return [manifests.manifest_path(run, number) for number in manifests.numbers(run)[-count:]]


def rows(run: Path) -> dict[str, int]:
    opened = gyre_data.open(run)
    return {name: opened.table(name).num_rows for name in TABLES if opened.table(name).num_rows}


@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_manifest_of_a_recorder_is_told_and_its_segments_are_taken_in(tmp_path: Path, count: int) -> None:
    """With the last two lost, the one before never heard of the segments: they were hidden, and cleared away later."""
    run = made(tmp_path / "run")
    held = rows(run)
    with RunWriter(run) as writer:
        writer.write(one_execution("e_9"))
    with_it = rows(run)
    assert lost_manifest(run) is None
    for path in last_numbers(run, count):
        path.unlink()
    assert ("manifest", "manifest") in found(run)
    assert "a newer one is lost" in (lost_manifest(run) or "")
    with pytest.raises(CorruptError, match="next writer of this folder takes in"):
        plan_salvage(run)
    if count == 2:
        assert rows(run) == held
    compact(run)
    assert rows(run) == with_it
    assert found(run) == []


def test_a_lost_manifest_of_a_compaction_is_told_and_nothing_is_given_up(tmp_path: Path) -> None:
    """The files that the one before names are gone, but nothing is lost as long as nobody salvages."""
    run = made(tmp_path / "run")
    held = rows(run)
    compact(run)
    before = files(run)
    (lost,) = last_numbers(run, 1)
    whole = lost.read_bytes()
    lost.unlink()
    assert ("manifest", "manifest") in found(run)
    for way in (plan_salvage, salvage):
        with pytest.raises(
            CorruptError, match="a newer one is lost; restore it from a copy: what these replaced is gone"
        ):
            way(run)
    for way in (compact, lambda run: remove(run, ["e_1"], purge=True)):
        with pytest.raises((CorruptError, OSError)):
            way(run)
    lost.write_bytes(whole)
    assert rows(run) == held
    assert {name for name in files(run) if name.endswith(".arrow")} == {n for n in before if n.endswith(".arrow")}
    assert found(run) == []


def test_a_crash_of_recovery_is_no_lost_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write(one_execution())
    writer._release()
    monkeypatch.setattr(manifests, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        RunWriter(tmp_path / "run")
    assert list((tmp_path / "run" / "nodes").glob("*.crc"))
    assert lost_manifest(tmp_path / "run") is None


# --- wrong bytes are not handed on -----------------------------------------------------------------------------------


def flip_value(run: Path, table: str, value: bytes) -> None:
    """One bit of a value, so that the file is as good Arrow as before."""
    (file,) = (run / table).glob("*.arrow")
    data = bytearray(file.read_bytes())
    data[data.index(value)] ^= 1
    file.write_bytes(data)


def test_a_changed_verdict_is_not_believed(tmp_path: Path) -> None:
    """Of all tables but the large ones every byte is checked before a row is shown."""
    run = made(tmp_path / "run", "e_0")
    flip_value(run, "scores", struct.pack("<d", 0.5))
    for way in (gyre_data.list_executions, gyre_data.stats, gyre_data.admit):
        with pytest.raises(CorruptError, match="bytes changed after sealing"):
            way(gyre_data.open(run))


@pytest.mark.parametrize("out", ["copy", "chat.jsonl", "rows.parquet"])
def test_changed_tokens_get_no_fresh_checksum(tmp_path: Path, out: str) -> None:
    """Reading does not touch every token, but nothing that was changed is written elsewhere as if it were recorded."""
    run = made(tmp_path / "run", "e_0")
    flip_value(run, "nodes", struct.pack("<4i", 3, 4, 5, 6))
    assert found(run)[0][0] == "corrupt"
    with pytest.raises(CorruptError, match="bytes changed after sealing"):
        gyre_data.export(gyre_data.open(run), tmp_path / "out" / out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("put", [lambda log: log.write_bytes(log.read_bytes()[:-3]), lambda log: put_folder(log)])
def test_a_damaged_log_of_a_whole_segment_is_noted(tmp_path: Path, put: object) -> None:
    run = made(tmp_path / "run", "e_0")
    (log,) = (run / "nodes").glob("*.crc")
    put(log)  # type: ignore[operator]
    assert found(run) == []
    (note,) = verify(run).notes
    assert note.startswith(f"nodes/{log.name} is damaged")


# --- files of another kind -------------------------------------------------------------------------------------------


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def put_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("put", [put_folder, put_loop])
@pytest.mark.parametrize("name", ["nodes/*.arrow", "manifest/*", "run.json", "tags/v1.json"])
def test_something_else_in_the_place_of_a_file(
    tmp_path: Path, put: object, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run")
    tag(run, "v1")
    victim = max(run.glob(name))
    put(victim)  # type: ignore[operator]
    where = str(victim.relative_to(run))
    assert where in [place for _, place in found(run)]
    words = ["ls", f"{run}@v1"] if name.startswith("tags") else ["tag", str(run), "v2"]
    if name.startswith("nodes"):
        words = ["tree", str(run)]
    monkeypatch.setattr("sys.argv", ["gyre", *words])
    with pytest.raises(SystemExit) as left:
        entry()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("gyre: wanted to use ") or "names this segment, but it cannot be read" in told
    assert str(victim) in told
    assert told.count("\n") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
def test_a_run_that_one_may_not_read(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    assert "e_0" in out("ls", run)  # loads what the child may not be able to load
    tmp_path.chmod(0o711)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        code = 99
        try:
            sys.argv = ["gyre", "ls", str(run)]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            entry()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 98
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_folder_that_is_removed_meanwhile_is_said(tmp_path: Path) -> None:
    run = gyre_data.open(made(tmp_path / "run"))
    rows = run.table("calls").num_rows
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="found no manifest"):
        run.refresh()
    assert run.table("nodes").num_rows == 2 * rows


def test_no_link_in_a_folder_leads_a_writer_out_of_it(tmp_path: Path) -> None:
    """Who hands a folder over may have put links into it: what they name is neither emptied nor removed."""
    run, mine = made(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("keep")
    (tmp_path / "home" / "e_1").mkdir(parents=True)
    (run / "workspaces").symlink_to(tmp_path / "home")
    for place in ("nodes/.compact-000001.arrow.tmp", "nodes/.compact-000001.crc.tmp", "lock"):
        (run / place).unlink(missing_ok=True)
        (run / place).symlink_to(mine)
        with pytest.raises(OSError, match="symbolic links"):
            compact(run)
        (run / place).unlink()
    remove(run, ["e_1"], purge=True)
    assert mine.read_text() == "keep"
    assert (tmp_path / "home" / "e_1").is_dir()
    assert found(run) == []


def test_halves_that_a_killed_process_was_writing_are_told_and_cleared(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    compact(run)
    tag(run, "v1")
    before = set(files(run))
    for place in (".run-0123.tmp", "manifest/.w0-0123.tmp", "tags/.0123.tmp", "nodes/.compact-000099.arrow.tmp"):
        (run / place).write_text("half")
    assert found(run) == []
    assert any(note.startswith("4 files are named by nothing any more") for note in verify(run).notes)
    assert compact(run).stale_bytes == 16
    assert set(files(run)) == before
