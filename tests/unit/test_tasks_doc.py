"""docs/tasks.md: its task files load, its commands and keys are there, its worker works."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gyre_data.errors import ConfigError
from gyre_data.main import app
from gyre_proxy.launch.tasks import PLACEHOLDERS, Task, load_tasks
from gyre_proxy.launch.workspace import GitSource

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_its_task_files_load(tmp_path: Path) -> None:
    (tmp_path / "workspaces" / "count").mkdir(parents=True)
    loaded = []
    for text in blocks("toml"):
        (tmp_path / "tasks.toml").write_text(text)
        loaded += load_tasks(tmp_path)
    assert loaded[0].evaluator == ("python", "{tasks}/judge.py")
    assert loaded[0].overall_timeout_s == 1200
    assert "{env}" in loaded[1].container.exec


def test_every_key_and_placeholder_stands_there_and_every_flag_is_one() -> None:
    for field in dataclasses.fields(Task):
        assert not field.metadata.get("key", True) or f"`{field.name}`" in PAGE, field.name
    for name in PLACEHOLDERS:
        assert f"`{{{name}}}`" in PAGE, name
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    for flag in set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "\n".join(re.findall(r"`(--?[^`]*)`", PAGE)))) - {"--env"}:
        assert flag in shown, flag


def test_its_worker_answers_each_line() -> None:
    (program,) = blocks("python")
    order = {"execution": "e", "prompt": "p", "workspace": "/", "base_url": "http://x", "key": "k"}
    done = subprocess.run(
        [sys.executable, "-c", "run_agent = lambda *words: words[0] == 'p'\n" + program],
        input="".join(json.dumps({**order, "execution": name}) + "\n" for name in "ab"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"execution": n, "ok": True} for n in "ab"]


def test_tasks_come_as_json_lines_too_and_from_git(tmp_path: Path) -> None:
    rows = [{"id": "a", "prompt": "p", "workspace": {"git": "https://git.invalid/x.git", "ref": "v1"}}]
    rows.append({"id": "b", "prompt": "q", "workspace": {"git": "."}})
    (tmp_path / "set.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = load_tasks(tmp_path / "set.jsonl")
    assert first.workspace == GitSource(repository="https://git.invalid/x.git", ref="v1")
    assert second.workspace == GitSource(repository=str(tmp_path.resolve()), ref="HEAD")
    (tmp_path / "set.jsonl").write_text('{"id": "a"')
    with pytest.raises(ConfigError, match=r"set.jsonl:1 is not valid JSON"):
        load_tasks(tmp_path / "set.jsonl")


@pytest.mark.parametrize(
    ("text", "mend"),
    [
        ('container = { exec = "x", upp = "y" }', "nearest is 'up'"),
        ('container = { up = "x" }', "with exec"),
        ('command = "a"\nworker = "b"', "both command and worker"),
        ("workspace = 3", "wanted a folder or"),
        ('workspace = { ref = "x" }', "wanted a folder or"),
    ],
)
def test_a_wrong_key_says_what_to_do(tmp_path: Path, text: str, mend: str) -> None:
    (tmp_path / "tasks.toml").write_text(f'[[task]]\nid = "t"\nprompt = "p"\n{text}\n')
    with pytest.raises(ConfigError, match=mend):
        load_tasks(tmp_path)


def test_a_wrong_key_of_the_defaults_is_told_as_theirs(tmp_path: Path) -> None:
    text = '[defaults]\ntimeout = 5\n[[task]]\nid = "t"\nprompt = "p"\n'
    (tmp_path / "tasks.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"'timeout' in \[defaults\]; nearest is 'timeout_s'"):
        load_tasks(tmp_path)
    (tmp_path / "tasks.toml").write_text('[defaults]\ntimeout_s = 5\n[[task]]\nid = "t"\nprompt = "p"\npromt = "q"\n')
    with pytest.raises(ConfigError, match=r"'promt' in \[\[task\]\]; nearest is 'prompt'"):
        load_tasks(tmp_path)


def test_defaults_hold_for_all_tasks_and_a_task_may_differ(tmp_path: Path) -> None:
    text = '[defaults]\ncommand = "a"\ntimeout_s = 5\n'
    text += '[[task]]\nid = "t"\nprompt = "p"\n[[task]]\nid = "u"\nprompt = "p"\nworker = "b"\n'
    (tmp_path / "tasks.toml").write_text(text)
    first, second = load_tasks(tmp_path)
    assert (first.command, first.worker, first.timeout_s) == (("a",), None, 5)
    assert (second.command, second.worker, second.timeout_s) == (None, ("b",), 5)
