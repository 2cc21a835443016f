"""Compaction, removal, purge, tag and merge killed anywhere: the folder is as it was or as it becomes, never a mix."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gyre_data
from gyre_data import manifest as manifests
from gyre_data.beside import beside
from gyre_data.compact import compact
from gyre_data.convert.importing import import_sessions
from gyre_data.errors import ConfigError, DataError
from gyre_data.merge import merge
from gyre_data.pins import delete_tag, tag, tags
from gyre_data.query import batches
from gyre_data.removal import remove
from gyre_data.salvage import salvage
from gyre_data.schema import TABLES
from gyre_data.show.query_text import save
from gyre_data.store import RunWriter
from gyre_data.verify import verify
from gyre_data.view.report import write_report
from tests.crash.test_runs import Faults, Killed
from tests.support.rows import one_execution

ROOT = Path(__file__).resolve().parents[2]
SESSIONS = ROOT / "tests" / "data" / "sessions" / "pi"
MARKER = b"the text of e_1 "


@pytest.fixture
def no_sync(monkeypatch):
    """Death of a process needs no disk to forget anything; so the tests of it need not wait for the disk either."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None, raising=False)


def made(path: Path, num_executions: int = 2) -> Path:
    with RunWriter(path) as writer:
        for number in range(num_executions):
            writer.put_blob((MARKER if number == 1 else b"text %d " % number) * 3)
            writer.write(one_execution(f"e_{number}", 2))
            writer.seal()
    (path / "quarantine" / "nodes").mkdir(parents=True)
    (path / "quarantine" / "nodes" / "w0-000099.open").write_bytes(MARKER)
    return path


def content(path: Path) -> dict[str, list[str]]:
    run = gyre_data.open(path)
    return {name: sorted(map(repr, run.table(name).to_pylist())) for name in TABLES if run.table(name).num_rows}


def without(before: dict[str, list[str]], word: str) -> dict[str, list[str]]:
    return {name: [row for row in rows if word not in row] for name, rows in before.items()}


# What is done, and at which of its steps it is killed: every nth.
EVERY = {"compact": 3, "cold": 7, "rm": 1, "purge": 1, "tag": 1}
CHANGES = {
    "compact": lambda path: compact(path),
    "cold": lambda path: compact(path, cold=True),
    "rm": lambda path: remove(path, ["e_1"]),
    "purge": lambda path: remove(path, ["e_1"], purge=True),
    "tag": lambda path: tag(path, "v1"),
}


def state(path: Path) -> tuple[dict[str, list[str]], tuple[str, ...], list[str]]:
    return content(path), manifests.newest(path).removed, [one.name for one in tags(path)]


def count_steps(path: Path, change) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, at=-1, error=Killed(), forever=False)
        change(path)
        return faults.count


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_every_step(tmp_path, name):
    """Death before any call that touches the disk: either state, clean, and the change can be made again."""
    change = CHANGES[name]
    original = made(tmp_path / "original")
    before = state(original)
    shutil.copytree(original, tmp_path / "counted")
    total = count_steps(tmp_path / "counted", change)
    after = state(tmp_path / "counted")
    assert total >= 5
    for at in range(1, total + 1, EVERY[name]):
        path = tmp_path / f"run{at}"
        shutil.copytree(original, path)
        reader = gyre_data.open(path)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            Faults(patch, at, Killed(), forever=True)
            change(path)
        assert state(path) in (before, after), at
        assert verify(path).problems == (), at
        assert {t: sorted(map(repr, reader.table(t).to_pylist())) for t in before[0]} == before[0]
        with contextlib.suppress(ConfigError, DataError):  # a tag or a purge may have been done already
            change(path)
        assert state(path) == after, at
        if name in ("compact", "cold"):
            assert {p.name for p in path.rglob("*.arrow")} == {
                s.name for many in manifests.newest(path).sealed.values() for s in many
            }
        if name == "purge":
            remove(path, purge=True)
            assert not [p for p in path.rglob("*") if p.is_file() and MARKER in p.read_bytes()]
        shutil.rmtree(path)


@pytest.mark.usefixtures("no_sync")
def test_a_merge_killed_at_every_step_is_no_run_or_the_whole_one(tmp_path):
    a, b = made(tmp_path / "a"), tmp_path / "b"
    with RunWriter(b) as writer:
        writer.write(one_execution("e_7"))
    whole = merge([a, b], tmp_path / "whole")
    total = count_steps(tmp_path / "counted", lambda out: merge([a, b], out))
    for at in range(1, total + 1):
        out = tmp_path / f"run{at}"
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            Faults(patch, at, Killed(), forever=True)
            merge([a, b], out)
        if not manifests.numbers(out):
            with pytest.raises(ConfigError):
                gyre_data.open(out)
            continue
        assert content(out) == content(Path(whole.path))
        assert [one["executions"] for one in gyre_data.open(out).info["merged_from"]] == [
            ["e_0", "e_1"],
            ["e_7"],
        ]


@pytest.mark.usefixtures("no_sync")
def test_an_import_killed_at_every_step_is_made_whole_by_the_next(tmp_path):
    """Killed between two tables it leaves rows without the ones written last: these are written then, none twice."""
    whole = tmp_path / "whole"
    total = count_steps(whole, lambda out: import_sessions(SESSIONS, out))
    after = content(whole)
    cut_off = 0
    for at in range(1, total + 1, 3):
        out = tmp_path / f"run{at}"
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            Faults(patch, at, Killed(), forever=True)
            import_sessions(SESSIONS, out)
        if manifests.numbers(out):
            assert verify(out).exit_status == 0 or {p.kind for p in verify(out).problems} == {"tail"}, at
            cut_off += "nodes" in content(out) and "executions" not in content(out)
        import_sessions(SESSIONS, out)
        assert content(out) == after, at
        assert verify(out).problems == (), at
        shutil.rmtree(out)
    assert cut_off > 2


def die_in(function):
    """Run `function` in a process of its own that is killed, like by `kill -9`, where it calls `pause`."""
    child = os.fork()
    if child == 0:
        function(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("what", ["merge", "copy", "chat.jsonl", "atif", "report.html", "rows.csv"])
def test_what_a_killed_writer_left_beside_its_target_is_cleared_by_the_next(tmp_path, what):
    run, out = made(tmp_path / "a"), tmp_path / "out" / what
    (tmp_path / "b").mkdir()
    with RunWriter(tmp_path / "b" / "run") as writer:
        writer.write(one_execution("e_7"))

    def write():
        opened = gyre_data.open(run)
        if what == "merge":
            merge([run, tmp_path / "b" / "run"], out)
        elif what == "report.html":
            write_report(opened, out)
        elif what == "rows.csv":
            save(batches(opened, "select * from calls"), out)
        else:
            gyre_data.export(opened, out, format="atif" if what == "atif" else None)

    def killed(pause):
        for name in ("rename", "replace", "link"):
            real = getattr(os, name)
            setattr(os, name, lambda a, b, real=real: pause() if str(b) == str(out) else real(a, b))
        write()

    out.parent.mkdir()
    other = out.parent / f".{what}.0123abcd.tmp.kept"
    other.write_text("of somebody else")
    die_in(killed)
    (left,) = set(out.parent.iterdir()) - {other}
    assert left.name.startswith(f".{what}.")
    with beside(out, folder=True) as held:  # one that is being written is left alone
        assert not left.exists()
        write()
        assert held.exists()
    assert set(out.parent.iterdir()) == {out, other}
    assert {p.stat().st_mode & 0o077 for p in (out, *out.rglob("*"))} == {0}


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("name", ["compact", "purge"])
def test_a_full_disk_leaves_no_mix(tmp_path, name):
    original = made(tmp_path / "original")
    before = state(original)
    shutil.copytree(original, tmp_path / "done")
    CHANGES[name](tmp_path / "done")
    after = state(tmp_path / "done")
    for at in range(3, 40, 5):
        path = tmp_path / f"run{at}"
        shutil.copytree(original, path)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, at, OSError(28, "No space left on device"), forever=True)
            with contextlib.suppress(OSError):
                CHANGES[name](path)
        if faults.count >= at:
            assert state(path) in (before, after)
            assert verify(path).problems == ()
        with contextlib.suppress(DataError):  # a purge may have been done but for the removal of old files
            CHANGES[name](path)
        assert state(path) == after
        assert verify(path).problems == ()


LOOP = """
import sys
from pathlib import Path
from gyre_data import open
from gyre_data.compact import compact
from gyre_data.pins import delete_tag, tag
from gyre_data.removal import remove
from gyre_data.salvage import salvage
path = Path(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    number += 1
    compact(path, cold=bool(number % 2))
    tag(path, f"v{sys.argv[2]}_{number}")
    delete_tag(path, f"v{sys.argv[2]}_{number}")
    if number == 2:
        remove(path, ["e_1"] if "'e_1'" in repr(open(path).table("calls").to_pylist()) else [], purge=True)
"""


def test_kill_9_in_a_loop(tmp_path):
    """The kernel kills the process, wherever it is: every time the run is clean, and in the end as it should be."""
    path = made(tmp_path / "run")
    before = rows(path)
    for number, pause in enumerate((0.0, 0.013, 0.037, 0.073, 0.17)):
        child = subprocess.Popen(
            [sys.executable, "-c", LOOP, str(path), str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(pause)
        child.send_signal(signal.SIGKILL)
        _, errors = child.communicate()
        assert child.returncode == -signal.SIGKILL, errors
        assert verify(path).problems == ()
        assert rows(path) in (before, without(before, "e_1"))
        for one in tags(path):  # killed between making one and deleting it: it would keep the next from purging
            delete_tag(path, one.name)
    remove(path, ["e_1"] if rows(path) == before else [], purge=True)
    compact(path)
    assert rows(path) == without(before, "e_1")
    assert not [p for p in path.rglob("*") if p.is_file() and MARKER in p.read_bytes()]


def rows(path: Path) -> dict[str, list[str]]:
    """All but the blobs: here no row names one, so any purge clears them."""
    return {name: found for name, found in content(path).items() if name != "blobs"}


@pytest.mark.usefixtures("no_sync")
def test_a_salvage_killed_at_every_step_loses_nothing(tmp_path):
    """Whenever it dies, the next one ends as one in a single go; the damaged bytes are in the folder all the time."""
    original = made(tmp_path / "original")
    (file, *_) = sorted((original / "nodes").glob("*.arrow"))
    data = bytearray(file.read_bytes())
    data[-900] ^= 1
    file.write_bytes(data)
    shutil.copytree(original, tmp_path / "done")
    total = count_steps(tmp_path / "done", salvage)
    after = content(tmp_path / "done")
    for at in range(1, total + 1):
        path = tmp_path / f"run{at}"
        shutil.copytree(original, path)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            Faults(patch, at, Killed(), forever=True)
            salvage(path)
        assert bytes(data) in [p.read_bytes() for p in path.rglob("*.arrow")], at
        salvage(path)
        assert content(path) == after, at
        assert verify(path).problems == (), at
        assert bytes(data) in [p.read_bytes() for p in (path / "quarantine").rglob("*.arrow")], at
