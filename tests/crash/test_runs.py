"""Whatever kills a writer, whenever: what it acknowledged is there, whole calls only, and recovery is clean."""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import gyre_data
from gyre_data.commit_log import read_log
from gyre_data.errors import CaptureError, ConfigError
from gyre_data.store import RunWriter
from gyre_data.verify import verify
from tests.support.rows import one_call


@pytest.fixture
def no_sync(monkeypatch):
    """Death of a process needs no disk to forget anything; so the tests of it need not wait for the disk either."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None, raising=False)


def write_call(writer: RunWriter, number: int) -> str:
    """One call with a blob, as the proxy writes it; returns its call id."""
    blob = writer.put_blob(b"request body %d " % number * 20)
    *nodes, call = one_call(number)
    writer.write([*nodes, type(call)(**{**{s: getattr(call, s) for s in call.__slots__}, "request_blobs": (blob,)})])
    return call.call_id


def whole_calls(path: Path) -> list[str]:
    """Ids of all calls that can be read; fails unless each has its nodes and its blob."""
    run = gyre_data.open(path)
    nodes = set(run.table("nodes").column("node_id").to_pylist())
    calls = run.table("calls").to_pylist()
    for call in calls:
        assert call["prompt_node"] in nodes
        assert call["output_node"] in nodes
        assert run.blob(call["request_blobs"][0]).startswith(b"request body")
    return [call["call_id"] for call in calls]


def die(writer: RunWriter) -> None:
    """What the kernel does when the process is killed: close its files, no more."""
    if hasattr(writer, "_live"):
        writer._release()


def check_recovery(path: Path, acknowledged: list[str]) -> None:
    """Readable before and after recovery, clean after it, and writing goes on."""
    before = whole_calls(path)
    assert before[: len(acknowledged)] == acknowledged
    with RunWriter(path) as writer:
        assert whole_calls(path) == before
        write_call(writer, 900)
    assert whole_calls(path) == [*before, "e_1_c900"]
    report = verify(path)
    assert report.problems == ()
    assert not [p for p in path.rglob("*") if p.suffix in (".open", ".commit") and "quarantine" not in p.parts]


@cache
def killed_run(folder: Path) -> tuple[list[str], list[dict[str, tuple[int, int]]]]:
    """A run killed after six calls, and for each the size of every (data, log) at its acknowledgement."""
    writer = RunWriter(folder)
    calls, sizes = [], []
    for number in range(6):
        calls.append(write_call(writer, number))
        sizes.append(
            {
                name: (live.segment.data_path.stat().st_size, live.segment.log_path.stat().st_size)
                for name, live in writer._live.items()
            }
        )
    die(writer)
    return calls, sizes


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "run"
    return folder, *killed_run(folder)


@pytest.mark.usefixtures("no_sync")
@settings(
    max_examples=30,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_power_loss_anywhere(killed, tmp_path_factory, data):
    """Each file keeps what was synced when acknowledgement k was given, then any part of the rest, then maybe zeros.

    The one order that holds on disk: a byte of call n's record implies that the nodes and blobs of call n are synced.
    """
    folder, calls, sizes = killed
    kept = data.draw(st.integers(0, len(calls)), label="acknowledged")
    path = tmp_path_factory.mktemp("cut") / "run"
    shutil.copytree(folder, path)
    synced = kept
    for name in ("calls", "nodes", "blobs"):
        for suffix, at in ((".commit", 1), (".open", 0)):
            (file,) = (path / name).glob(f"*{suffix}")
            ends = [0, *(size[name][at] for size in sizes)]
            cut = data.draw(st.integers(ends[kept if name == "calls" else synced], ends[-1]), label=file.name)
            zeros = data.draw(st.sampled_from([0, 0, 20, 4096]), label="zeros")
            file.write_bytes(file.read_bytes()[:cut] + bytes(zeros))
            if name == "calls":
                synced = max(synced, sum(end < cut for end in ends))
    check_recovery(path, calls[:kept])


class Killed(BaseException):
    """Stands for the end of the process."""


FAULTED = [
    name for name in ("pwrite", "fsync", "fdatasync", "rename", "link", "unlink", "ftruncate") if hasattr(os, name)
]


class Faults:
    """Counts the calls that change the disk, and lets the nth one fail, a write only after half its bytes."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException, *, forever: bool) -> None:
        self.count, self.at, self.error, self.forever = 0, at, error, forever
        for name in FAULTED:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.at or (self.forever and self.count > self.at):
                if name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                raise self.error
            return real(*args, **kwargs)

        return call


def work(path: Path, acknowledged: list[str]) -> RunWriter:
    writer = RunWriter(path)
    acknowledged.append(write_call(writer, 0))
    acknowledged.append(write_call(writer, 1))
    writer.seal()
    acknowledged.append(write_call(writer, 2))
    return writer


def count_disk_calls(tmp_path: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch, at=-1, error=Killed(), forever=False)
        work(tmp_path / "counted", []).close()
        return faults.count


@pytest.mark.usefixtures("no_sync")
def test_killed_at_every_step(tmp_path):
    """Death at any call that touches the disk, in opening, committing, sealing and closing."""
    total = count_disk_calls(tmp_path)
    assert total > 60
    for at in range(1, total + 1):
        path = tmp_path / f"run{at}"
        acknowledged: list[str] = []
        made: list[RunWriter] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunWriter, "__init__", _remember(RunWriter.__init__, made))
            Faults(patch, at, Killed(), forever=True)
            with contextlib.suppress(Killed):
                work(path, acknowledged).close()
        for writer in made:
            die(writer)
        if not (path / "manifest").exists() or not list((path / "manifest").glob("*.json")):
            assert not acknowledged
            continue
        check_recovery(path, acknowledged)


def _remember(real, made):
    def init(self, *args, **kwargs):
        made.append(self)
        real(self, *args, **kwargs)

    return init


@pytest.mark.usefixtures("no_sync")
@pytest.mark.parametrize("forever", [False, True])
def test_disk_error_at_every_step(tmp_path, forever):
    """An OSError at any step: the call raises or counts, the writer goes on, and nothing is lost or doubled."""
    for at in range(8, count_disk_calls(tmp_path) + 1, 3 if forever else 1):
        path = tmp_path / f"run{at}"
        RunWriter(path).close()
        acknowledged: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            writer = RunWriter(path)
            Faults(patch, at, OSError(28, "No space left on device"), forever=forever)
            for number in range(4):
                try:
                    acknowledged.append(write_call(writer, number))
                    if number == 1:
                        writer.seal()
                except (CaptureError, OSError):
                    continue
        # Space is back: every call that failed is tried again, under the same ids.
        for number in range(4):
            if f"e_1_c{number}" not in acknowledged:
                acknowledged.append(write_call(writer, number))
        writer.close()
        assert sorted(whole_calls(path)) == sorted(acknowledged)
        assert len(set(acknowledged)) == 4
        assert verify(path).problems == ()


@pytest.mark.skipif(not hasattr(os, "fdatasync"), reason="syncs are traced by the name they have on Linux")
def test_order_on_disk(tmp_path, monkeypatch):
    """What a power loss relies on: nodes and blobs synced before a call is written, a file before its new name."""
    trace: list[tuple[str, str]] = []

    def follow(name, real, path_of):
        def call(*args, **kwargs):
            trace.append((name, path_of(args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, call)

    opened: dict[int, str] = {}
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *a, **k: note(real_open(path, *a, **k), path))

    def note(fd, path):
        opened[fd] = str(Path(path).relative_to(tmp_path))
        return fd

    for name in ("pwrite", "fsync", "fdatasync"):
        follow(name, getattr(os, name), lambda args: opened[args[0]])
    for name in ("rename", "link", "unlink"):
        follow(name, getattr(os, name), lambda args: str(Path(args[0]).relative_to(tmp_path)))

    def at(name, path):
        return next(i for i, (n, p) in enumerate(trace) if n == name and path in p)

    def log_kept(table):
        return next(i for i, (n, p) in enumerate(trace) if n == "rename" and f"{table}/" in p and ".commit" in p)

    writer = RunWriter(tmp_path / "run")
    write_call(writer, 0)
    trace.clear()
    write_call(writer, 1)
    assert [(n, Path(p).parent.name + Path(p).suffix) for n, p in trace] == [
        (step, table + suffix)
        for table in ("blobs", "nodes", "calls")
        for step in ("pwrite", "fdatasync")
        for suffix in (".open", ".commit")
    ]
    trace.clear()
    writer.seal()
    for table in ("blobs", "nodes", "calls"):
        assert (
            at("pwrite", f"{table}/") < at("fsync", f"{table}/") < at("rename", f"{table}/") < at("link", "manifest/")
        )
        assert at("fsync", "manifest/") < at("link", "manifest/") < log_kept(table)
    assert ("fsync", "run/manifest") in trace[at("link", "manifest/") : log_kept("blobs")]
    writer.close()


def test_full_disk_for_real(tmp_path):
    """The kernel's own short write and error, by a limit on file size."""
    path = tmp_path / "run"
    acknowledged, failed = [], []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with RunWriter(path) as writer:
        write_call(writer, 0)
        acknowledged.append("e_1_c0")
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))
        try:
            for number in range(1, 8):
                try:
                    acknowledged.append(write_call(writer, number))
                except CaptureError as error:
                    failed.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed
        assert all("File too large" in text and "free space" in text for text in failed)
        assert whole_calls(path) == acknowledged
        acknowledged.append(write_call(writer, 100))
    assert sorted(whole_calls(path)) == sorted(acknowledged)
    report = verify(path)
    assert report.problems == ()


CHILD = """
import sys, pathlib
from gyre_data.store import RunWriter
from tests.crash.test_runs import write_call
writer = RunWriter(pathlib.Path(sys.argv[1]))
for number in range(10_000):
    print(write_call(writer, number), flush=True)
    if number % 7 == 6:
        writer.seal()
"""


@pytest.mark.parametrize("after", [1, 5, 13, 30])
def test_kill_9(tmp_path, after):
    path = tmp_path / "run"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'proxy'}"}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(after)]
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += child.stdout.read().split("\n")[:-1]  # whole lines only
    check_recovery(path, acknowledged)


def test_reader_follows_a_live_writer(tmp_path):
    """Every snapshot holds whole calls only, never fewer than before, across commits and seals."""
    path = tmp_path / "run"
    writer = RunWriter(path)
    failures: list[BaseException] = []
    last = threading.Event()

    def record() -> None:
        try:
            for number in range(60):
                write_call(writer, number)
                if number % 11 == 10:
                    writer.seal()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)
        finally:
            last.set()

    thread = threading.Thread(target=record)
    thread.start()
    run, seen = gyre_data.open(path), 0
    while True:
        finished = last.is_set()
        run.refresh()
        calls = run.table("calls").to_pylist()
        nodes = set(run.table("nodes").column("node_id").to_pylist())
        assert {c["output_node"] for c in calls} <= nodes
        assert all(run.blob(c["request_blobs"][0]) for c in calls[seen:])
        assert len(calls) >= seen
        seen = len(calls)
        if finished:
            break
    thread.join()
    assert not failures
    assert seen == 60
    assert run.refresh() is False
    writer.close()
    assert verify(path).problems == ()


def test_threads_share_commits(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        threads = [
            threading.Thread(target=lambda k=k: [write_call(writer, 100 * k + i) for i in range(10)]) for k in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(whole_calls(path)) == 60
    assert verify(path).problems == ()


def test_workers_write_beside_the_owner(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as owner:
        worker = RunWriter(path, "w1", lock=False)
        other = RunWriter(path, "w2", lock=False)
        for number in range(3):
            write_call(owner, number)
            write_call(worker, 10 + number)
            write_call(other, 20 + number)
        assert len(whole_calls(path)) == 9
        die(worker)  # and another takes its place, under the same name
        again = RunWriter(path, "w1", lock=False)
        assert {(r.table, r.num_rows, r.intact) for r in again.recovered} == {
            ("blobs", 3, True),
            ("calls", 3, True),
            ("nodes", 6, True),
        }
        write_call(again, 30)
        with pytest.raises(ConfigError, match="a process still writes it; stop that worker first"):
            RunWriter(path, "w1", lock=False)
        again.close()
        other.close()
    assert len(whole_calls(path)) == 10
    assert verify(path).problems == ()


def test_one_owner(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.update_info({"endpoints": {"proxy": "http://127.0.0.1:8765", "engines": []}})
        with pytest.raises(ConfigError, match=rf"is being written by pid {os.getpid()}, port 8765; use that one"):
            RunWriter(path)
    RunWriter(path).close()


def test_torn_tail_goes_to_quarantine(tmp_path, caplog):
    path = tmp_path / "run"
    writer = RunWriter(path)
    write_call(writer, 0)
    data, log = writer._live["nodes"].segment.data_path, writer._live["nodes"].segment.log_path
    die(writer)
    whole = data.read_bytes()
    data.write_bytes(whole + b"half a batch")
    log.write_bytes(log.read_bytes() + b"half")
    before = verify(path)
    assert [(p.kind, p.where) for p in before.problems] == [("tail", f"nodes/{data.name}")]
    again = RunWriter(path)
    (nodes,) = (r for r in again.recovered if r.table == "nodes")
    assert (nodes.num_rows, nodes.intact) == (2, False)
    assert "quarantine" in caplog.text
    assert (path / "quarantine" / "nodes" / data.name).read_bytes() == whole + b"half a batch"
    assert (path / "quarantine" / "nodes" / log.name).read_bytes().endswith(b"half")
    again.close()
    report = verify(path)
    assert report.problems == ()
    assert any("quarantine/ holds 2 files" in note for note in report.notes)


def test_files_are_private(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        write_call(writer, 0)
        open_modes = {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_file()}
    modes = {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_file()}
    assert open_modes == modes == {0o600}
    assert {p.stat().st_mode & 0o777 for p in (path, *path.rglob("*")) if p.is_dir()} == {0o700}
    assert json.loads((path / "run.json").read_text())["format"] == "gyre"


def test_logs_hold_one_record_for_each_commit(tmp_path):
    writer = RunWriter(tmp_path / "run")
    for number in range(3):
        write_call(writer, number)
    records, damage = read_log(writer._live["nodes"].segment.log_path.read_bytes())
    assert [r.num_rows for r in records] == [2, 2, 2]
    assert damage is None
    writer.close()
