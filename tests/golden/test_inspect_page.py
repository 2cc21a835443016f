"""docs/inspect.md holds what the commands print, letter by letter; GYRE_TEST_UPDATE_GOLDEN=1 writes it anew."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "inspect.md"
BLOCK = re.compile(r"^```console\n\$ gyre (?P<words>.*)\n(?P<told>(?:.*\n)*?)```$", re.MULTILINE)


def test_the_page_holds_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def printed(block: re.Match[str]) -> str:
        done = CliRunner().invoke(app, shlex.split(block["words"]))
        assert done.exit_code == 0, done.output
        assert all(len(line) <= 80 for line in done.output.splitlines()), block["words"]
        return f"```console\n$ gyre {block['words']}\n{done.output}```"

    text = PAGE.read_text()
    wanted, number = BLOCK.subn(printed, text)
    if os.environ.get("GYRE_TEST_UPDATE_GOLDEN"):
        PAGE.write_text(wanted)
    assert number == 13
    assert PAGE.read_text() == wanted


def test_the_commands_of_the_readme_run() -> None:
    lines = re.findall(r"^gyre (.*\bsample\b[^#\n]*)", (PAGE.parents[1] / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        assert CliRunner().invoke(app, shlex.split(line)).exit_code == 0, line


def test_the_code_of_the_page_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), {})
