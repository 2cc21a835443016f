"""docs/folder.md: its programs run, its commands exist, its outputs are those of the tool."""

import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.main import COMMANDS, app
from gyre_data.pins import tag
from tests.unit.test_salvage import flip, made, only

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "folder.md").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda fd: None)
    monkeypatch.setattr("gyre_data.segment._sync", lambda fd: None)
    return made(Path("runs/a"))


def test_its_programs_run(run, capsys):
    tag(run, "v1")
    programs = re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        exec(compile(program, "docs/folder.md", "exec"), {})
    assert "e_3 2" in capsys.readouterr().out.splitlines()


def test_its_commands_do_what_it_says(run):
    def gyre(line: str) -> str:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line)]
        assert words[0] == "gyre"
        assert words[1] in COMMANDS
        return CliRunner().invoke(app, words[1:], env={"COLUMNS": "200"}).output

    lines = re.findall(r"^\$ (gyre .*)$", DOC, re.MULTILINE)
    assert len(lines) == 7
    verify, salvage, compact, version, rm, purge, merge = lines
    assert "runs/a: clean; manifest" in gyre(verify)
    file = only(run, "nodes", ".arrow")
    good = file.read_bytes()
    flip(file, 9500)
    shown = gyre(salvage)
    assert shown in DOC, shown
    file.write_bytes(good)
    assert "do it: gyre compact runs/a --yes" in gyre(compact)
    assert "look at it: gyre stats runs/a@v1" in gyre(version)
    gyre("gyre tag runs/a v1 --delete")
    assert "removed 1 execution" in gyre(rm)
    assert "purged 1 execution" in gyre(purge)
    made(Path("runs/b"), 2)
    tag(Path("runs/b"), "v1")
    assert "2 runs, " in gyre(merge)
    assert os.listdir("runs") != []
