"""docs/convert.md says what happens: its blocks run, its table names every format."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_data.convert.exporting import EXPORT_FORMATS
from gyre_data.convert.formats import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "convert.md").read_text()


def _run(words: list[str], folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "COLUMNS": "200"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
