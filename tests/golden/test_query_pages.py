"""docs/query.md and docs/admission.md hold what the commands print, and tables made from the code; their Python runs.

GYRE_TEST_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.main import app
from gyre_data.query import describe
from gyre_data.reasons import REASONS
from gyre_data.store import SAMPLE

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```console\n\$ gyre (?P<words>.*)\n(?P<told>(?:.*\n)*?)```$", re.MULTILINE)
PAGES = {
    "query.md": "| view | |\n|---|---|\n",
    "admission.md": "| reason | of | rule | what to do |\n|---|---|---|---|\n",
}


def table(page: str) -> str:
    if page == "query.md":
        return "".join(f"| `{name}` | {doc} |\n" for name, (doc, _) in describe().items())
    return "".join(f"| `{name}` | {told.level} | {told.rule} | {told.mend} |\n" for name, told in REASONS.items())


@pytest.mark.parametrize("page", PAGES)
def test_the_page_holds_what_the_commands_print(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def printed(block: re.Match[str]) -> str:
        done = CliRunner().invoke(app, shlex.split(block["words"]))
        assert done.exit_code == 0, done.output
        return f"```console\n$ gyre {block['words']}\n{done.output}```"

    text = (DOCS / page).read_text()
    wanted, number = BLOCK.subn(printed, text)
    before, head, rest = wanted.partition(PAGES[page])
    assert head
    wanted = before + head + table(page) + re.sub(r"^(\|.*\n)*", "", rest)
    if os.environ.get("GYRE_TEST_UPDATE_GOLDEN"):
        (DOCS / page).write_text(wanted)
    assert number >= 2
    assert (DOCS / page).read_text() == wanted


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_the_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(SAMPLE, "runs/mine")
    info = json.loads((SAMPLE / "run.json").read_text())
    Path("runs/mine/run.json").write_text(json.dumps({**info, "read_only": False}))
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        exec(compile(code, page, "exec"), names)


def test_every_setting_of_admission_is_on_its_page() -> None:
    from inspect import signature

    from gyre_data.admission import admit

    told = re.findall(r"^\| `(\w+)` \|", (DOCS / "admission.md").read_text().partition("## Settings")[2], re.MULTILINE)
    settings = [name for name in signature(admit).parameters if name != "runs"]
    assert told[: len(settings)] == settings
