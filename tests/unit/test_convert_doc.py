"""docs/convert.md says what happens: its blocks run, its table names every format."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gyre_data
from gyre_data.convert.exporting import EXPORT_FORMATS
from gyre_data.convert.formats import FORMATS
from gyre_data.store import SAMPLE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "convert.md").read_text()


def _run(words: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_block_is_one_that_is_run_here() -> None:
    assert [kind for kind, _ in BLOCKS] == ["console", "python", "console", "text", "text", "console", "python"]


def test_the_commands_of_the_first_block_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sessions = ROOT / "tests" / "data" / "sessions"
    shutil.copytree(sessions / "claude-code", tmp_path / ".claude" / "projects" / "my-project")
    shutil.copy(next((sessions / "pi").iterdir()), tmp_path / "session.jsonl")
    shutil.copy(sessions / "mini-swe-agent" / "last_mini_run.traj.json", tmp_path / "more.traj")
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    told = {"choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}]}
    (tmp_path / "log.jsonl").write_text(json.dumps({"request": asked, "response": told}) + "\n")
    lines = BLOCKS[0][1].replace("~", str(tmp_path)).replace("Qwen/Qwen3-8B", str(SAMPLE)).splitlines()
    for line in lines:
        words = shlex.split(line, comments=True)
        assert words[:3] == ["$", "gyre", "import"]
        _run([sys.executable, "-m", "gyre_data", *words[2:]], tmp_path)
    assert len(gyre_data.list_executions(gyre_data.open(tmp_path / "runs/mine"))) == 4


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "text"])
def test_public_sessions_give_what_the_page_shows(block: str, tmp_path: Path) -> None:
    command, _, shown = block.partition("\n")
    name = command.split()[3]
    folder = Path(os.environ.get("GYRE_TEST_PUBLIC_SESSIONS", tmp_path))
    if not (folder / name).exists():
        pytest.skip(f"fetch {name} and what lies beside it, as docs/convert.md tells, and name its folder in "
                    "GYRE_TEST_PUBLIC_SESSIONS")  # fmt: skip
    for part in (name, Path(name).stem):
        if (folder / part).exists():
            (tmp_path / part).symlink_to(folder / part)
    assert _run([sys.executable, "-m", "gyre_data", *command.split()[2:]], tmp_path) == shown


def test_the_session_of_the_checkout_gives_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    block = next(b for b in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) if "tests/data" in b)
    command, _, shown = block.partition("\n")
    assert _run([sys.executable, "-m", "gyre_data", *command.split()[2:]], tmp_path) == shown
    tree = _run([sys.executable, "-m", "gyre_data", "tree", "runs/cc"], tmp_path)
    assert len(re.findall("compaction @", tree)) == 2
    assert len(re.findall("sub_agent a", tree)) == 2


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_the_python_blocks_run(code: str, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    _run([sys.executable, "-c", code], tmp_path)


def test_exports_tell_what_the_page_shows(tmp_path: Path) -> None:
    block = next(b for b in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) if "gyre export sample" in b)
    for shown in block.removeprefix("$ ").split("\n$ "):
        command, _, output = shown.partition("\n")
        done = _run([sys.executable, "-m", "gyre_data", *shlex.split(command)[1:]], tmp_path)
        assert done.rstrip() == output.rstrip()


def test_the_table_has_every_format() -> None:
    importing, exporting = PAGE.split("\n# Exporting\n")
    exported = re.findall(r"^\| `([\w-]+)`.* \|$", exporting, re.MULTILINE)
    assert sorted(exported[1:]) == sorted(EXPORT_FORMATS)
    rows = re.findall(r"^\| `(\w+)` \|", importing, re.MULTILINE)
    assert rows == ["claude_code", "codex", "pi", "atif", "swe_agent", "api_log", "chat"] == list(FORMATS)
