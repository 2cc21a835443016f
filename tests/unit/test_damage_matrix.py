"""Damage by table, state and kind against every command that meets it: told by file in one line, or out of its way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import gyre_data as gd
from gyre_data.compact import compact
from gyre_data.errors import CorruptError
from gyre_data.main import run as entry
from gyre_data.schema import TABLES
from gyre_data.types import EnvironmentState
from gyre_data.verify import verify
from tests.support.forest import START, Forest

EXECUTION = "e_0123456789ab"
TEXT = "a text that is not compressed"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on the disk after a power loss is the matter of tests/crash, and nobody is sealing a file here."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)
    monkeypatch.setattr("gyre_data.reader._RETRIES", 2)


def _flip(file: Path) -> None:
    """In a value, where the file's structure does not show it: the file is as good Arrow as before."""
    data = bytearray(file.read_bytes())
    at = max(data.find(value) for value in (TEXT.encode(), b"n_", b"st_1"))
    data[at if at > 0 else len(data) // 2] ^= 1  # a cold one: in a frame of zstd
    file.write_bytes(data)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {"flipped": _flip, "cut": _cut, "gone": Path.unlink, "folder": _folder}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One execution with texts and a workspace: sealed, as a writer that was killed leaves it, and compacted cold."""
    found = {}
    for state in ("sealed", "open", "cold"):
        run = Forest()
        e = run.execution(EXECUTION, group="g")
        state_row = EnvironmentState(
            state_id="st_1", execution_id=EXECUTION, captured_at=START, kind="git", digest="77ab"
        )
        run.add("environments", state_row)
        first = e.call(new=[("user", 4)], environment_state_id="st_1")
        e.say(first.output, {"role": "assistant", "content": TEXT})
        e.call(after=first)
        found[state] = tmp_path_factory.mktemp(state) / "run"
        writer = gd.RunWriter(found[state])
        for name in TABLES:
            writer.write(run.rows.get(name, []))
        if state == "open":
            writer._release()
            continue
        writer.close()
        if state == "cold":
            compact(found[state], cold=True)
    return found


def _command(*words: object) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["gyre", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            entry()
    code = left.value.code
    return code if isinstance(code, int) else 0


def _followed(run: Path) -> str:
    """Names of the tables that following gives rows of, or what it says."""
    try:
        return " ".join(name for changes in gd.open(run).follow(idle_s=0) for name in changes.tables)
    except CorruptError as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("table", ["blobs", "environments", "nodes"])
@pytest.mark.parametrize("state", ["sealed", "open", "cold"])
def test_damage_is_told_by_file_or_stands_in_nobody_s_way(
    pristine: dict[str, Path],
    tmp_path: Path,
    state: str,
    table: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, chat = tmp_path / "run", tmp_path / "chat.jsonl"
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat.write_text(json.dumps({"messages": said}) + "\n")
    shutil.copytree(pristine[state], run)
    (victim,) = (file for file in (run / table).iterdir() if file.suffix in (".arrow", ".open"))
    KINDS[kind](victim)
    assert verify(run).problems
    kept = {file: file.read_bytes() for file in run.rglob("*.arrow") if file.is_file()}
    stem = victim.name.partition(".")[0]
    # The last two write. What a crash left open they recover first, so what comes after them reads another folder.
    for words in (
        ("ls", run),
        ("stats", run),
        ("tree", run),
        ("tree", run, f"{EXECUTION}:c1"),
        ("explain", run),
        ("export", run, "-o", tmp_path / "copy"),
        ("score", run, EXECUTION, "1", "--evaluator", "x"),
        ("import", chat, "-o", run),
    ):
        code = _command(*words)
        told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gyre: ")]
        assert code in (0, 2), words
        assert len(told) == (1 if code else 0), words
        assert not code or f"{table}/{stem}" in told[0] or "gyre verify" in told[0], (words, told)
        if words[0] == "export" and state != "open":
            assert code, "damage is never handed on"
        if words[0] == "score":
            assert f"{table}/{stem}" in _followed(run) or "calls" in _followed(run)
    for file, data in kept.items():
        assert file.read_bytes() == data, "nothing that was recorded is changed"
    if state != "open":
        assert verify(run).problems
