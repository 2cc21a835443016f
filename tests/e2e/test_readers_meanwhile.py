"""Readers in processes of their own while a run is written, sealed, compacted, purged, merged: never a wrong count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import gyre_data as gd
from gyre_data.compact import compact
from gyre_data.merge import merge
from gyre_data.pins import delete_tag, tag
from gyre_data.removal import remove
from tests.support.engines import wait_until
from tests.support.onlooker import REMOVED, WAYS, acknowledged, looks_of
from tests.support.rows import one_execution

ROOT = Path(__file__).resolve().parents[2]
A_ROUND = 10


def watched(way: str, path: Path, acked: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.onlooker", way, str(path), str(acked)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}"},
    )


def record(path: Path, first: int, acked: np.ndarray) -> None:
    """Some calls, each durable before the next, in several segments."""
    with gd.RunWriter(path) as writer:
        for number in range(first, first + A_ROUND):
            writer.put_blob(b"text %d " % number * 20)
            writer.write(one_execution(f"e_{number}", 1))
            acked[0] = number + 1
            if number % 4 == 3:
                writer.seal()


def test_readers_see_what_some_manifest_says(tmp_path: Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    gd.RunWriter(path).close()
    with gd.RunWriter(other) as writer:
        writer.write(one_execution("f_0", 1))
    acked = acknowledged(tmp_path / "acked", "w+")
    children = {way: watched(way, path, tmp_path / "acked") for way in WAYS}
    for child in children.values():
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", child.communicate()
    for turn, gone in enumerate(REMOVED):
        record(path, turn * A_ROUND, acked)
        compact(path)
        remove(path, [f"e_{gone}"])
        acked[1] = turn + 1
        tag(path, f"v{turn}")
        compact(path, cold=True)
        merge([path, other], tmp_path / f"both{turn}")
        delete_tag(path, f"v{turn}")
        remove(path, purge=True)

        def looked(turn: int = turn) -> bool:
            failed = any(child.poll() is not None for child in children.values())
            return failed or min(looks_of(acked)) > turn

        wait_until(looked, "every reader to look")  # however fast this was and however slow they are
    acked[2] = 1
    with gd.RunWriter(path) as writer:  # a last change, for the one who waits for it
        writer.put_blob(b"the last")
    for way, child in children.items():
        said, errors = child.communicate(timeout=60)
        assert child.returncode == 0, f"{way}: {errors}"
        last = json.loads(said)
        assert last == [len(REMOVED) * A_ROUND, len(REMOVED)] or way not in ("refresh", "follow"), (way, last)
    assert min(looks_of(acked)) > 1, dict(zip(WAYS, looks_of(acked), strict=True))
    calls = gd.open(tmp_path / "both1").table("calls").num_rows
    assert calls == len(REMOVED) * A_ROUND - len(REMOVED) + 1


LOOK_FOR = """
import sys, time
import gyre_data as gd
from gyre_data.errors import ConfigError
print("ready", flush=True)
while True:
    try:
        run = gd.open(sys.argv[1])
    except ConfigError:
        time.sleep(0.001)
        continue
    print(run.table("calls").num_rows, run.table("nodes").num_rows, gd.stats(run).trees.calls)
    break
"""


def test_a_merged_run_is_not_there_or_whole(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with gd.RunWriter(tmp_path / name) as writer:
            for number in range(8):
                writer.write(one_execution(f"e_{name}{number}", 2))
                if number % 3 == 0:
                    writer.seal()
    child = subprocess.Popen(
        [sys.executable, "-c", LOOK_FOR, str(tmp_path / "both")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proxy'}"},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    said, _ = child.communicate(timeout=60)
    assert said.split() == ["32", "64", "32"]
