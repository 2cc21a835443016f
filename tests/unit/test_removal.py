"""`gyre rm`: nobody shows a removed execution; after a purge its bytes are nowhere in the folder. Tags pin versions."""

import json
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gyre_data
from gyre_data import folder_commands
from gyre_data import manifest as manifests
from gyre_data.compact import compact
from gyre_data.errors import ConfigError, CorruptError, DataError, SchemaError
from gyre_data.pins import delete_tag, lease, tag, tags
from gyre_data.removal import plan_removal, remove
from gyre_data.schema import TABLES
from gyre_data.store import RunWriter, find_run
from gyre_data.types import RoutedExperts, TopLogprobs
from gyre_data.verify import verify
from tests.support.rows import one_execution

MARKER = b"the secret of the third house "
SECRET_IDS = np.array([70_001, 70_002, 70_003, 70_004], np.int32)


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch):
    """What is on the disk after a power loss is the matter of tests/crash."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)


def made(path: Path, executions: tuple[str, ...] = ("e_1", "e_2", "e_3")) -> Path:
    """Executions written in turns. Those of e_2 hold a marker text and token ids of their own."""
    with RunWriter(path) as writer:
        shared = writer.put_blob(b"a system prompt that all share " * 8)
        rows = {name: one_execution(name, 2) for name in executions}
        for number in range(max(map(len, rows.values()))):
            for name, mine in rows.items():
                for row in mine[number : number + 1]:
                    writer.append(_marked(writer, name, row, shared))
            writer.commit()
            if number == 4:
                writer.seal()
    (path / "workspaces" / "e_2").mkdir(parents=True)
    (path / "workspaces" / "e_2" / "notes.txt").write_bytes(MARKER)
    (path / "quarantine" / "nodes").mkdir(parents=True)
    (path / "quarantine" / "nodes" / "w0-000099.open").write_bytes(MARKER + SECRET_IDS.tobytes())
    return path


def _marked(writer, name, row, shared):
    if type(row).__name__ == "Call":
        body = writer.put_blob(MARKER if name == "e_2" else b"plain words of %s" % name.encode())
        return [replace(row, request_blobs=(shared, body), error=MARKER.decode() if name == "e_2" else None)]
    if type(row).__name__ != "Node" or row.logprobs is None:
        return [row]
    top = TopLogprobs(node_id=row.node_id, k=1, token_ids=row.token_ids, logprobs=row.logprobs)
    if name != "e_2":
        return [row, top]
    ids, logprobs = SECRET_IDS[: len(row.token_ids)], np.float32([-0.5] * len(row.token_ids))
    experts = RoutedExperts(
        node_id=row.node_id, call_id=row.call_id, num_layers=1, top_k=1, experts=np.zeros(len(ids), np.int16)
    )
    return [replace(row, token_ids=ids, logprobs=logprobs), replace(top, token_ids=ids, logprobs=logprobs), experts]


def found(path: Path, *needles: bytes) -> list[str]:
    """Files of the folder that hold one of the byte strings."""
    return sorted(
        str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and any(n in p.read_bytes() for n in needles)
    )


def shown(run: gyre_data.Run) -> set[str]:
    """Executions of which any table shows a row."""
    return {
        row["execution_id"]
        for name in TABLES
        for row in run.table(name).to_pylist()
        if row.get("execution_id") is not None
    }


NEEDLES = (MARKER, SECRET_IDS[:1].tobytes() + SECRET_IDS[1:2].tobytes(), SECRET_IDS[:1].tobytes())


def test_a_removed_execution_is_shown_by_nobody_and_its_bytes_stay(tmp_path):
    path = made(tmp_path / "run")
    before = gyre_data.open(path)
    plan = plan_removal(path, ["2"])
    assert (plan.executions, plan.num_calls, plan.num_nodes, plan.num_scores) == (("e_2",), 2, 4, 1)
    done = remove(path, ["2"])
    assert done == replace(plan, manifest=done.manifest)
    run = gyre_data.open(path)
    assert shown(run) == {"e_1", "e_3"}
    assert not [r for r in run.table("top_logprobs").to_pylist() if r["node_id"].startswith("e_2")]
    assert run.table("routed_experts").num_rows == 0
    with pytest.raises(DataError, match="no execution starts with it"):
        run["e_2"]
    assert verify(path).problems == ()
    assert found(path, *NEEDLES)
    # Who had the run open keeps what it had, until it asks for more.
    assert "e_2" in shown(before)
    assert before.refresh()
    assert "e_2" not in shown(before)
    with RunWriter(path) as writer:
        writer.write(one_execution("e_4"))
    assert shown(gyre_data.open(path)) == {"e_1", "e_3", "e_4"}


def test_a_reader_that_does_not_know_removals_refuses_instead_of_showing(tmp_path):
    path = made(tmp_path / "run")
    remove(path, ["e_2"])
    newest = manifests.manifest_path(path, manifests.numbers(path)[-1])
    assert json.loads(newest.read_bytes())["major"] == 2
    remove(path, purge=True)
    newest = manifests.manifest_path(path, manifests.numbers(path)[-1])
    assert json.loads(newest.read_bytes())["major"] == 1
    document = {**json.loads(newest.read_bytes()), "major": 2}
    document["sha256"] = manifests._checksum(document)
    with pytest.raises(SchemaError, match="format 2, this release reads up to 1; upgrade"):
        manifests.parse(json.dumps(document).encode(), newest)


@pytest.mark.parametrize("first", ["nothing", "rm", "compact", "cold", "rm and compact", "open"])
def test_after_a_purge_the_bytes_are_gone(tmp_path, first):
    path = made(tmp_path / "run")
    if "rm" in first:
        remove(path, ["e_2"])
    if "compact" in first or first == "cold":
        compact(path, cold=first == "cold")
    if first == "open":
        writer = RunWriter(path)
        writer.write(one_execution("e_4"))
        writer._release()
    reader = gyre_data.open(path)
    kept = {name: [r for r in reader.table(name).to_pylist() if "e_2" not in repr(r)] for name in TABLES}
    plan = plan_removal(path, () if "rm" in first else ["e_2"], purge=True)
    # Its quarantined file, its body text, and in a folder that was cut off also nothing more.
    assert (plan.executions, plan.num_blobs, plan.quarantine_files, plan.workspaces) == (("e_2",), 1, 1, ("e_2",))
    remove(path, plan.executions, purge=True)
    assert found(path, *NEEDLES) == []
    assert not (path / "quarantine").exists()
    run = gyre_data.open(path)
    assert run.manifest.removed == ()
    for name in TABLES:
        if name != "blobs":
            assert run.table(name).to_pylist() == kept[name], name
    with pytest.raises(KeyError):
        run.blob(__import__("hashlib").sha256(MARKER).hexdigest())
    assert verify(path).problems == ()
    # A reader from before still reads, from its maps; nothing is left to do.
    assert reader.table("nodes").num_rows
    assert plan_removal(path, purge=True).num_blobs == 0
    assert not [p for p in path.rglob("*.arrow") if p.name not in json.dumps(manifest_names(path))]


def manifest_names(path: Path) -> list[str]:
    return [s.name for many in manifests.newest(path).sealed.values() for s in many]


def test_untouched_segments_are_not_rewritten(tmp_path):
    path = made(tmp_path / "run")
    with RunWriter(path) as writer:
        writer.write(one_execution("e_4"))
    late = {s.name: s.crc32 for s in manifests.newest(path).sealed["nodes"][-1:]}
    remove(path, ["e_2"], purge=True)
    assert {s.name: s.crc32 for s in manifests.newest(path).sealed["nodes"][-1:]} == late


def test_purge_of_damage_is_refused(tmp_path):
    path = made(tmp_path / "run")
    (first, *_) = (path / "nodes").glob("*.arrow")
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    with pytest.raises(CorruptError, match="CRC-32"):
        remove(path, ["e_2"], purge=True)
    assert zlib.crc32(first.read_bytes()) == zlib.crc32(bytes(data))


@pytest.mark.parametrize("name", ["..", ".", "../quarantine", "e_link"])
def test_no_id_leads_a_purge_out_of_the_workspaces(tmp_path, name):
    path = made(tmp_path / "run", (name, "e_3"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine.txt").write_text("mine")
    (path / "workspaces" / "e_link").symlink_to(tmp_path / "elsewhere")
    remove(path, [name], purge=True)
    assert shown(gyre_data.open(path)) == {"e_3"}
    assert (path / "workspaces" / "e_2").exists()
    assert (tmp_path / "elsewhere" / "mine.txt").exists()


def test_unknown_ids_none_and_a_run_that_is_written(tmp_path):
    path = made(tmp_path / "run")
    with pytest.raises(DataError, match="no execution starts with it"):
        remove(path, ["e_9"])
    with pytest.raises(DataError, match="3 executions start with it"):
        remove(path, ["e_"])
    with pytest.raises(ConfigError, match="to remove, got none"):
        remove(path)
    with RunWriter(path):
        for change in (lambda: remove(path, ["e_2"]), lambda: tag(path, "v1"), lambda: delete_tag(path, "v1")):
            with pytest.raises(ConfigError, match="is being written by pid"):
                change()


def test_a_tag_is_a_version_that_later_changes_do_not_touch(tmp_path):
    path = made(tmp_path / "run")
    first = tag(path, "v1", "before e_4")
    with RunWriter(path) as writer:
        writer.write(one_execution("e_4"))
    tag(path, "v2")
    remove(path, ["e_1"])
    compact(path, cold=True)
    assert shown(gyre_data.open(f"{path}@v1")) == {"e_1", "e_2", "e_3"}
    assert shown(gyre_data.open(find_run(f"{path}@v2"))) == {"e_1", "e_2", "e_3", "e_4"}
    assert shown(gyre_data.open(path)) == {"e_2", "e_3", "e_4"}
    pinned = gyre_data.open(f"{path}@v1")
    assert (pinned.path, pinned.manifest_number, pinned.refresh()) == (path, first.manifest, False)
    assert [(one.name, one.note) for one in tags(path)] == [("v1", "before e_4"), ("v2", None)]
    with pytest.raises(ConfigError, match=r"that tag names manifest \d+; take another name"):
        tag(path, "v1")
    with pytest.raises(ConfigError, match=r"wanted the tag v3, it has v1, v2"):
        gyre_data.open(f"{path}@v3")
    with pytest.raises(ConfigError, match="wanted a tag of letters"):
        tag(path, "../v1")
    odd = made(tmp_path / "me@home")
    assert gyre_data.open(odd).table("calls").num_rows == 6


def test_a_purge_is_refused_while_a_tag_or_a_lease_needs_the_bytes(tmp_path):
    path = made(tmp_path / "run")
    tag(path, "v1")
    compact(path)  # now no file of the newest manifest is the tag's, but the bytes are in the tag's
    assert plan_removal(path, ["e_2"]).tags == ("v1",)
    with pytest.raises(ConfigError, match=r"still needed by tag v1; `gyre tag .* v1|NAME --delete`"):
        remove(path, ["e_2"], purge=True)
    assert found(path, *NEEDLES)
    delete_tag(path, "v1")
    with lease(path, manifests.newest(path).number), pytest.raises(ConfigError, match="a lease in leases/"):
        remove(path, ["e_2"], purge=True)
    remove(path, ["e_2"], purge=True)
    assert found(path, *NEEDLES) == []


def test_the_commands(tmp_path, capsys):
    path = made(tmp_path / "run")
    folder_commands.tag(path)
    folder_commands.tag(path, "v1")
    folder_commands.tag(path)
    text = capsys.readouterr().out
    assert f"{path} has no tag; make one: gyre tag {path} NAME" in text
    assert f"look at it: gyre stats {path}@v1" in text
    folder_commands.rm(path, ["e_2"])
    text = capsys.readouterr().out
    assert "2 calls, 4 nodes, " in text
    assert "tags that still show them: v1" in text
    assert f"do it: gyre rm {path} e_2 --yes" in text
    assert "e_2" in shown(gyre_data.open(path))
    folder_commands.rm(path, ["e_2"], yes=True)
    folder_commands.tag(path, "v1", delete=True)
    folder_commands.rm(path, purge=True)
    assert "there is no way back" in capsys.readouterr().out
    folder_commands.rm(path, purge=True, yes=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["executions"] == ["e_2"]
    assert found(path, *NEEDLES) == []
