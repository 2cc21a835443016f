"""Following: every row once, through sealing, crash and compaction; how soon is measured in benchmarks."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import gyre_data
from gyre_data.compact import compact
from gyre_data.removal import remove
from gyre_data.store import RunWriter
from tests.support.engines import wait_until
from tests.support.rows import one_call, one_execution

ROOT = Path(__file__).resolve().parents[2]


def calls(changes) -> list[str]:
    return changes.tables["calls"].column("call_id").to_pylist() if "calls" in changes.tables else []


def test_every_row_once_through_sealing_and_reopening(tmp_path):
    path = tmp_path / "run"
    writer = RunWriter(path)
    writer.write(one_call(0))
    follower = gyre_data.open(path).follow(idle_s=0.05)
    first = next(follower)
    assert (calls(first), first.tables["nodes"].num_rows, first.rewritten) == (["e_1_c0"], 2, False)
    writer.write(one_call(1))
    writer.write(one_call(2))
    assert calls(next(follower)) == ["e_1_c1", "e_1_c2"]
    writer.seal()
    writer.write(one_call(3))
    second = next(follower)
    assert (calls(second), second.tables["nodes"].num_rows) == (["e_1_c3"], 2)
    writer._release()
    with RunWriter(path) as writer:
        writer.write(one_call(4))
    assert calls(next(follower)) == ["e_1_c4"]
    assert next(follower, None) is None


def test_a_changed_folder_starts_anew(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        writer.write(one_execution("e_1"))
        writer.write(one_execution("e_2"))
    follower = gyre_data.open(path).follow(idle_s=0.05)
    next(follower)
    compact(path)
    changes = next(follower)
    assert changes.rewritten
    assert len(calls(changes)) == 6
    remove(path, ["e_1"])
    changes = next(follower)
    assert changes.rewritten
    assert {name.rpartition("_")[0] for name in calls(changes)} == {"e_2"}
    with RunWriter(path) as writer:
        writer.write(one_execution("e_3", 1))
    changes = next(follower)
    assert (changes.rewritten, calls(changes)) == (False, ["e_3_c0"])


def test_wait_says_whether_something_came(tmp_path):
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        run = gyre_data.open(path)
        assert not run.wait(0.05)
        later = threading.Timer(0.05, lambda: writer.write(one_call(0)))
        later.start()
        while not run.table("calls").num_rows:  # a manifest that names the new segments comes first
            assert run.wait(60)
        later.join()
    assert run.table("calls").num_rows == 1


WRITER = """
import sys, time
from gyre_data.store import RunWriter
from tests.support.rows import one_call
with RunWriter(sys.argv[1]) as writer:
    for number in range(40):
        writer.write(one_call(number))
        if number % 10 == 9:
            writer.seal()
        time.sleep(0.01)
"""


def test_several_readers_follow_while_another_process_writes(tmp_path):
    """Each sees every call once and in order."""
    path = tmp_path / "run"
    RunWriter(path).close()
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}"},
    )
    seen: list[list[str]] = [[], [], []]

    def read(into: list[str]) -> None:
        for changes in gyre_data.open(path).follow(idle_s=60):
            into.extend(calls(changes))
            if len(into) >= 40:
                return

    readers = [threading.Thread(target=read, args=(into,)) for into in seen]
    for reader in readers:
        reader.start()
    assert child.wait(120) == 0
    for reader in readers:
        reader.join(120)
    for into in seen:
        assert into == [f"e_1_c{number}" for number in range(40)]


def test_readers_that_come_and_go_while_the_folder_changes(tmp_path):
    """A reader always opens a whole snapshot, whatever compaction or removal is doing meanwhile."""
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        for number in range(4):
            writer.write(one_execution(f"e_{number}", 1))
            writer.seal()
    stop = threading.Event()
    wrong: list[object] = []
    opened = [0]

    def read() -> None:
        while not stop.is_set():
            run = gyre_data.open(path)
            found = {run.table("calls").num_rows, run.table("nodes").num_rows // 2}
            opened[0] += 1
            if len(found) != 1 or found.pop() not in (3, 4):
                wrong.append(found)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(6):
        compact(path, cold=bool(number % 2))
        if number == 3:
            remove(path, ["e_1"], purge=True)
        wait_until(lambda number=number: opened[0] > number, "a reader to look")
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
